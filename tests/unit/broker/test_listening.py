"""A refused address is explained in one line: field, value, holder of the port, cure."""

import errno
import os
import socket

from broker.service import bind_failure, holder


def test_a_port_in_use_names_its_holder_and_the_cure():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = bind_failure("broker.endpoint", f"tcp://127.0.0.1:{port}", errno.EADDRINUSE)
    assert said.startswith(
        f"broker.endpoint is tcp://127.0.0.1:{port}, but the port is in use by process {os.getpid()} ("
    )
    assert said.endswith("); choose another one, or port 0 to take a free one")


def test_a_port_that_nobody_listens_on_has_no_holder():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert holder(bound.getsockname()[1]) == ""
