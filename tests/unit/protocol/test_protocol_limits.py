"""Every string and list of the protocol has a limit, and a peer that breaks one does not hinder others."""

import importlib
import pkgutil
import types
import typing

import msgspec
import numpy as np
import pytest

from broker.core import relays
from broker.core.tasks import MAX_TASK_BYTES
from protocol import messages
from protocol.codec import MAX_HEADER_BYTES, MAX_QUOTED, PRELUDE, decode, encode, unpack_arrays
from protocol.errors import Malformed, ProtocolError
from protocol.messages.episodes import LeaseTask, PutTasks, Sampling, Segment, SegmentAck
from protocol.messages.fields import MAX_NAME, MAX_SOURCES, ArraySpec, Count, Ids
from protocol.messages.peers import (
    Generate,
    Generators,
    Heartbeat,
    Hello,
    PublishWeights,
    QueueStats,
    Refused,
    WeightsReady,
)
from tests.broker_driver import Driver, group, segment_frames

MODULES = [
    importlib.import_module(f"protocol.messages.{file.name}")
    for file in pkgutil.iter_modules(messages.__path__)
]
STRUCTS = [
    kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
]


def unbounded(annotation, bounds=()):
    """Return the parts of a field's type that have no limit of length or size."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        metas = [meta for meta in annotation.__metadata__ if isinstance(meta, msgspec.Meta)]
        return unbounded(arguments[0], metas)
    if origin in (typing.Union, types.UnionType):
        return [found for part in arguments for found in unbounded(part)]
    found = [inner for part in arguments if origin is not typing.Literal for inner in unbounded(part)]
    sized = annotation in (str, bytes, list, dict) or origin in (list, dict)
    if sized and not any(meta.max_length is not None for meta in bounds):
        found.append(annotation)
    if annotation is int and not any(meta.le is not None for meta in bounds):
        found.append(annotation)
    return found


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_field_is_bounded(kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    loose = {name: what for name in kind.__struct_fields__ if (what := unbounded(hints[name]))}
    assert loose == {}


def test_what_counts_as_unbounded():
    assert unbounded(list[int]) == [int, list[int]]
    assert unbounded(str | None) == [str]
    assert unbounded(Ids) == unbounded(Count) == []


def hello(**fields):
    return Hello(**({"role": "generator", "peer": "g", "incarnation": 1} | fields))


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (hello(endpoint="tcp://" + "1" * 200_000), "endpoint"),
        (hello(weights_url="http://" + "1" * 600), "weights_url"),
        (hello(host="h" * 257), "host"),
        (hello(incarnation=2**64 - 1), "incarnation"),
        (Generate(request_id="r", max_tokens=2**40), "max_tokens"),
        (Generate(request_id="r", max_tokens=1, top_k=2**40), "top_k"),
        (Generate(request_id="r", max_tokens=1, seed=2**64 - 1), "seed"),
        (Generate(request_id="r", max_tokens=1, stop_token_ids=[1] * 4097), "stop_token_ids"),
        (Generate(request_id="r", max_tokens=1, arrays=[ArraySpec("a" * 257, "i4", 0, 0)]), "arrays"),
        (Generate(request_id="r", max_tokens=1, arrays=[ArraySpec("a", "i4", 0, 0)] * 65), "arrays"),
        (Heartbeat(policy_version=2**31), "policy_version"),
        (Heartbeat(gauges={"x" * 257: 0.0}), "gauges"),
        (PutTasks(tasks=group("g", 1, deadline_s=float("inf"))), "deadline_s"),
        (PutTasks(tasks=group("g", 1, sampling=Sampling(temperature=float("nan")))), "temperature"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_too_much_is_refused_by_the_decoder_which_says_where(message, where):
    with pytest.raises(ProtocolError, match=where):
        decode([PRELUDE, msgspec.msgpack.encode(message)])


def test_what_the_decoder_says_is_short_whatever_it_was_given():
    header = msgspec.msgpack.encode({"type": "hello", "role": "x" * 200_000, "peer": "p", "incarnation": 1})
    with pytest.raises(Malformed) as caught:
        decode([PRELUDE, header])
    assert len(str(caught.value)) < MAX_QUOTED + 100


def test_two_arrays_of_one_name_are_none():
    with pytest.raises(Malformed, match="second array 'a'"):
        unpack_arrays([ArraySpec("a", "i4", 1, 0)] * 2, bytes(8))


# --- the broker ---------------------------------------------------------------------------------------------


def test_generators_with_the_longest_names_do_not_keep_the_list_from_actors():
    driver = Driver()
    driver.hello("generator", "generator-0", endpoint="tcp://10.0.0.1:1", weights_url="http://10.0.0.1:2")
    driver.actor()
    for n in range(1000):
        driver.hello("generator", f"{n:0256d}", endpoint="ä" * 512, weights_url=f"http://{n:0500d}")
    (*_, last) = driver.got("actor", Generators)
    assert last.generators[0].endpoint == "tcp://10.0.0.1:1"
    assert len(encode(last)[1]) <= MAX_HEADER_BYTES
    assert len(encode(driver.actor("another")[1])[1]) <= MAX_HEADER_BYTES


def test_a_generator_is_told_a_bounded_number_of_sources_the_learners_among_them(monkeypatch):
    # With one child each, the hosts are a chain.
    monkeypatch.setattr(relays.RelayTree.__init__, "__defaults__", (1,))
    driver = Driver()
    driver.learner()
    for n in range(100):
        name = f"generator-{n}"
        driver.hello("generator", name, host=name, weights_url=f"http://{n:0500d}", passes_on=True)
    url = "http://learner:1"
    driver.say("learner", PublishWeights(epoch=1, version=0, manifest="m", url=url))
    (ready,) = driver.got("generator-99", WeightsReady)
    assert len(ready.sources) == MAX_SOURCES
    assert ready.sources[-1] == url
    assert decode(encode(ready))[0] == ready


def test_gauges_of_many_actors_do_not_keep_them_from_the_learner():
    driver = Driver()
    driver.learner()
    for n in range(40):
        driver.actor(f"a{n}", tasks=0)
        driver.say(f"a{n}", Heartbeat(gauges={f"{n}{'x' * 50}{i}": 1.0 for i in range(64)}))
    driver.wait(1.5)
    (stats, *_) = driver.got("learner", QueueStats)
    assert decode(encode(stats))[0] == stats
    assert stats.gauges["broker/tasks_queued"] == 0.0


def test_gauges_that_are_no_numbers_are_left_out():
    driver = Driver()
    driver.actor()
    driver.say("actor", Heartbeat(gauges={"a": float("nan"), "b": float("inf"), "ü": 1.0, "c": 2.0}))
    assert driver.dispatcher.state.peers.get("actor").heartbeat.gauges == {"c": 2.0}


def test_a_trajectory_longer_than_its_task_allows_is_refused_and_the_task_run_again():
    driver = Driver()
    driver.learner()
    driver.put(*group("g", 1, sampling=Sampling(max_trajectory_tokens=6)))
    driver.actor()
    (lease,) = driver.leases()
    assert driver.segment("actor", lease, status="unfinished").status == "stored"
    ack = driver.segment("actor", lease, 1, offset=4)
    assert ack.reason == "invalid: 8 tokens of the trajectory, the task's max_trajectory_tokens is 6"
    assert driver.balanced()
    (again,) = driver.leases()
    assert again.attempt == 1
    assert driver.segment("actor", again, tokens=6).status == "stored"
    assert driver.balanced()


def test_a_task_that_fits_into_no_lease_is_refused_when_it_is_put():
    driver = Driver()
    driver.learner()
    driver.actor()
    (small,), (large,) = group("s", 1), group("l", 1, data={"x": "y" * (MAX_TASK_BYTES + 100)})
    (refused,) = [m for m in driver.put(small, large) if isinstance(m, Refused)]
    assert refused.code == "bad_task"
    assert "'l.0'" in refused.message
    (largest,) = group("l", 1, data={"x": "y" * (MAX_TASK_BYTES - 200)})
    driver.put(largest)
    (lease,) = driver.got("actor", LeaseTask)
    assert lease.task == largest
    assert decode(encode(lease))[0] == lease


def test_the_longest_task_id_has_a_trajectory():
    driver = Driver()
    driver.learner()
    (task,) = group("g", 1)
    driver.put(msgspec.structs.replace(task, task_id="t" * MAX_NAME))
    driver.actor()
    (lease,) = driver.leases()
    frames = segment_frames(lease)
    assert isinstance(decode(frames)[0], Segment)
    assert [m.status for m in driver.say_frames("actor", frames) if isinstance(m, SegmentAck)] == ["stored"]
    assert np.array_equal([len(decode(encode(d))[0].unit_id) for d in driver.deliveries()], [1])
