"""Fuzz the peer's side: whatever a broker sends, a session must go on and must not flood the broker."""

import random
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from benchmarks.fuzz.engine import HOSTILE_FLOATS, HOSTILE_INTS, Choices, hostile_value
from benchmarks.fuzz.messages import plain
from protocol.codec import PRELUDE, decode, encode
from protocol.errors import ProtocolError
from protocol.messages.fields import LARGEST_VERSION
from protocol.messages.peers import Heartbeat, Hello, Refused, Welcome
from protocol.session import Progress, Session

MESSAGES = plain()
SILENT_S = 10.0
HEARTBEATS_S = (1.0, 0.5, 0.1, 30.0, *HOSTILE_FLOATS)


class SessionTarget:
    """Target for `protocol.session`."""

    name, unit = "session", "messages"

    def __init__(self) -> None:
        self.done = 0

    def make(self, rng: random.Random) -> bytes:
        return rng.randbytes(8 + rng.getrandbits(6))

    def run(self, data: bytes) -> None:
        choices = Choices(data)
        hello = Hello(role="actor", peer="a", incarnation=1)
        now = 100.0
        session = Session(hello, now)
        while choices.left:
            now += choices.pick((0.0, 0.01, 0.3, 1.0, 6.0, 1000.0))
            if choices.flag():
                self._receive(choices, session, now)
            version = max(0, min(LARGEST_VERSION, choices.pick(HOSTILE_INTS[:15])))
            progress = Progress(float(choices.byte()), choices.flag(), version, (("x", 1.0),))
            said = session.due(now, partial(replace, progress))
            assert len(said) <= 1, "more than one message at a time"
            for message in said:
                decode(encode(message))
                assert isinstance(message, Heartbeat if session.joined else Hello), (
                    "a message of another state"
                )
            assert session.due(now, partial(replace, progress)) == [], "the same moment asks twice"
        self._silence(session, now)

    def _silence(self, session: Session, now: float) -> None:
        """Check that the session sends Hello again to a broker that stays silent."""
        hellos = 0
        for step in range(400):
            hellos += sum(isinstance(m, Hello) for m in session.due(now + SILENT_S * step, Progress))
        assert hellos > 0, "a silent broker is never asked again"

    def _receive(self, choices: Choices, session: Session, now: float) -> None:
        self.done += 1
        message: Any = choices.pick(MESSAGES)
        match choices.below(6):
            case 0 | 1:
                message = Welcome(
                    run="r",
                    epoch=1,
                    heartbeat_s=choices.pick(HEARTBEATS_S),
                    policy_version=0,
                    attempt=choices.below(4),
                )
            case 2:
                message = Refused(code="unknown_peer", message="")
            case 3:
                name = choices.pick(message.__struct_fields__)
                message = msgspec.structs.replace(
                    message, **{name: hostile_value(choices.pick, getattr(message, name))}
                )
        try:
            message, _ = decode([PRELUDE, msgspec.msgpack.encode(message)])
        except (ProtocolError, OverflowError):
            return
        session.received(message, now)
