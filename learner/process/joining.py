"""Connects a learner to the broker."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from learner.config import LearnerConfig
from learner.errors import BrokerRefused
from protocol.errors import LinkDown
from protocol.messages.fields import DeliveryUnit
from protocol.messages.peers import Hello
from protocol.session import Progress
from protocol.sockets import ThreadLink

JOIN_TIMEOUT_S = 60.0
DELIVERY_UNITS: dict[str, DeliveryUnit] = {
    "groups": "group",
    "trajectories": "trajectory",
    "windows": "segment",
}


def join(
    config: LearnerConfig,
    broker: str,
    run: str,
    *,
    epoch: int,
    progress: Callable[[], Progress],
    lineage: int | None = None,
    step: int = 0,
    stepped_back: bool = False,
    keys: Path | None = None,
) -> ThreadLink:
    """Connect to the broker as this epoch's learner.

    Args:
        progress: called from the link's thread for each heartbeat.
        lineage: epoch that began the line of checkpoints; None: this one.
        step: learner steps that the checkpoint covers.
        stepped_back: whether the run went back to an earlier checkpoint on purpose.
        keys: folder of the keys; None: nothing is encrypted.

    Raises:
        LinkDown: no broker answered, or it serves another run.
    """
    hello = Hello(
        role="learner",
        peer="learner",
        incarnation=epoch,
        pid=os.getpid(),
        host=socket.gethostname(),
        epoch=epoch,
        lineage=epoch if lineage is None else lineage,
        step=step,
        step_back=stepped_back,
        deliver=DELIVERY_UNITS[config.train_on],
    )
    link = ThreadLink(broker, hello, progress=progress, keys=keys)
    await_broker(link, broker)
    welcome = link.session.welcome
    if welcome is not None and welcome.run != run:
        raise LinkDown(f"the broker at {broker} serves run {welcome.run!r}, this learner belongs to {run!r}")
    return link


def await_broker(link: ThreadLink, broker: str) -> None:
    """Wait until the broker has answered.

    Raises:
        LinkDown: the broker did not answer within `JOIN_TIMEOUT_S`.
        BrokerRefused: the broker will never let this process join.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while not link.session.joined:
        # A person may list the key while the learner waits, so a wrong key is not the end.
        if link.refused is not None and link.refused.code != "wrong_key":
            raise BrokerRefused(
                f"the broker refused the learner ({link.refused.code}): {link.refused.message}"
            )
        if time.monotonic() > deadline:
            raise LinkDown(
                link.trouble
                or f"no broker took the learner on at {broker} within {JOIN_TIMEOUT_S:g} s; is it started, and is "
                "broker.endpoint the same for both?"
            )
        time.sleep(0.05)
