"""protocol/SPEC.md names the messages, fields and limits of the code."""

import re
from pathlib import Path

import pytest

from actors.generator.requests import MAX_REQUESTS, MAX_REQUESTS_OF_ACTOR
from broker.core.actors import DRAINING, FULL
from broker.core.peers import MAX_GAUGES, MAX_MERGED, MAX_PEERS
from broker.core.records import OUTCOMES
from broker.core.tasks import MAX_TASK_BYTES, REMEMBERED_TASKS
from protocol import codec
from protocol.arrays import TOKEN_ARRAYS
from protocol.codec import MAX_ENCLOSED, AnyMessage
from protocol.messages import fields
from protocol.messages.episodes import Segment

ROOT = Path(__file__).resolve().parents[3]
SPEC = (ROOT / "protocol" / "SPEC.md").read_text()


@pytest.mark.parametrize("kind", AnyMessage.__args__, ids=lambda kind: kind.__name__)
def test_every_message_has_a_row_with_its_fields(kind):
    (row,) = [line for line in SPEC.splitlines() if line.startswith(f"| `{kind.__name__}`")]
    text = SPEC if kind is Segment else row
    missing = [name for name in kind.__struct_fields__ if not re.search(rf"\b{name}\b", text)]
    assert [name for name in missing if name != "arrays"] == []


def test_limits_are_those_of_the_code():
    for number in (
        codec.MAX_HEADER_BYTES,
        codec.MAX_BODY_BYTES,
        codec.MAX_MESSAGE_BYTES,
        codec.MAX_FRAMES,
        MAX_ENCLOSED,
        fields.MAX_ARRAYS,
        fields.MAX_NAME,
        fields.MAX_ID,
        fields.MAX_ADDRESS,
        fields.MAX_PATH,
        fields.MAX_TEXT,
        fields.MAX_ITEMS,
        fields.MAX_TASKS,
        fields.MAX_IDS,
        fields.MAX_KEYS,
        fields.MAX_SOURCES,
        MAX_TASK_BYTES,
        MAX_MERGED,
        MAX_REQUESTS,
        MAX_REQUESTS_OF_ACTOR,
        MAX_GAUGES,
        MAX_PEERS,
        REMEMBERED_TASKS,
    ):
        assert f"{number:,}" in SPEC
    assert f"version {codec.MAJOR}.{codec.MINOR}" in SPEC.splitlines()[0]


def test_refusals_outcomes_and_arrays_are_listed():
    source = "".join(path.read_text() for path in (ROOT / "broker").rglob("*.py"))
    codes = set(re.findall(r'\.refuse\(\s*[\w.]+,\s*"([a-z_]+)"', source))
    codes |= set(re.findall(r'return "refused", f?"([a-z_]+):', source))
    assert {"unknown_peer", "queue_full", "gap", "superseded"} <= codes
    for word in (*codes, *OUTCOMES, *TOKEN_ARRAYS, DRAINING, FULL):
        assert f"`{word}`" in SPEC or f" {word} " in SPEC or f"`{word} " in SPEC, word
