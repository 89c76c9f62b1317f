"""protocol/SPEC.md names the messages, fields, defaults and limits of the code."""

import ast
import re
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect

from actors.generator.requests import MAX_REQUESTS, MAX_REQUESTS_OF_ACTOR
from broker.config import BrokerConfig
from broker.core.actors import DRAINING, FULL
from broker.core.dispatch import Dispatcher
from broker.core.peers import MAX_MERGED, MAX_PEERS
from broker.core.records import OUTCOMES
from broker.core.tasks import MAX_TASK_BYTES, REMEMBERED_TASKS
from broker.output_commit import NEED_NOT_WAIT
from protocol import codec
from protocol.arrays import TOKEN_ARRAYS
from protocol.codec import MAX_ENCLOSED, AnyMessage
from protocol.gauges import MAX_GAUGES
from protocol.messages import fields
from protocol.messages.episodes import Failure, Reward, Sampling, Segment, Task, TaskStart, Turn, TurnMark
from protocol.messages.fields import ArraySpec
from protocol.messages.peers import GeneratorInfo, Hello, Welcome
from protocol.session import MISSED_BEATS, SLOW_BROKER_S

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


CLIENT = ROOT / "tests" / "spec_client.py"
PARTS = (Task, TaskStart, Sampling, Failure, GeneratorInfo, Turn, TurnMark, Reward, ArraySpec)


def row(kind):
    """Return the row of the table for a Struct."""
    config, info = kind.__struct_config__, inspect.type_info(kind)
    name = f"`{config.tag}`" if config.tag else kind.__name__
    return f"| {name} | " + ", ".join(map(described, info.fields)) + " |"


def described(field):
    """Return name, type and default of a field, as ``\\`peer\\` str 1..256``."""
    text = f"`{field.encode_name}` {type_of(field.type)}"
    return text if field.required else f"{text} = {default_of(field)}"


def default_of(field):
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if value is None:
        return "nil"
    # An empty map has the default of every field.
    return "{}" if isinstance(value, msgspec.Struct) else str(msgspec.json.encode(value), "ascii")


def type_of(kind):
    match kind:
        case inspect.StrType():
            return f"str {kind.min_length or 0}..{kind.max_length}"
        case inspect.IntType():
            return f"int {number(kind.ge)}..{number(kind.le)}"
        case inspect.FloatType(ge=None, gt=None):
            return "float"
        case inspect.FloatType():
            low = f"above {number(kind.gt)}" if kind.ge is None else f"from {number(kind.ge)}"
            return f"float {low}" + ("" if kind.le is None else f" to {number(kind.le)}")
        case inspect.BoolType():
            return "bool"
        case inspect.BytesType():
            return f"bytes {kind.min_length or 0}..{kind.max_length}"
        case inspect.AnyType():
            return "any"
        case inspect.LiteralType():
            return "/".join(value or '""' for value in kind.values)
        case inspect.StructType():
            return kind.cls.__name__
        case inspect.ListType():
            return f"list of {type_of(kind.item_type)}"
        case inspect.TupleType():
            return "[" + ", ".join(map(type_of, kind.item_types)) + "]"
        case inspect.DictType():
            return f"map of {type_of(kind.value_type)}"
        case inspect.UnionType():
            return " or ".join(map(type_of, kind.types))
        case inspect.NoneType():
            return "nil"
    raise AssertionError(kind)


def number(value):
    if abs(value) >= 2**31 - 1:
        power = (abs(int(value)) + 1).bit_length() - 1
        text = f"2^{power}" + ("-1" if int(abs(value)) == 2**power - 1 else "")
        return f"-({text})" if value < 0 else text
    return str(int(value)) if value == int(value) else str(value)


@pytest.mark.parametrize("kind", [*AnyMessage.__args__, *PARTS], ids=lambda kind: kind.__name__)
def test_the_row_of_each_message_has_its_type_fields_and_defaults(kind):
    expected = row(kind)
    start = expected[: expected.index("|", 1) + 1]
    rows = [line for line in SPEC.partition("## 12. Fields")[2].splitlines() if line.startswith(start)]
    assert rows == [expected], "put this row into section 12 of protocol/SPEC.md"


def test_limits_of_a_welcome_are_listed():
    dispatcher = Dispatcher(BrokerConfig(), run="run", max_policy_lag=4, now=0.0, boot="b")
    sent = dispatcher.handle("a", Hello(role="actor", peer="a", incarnation=1), [b""], 0.0)
    (welcome,) = [send.message for send in sent if isinstance(send.message, Welcome)]
    assert set(welcome.limits) == {
        "header_bytes",
        "body_bytes",
        "queued_tasks",
        "unacknowledged_segments",
    }
    assert all(f"- `{key}`:" in SPEC for key in welcome.limits)


def test_messages_that_overtake_and_waits_of_a_join_are_named():
    assert f"The broker sends {' '.join(kind.__name__ for kind in NEED_NOT_WAIT)} at once" in SPEC.replace(
        ", ", " "
    ).replace(" and ", " ").replace("\n", " ")
    assert f"{SLOW_BROKER_S:g} seconds after a late Welcome" in SPEC.replace("\n", " ")
    assert MISSED_BEATS == 5


def test_the_client_imports_nothing_of_offbeat():
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(CLIENT.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
        )
    }
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert imported >= {"msgpack", "numpy", "zmq"}
    assert not imported & ours
