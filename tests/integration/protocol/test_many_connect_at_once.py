"""Some hundreds of clients that connect at the same moment are all taken, also while the server does something else."""

import asyncio
import contextlib
import socket

import pytest
from aiohttp import web

from protocol.security.http import BACKLOG, serving

CROWD = 500


def test_a_crowd_connects_while_the_loop_is_busy():
    """The kernel keeps as many as the backlog; one more would be sent away for a second, and then for longer."""
    with open("/proc/sys/net/core/somaxconn", encoding="ascii") as file:
        if (most := int(file.read())) < CROWD:
            pytest.skip(f"this kernel keeps {most} connections at most")
    assert BACKLOG >= 2 * CROWD

    async def main():
        async with serving(web.Application(), "127.0.0.1", 0, None, shutdown_s=1.0) as port:
            with contextlib.ExitStack() as opened:
                crowd = [opened.enter_context(socket.socket()) for _ in range(CROWD)]
                for one in crowd:
                    # No await: nobody accepts meanwhile. Without a place a connection would wait for ever.
                    one.settimeout(60.0)
                    one.connect(("127.0.0.1", port))
            return True

    assert asyncio.run(main())
