"""A host drains at one signal, ends with a code that engines can rely on, and changes nothing that hosts share."""

import json

import pytest

from launch.errors import COME_BACK, DONE, ConfigError, NoAnswer, PathLost, exit_code
from launch.fleet.ticket import Ticket, product_version
from launch.run_file.load import check
from launch.supervise import host as host_module
from launch.supervise.host import (
    GONE_S,
    ORPHANS_S,
    HostCourse,
    HostOptions,
    Step,
    about,
    config_of_host,
    counts_of_host,
    refuse_overrides,
    run_host,
)
from launch.supervise.posts import posts_of_host
from protocol.codec import MAJOR, MINOR
from protocol.processes import SUPERVISED, supervised

RUN, GONE = {"generator-a-0": None, "actor-a-0": None}, {"generator-a-0": 0, "actor-a-0": 0}


def test_a_host_ends_with_0_when_the_run_is_over_or_it_was_drained_by_command():
    course = HostCourse(90.0)
    assert course.look({**RUN, "actor-a-0": 0}, 1.0).code is None
    assert course.look(GONE, 2.0).code == 0


def test_a_host_waits_for_processes_that_were_not_started_yet():
    course = HostCourse(90.0)
    assert course.look({"generator-a-0": 0}, 1.0, waits_to_start=True).code is None


def test_an_orphaned_host_ends_with_75_and_takes_the_others_with_it():
    course = HostCourse(90.0)
    orphaned = {"generator-a-0": COME_BACK, "actor-a-0": None}
    assert course.look(orphaned, 0.0) == course.look(orphaned, ORPHANS_S)
    assert not course.leaving
    course.look(orphaned, ORPHANS_S + 0.1)
    assert course.look(orphaned, ORPHANS_S + 0.2).drain
    assert course.look({**GONE, "generator-a-0": COME_BACK}, 99.0).code == COME_BACK
    assert HostCourse(90.0).look({**GONE, "generator-a-0": COME_BACK}, 0.0).code == COME_BACK


def test_a_second_signal_within_two_seconds_is_the_first_and_a_later_one_kills():
    course = HostCourse(90.0)
    course.signalled(10.0)
    assert course.look(RUN, 10.1).drain
    course.signalled(11.9)
    assert not course.look(RUN, 12.0).kill
    course.signalled(12.1)
    assert course.look(RUN, 12.2).kill
    assert not course.look(RUN, 12.3).kill
    assert course.look({"generator-a-0": -9, "actor-a-0": -9}, 12.4).code == COME_BACK


@pytest.mark.parametrize("when", ["before", "while the head is asked"])
@pytest.mark.parametrize("answers", [True, False])
def test_a_signal_while_the_head_is_awaited_starts_nothing_and_is_no_fault(monkeypatch, when, answers):
    course, asked = HostCourse(90.0), []
    if when == "before":
        course.signalled(0.0)

    def fetch(http, *, keys):
        asked.append(http)
        course.signalled(0.0)
        if not answers:
            raise NoAnswer("nobody is there")

    monkeypatch.setattr(host_module, "fetch", fetch)
    monkeypatch.setattr(host_module, "POLL_S", 0.0)
    assert host_module.await_head("h:1", None, course) is False
    assert len(asked) == (when != "before")


def test_what_has_not_drained_within_the_grace_is_killed():
    course = HostCourse(30.0)
    course.signalled(0.0)
    assert course.look(RUN, 0.1).drain
    assert not course.look(RUN, 29.9).kill
    assert course.look(RUN, 30.0).kill


def test_a_signal_before_anything_was_started_ends_the_host():
    course = HostCourse(30.0)
    course.signalled(0.0)
    assert course.look({}, 0.1).code == COME_BACK


def config(**changes):
    return check({"model": {"path": "m"}, "env": {"name": "calculator"}, **changes}, "a test")


@pytest.mark.parametrize(
    ("settings", "gpus", "given", "expected"),
    [
        ({}, 0, (None, None), (1, 2)),
        ({"generator": {"count": 2}, "actor": {"count": 6}}, 0, (None, None), (1, 3)),
        ({"generator": {"count": 2}, "actor": {"count": 3}}, 4, (None, None), (4, 6)),
        ({"generator": {"tensor_parallel_size": 2}}, 4, (None, None), (2, 4)),
        ({"generator": {"tensor_parallel_size": 8}}, 4, (None, None), (1, 2)),
        ({}, 4, (0, 5), (0, 5)),
        ({}, 4, (3, 0), (3, 0)),
        ({}, 0, (0, None), None),
        ({}, 0, (-1, 1), None),
    ],
)
def test_a_host_has_one_generator_for_each_gpu_and_actors_in_the_ratio_of_the_run(
    settings, gpus, given, expected
):
    if expected is None:
        with pytest.raises(ConfigError, match="--generators"):
            counts_of_host(config(**settings), gpus, *given)
    else:
        assert counts_of_host(config(**settings), gpus, *given) == expected


def test_only_what_is_of_this_host_may_be_overridden():
    refuse_overrides(["generator.threads=2", "generator.advertised_host=10.0.0.7"])
    for shared in ("env.params.seed=2", "learner.steps=1", "model.path=x", "generator.dtype=float16"):
        with pytest.raises(ConfigError, match="set it on the head"):
            refuse_overrides([shared])


def ticket(**changes):
    own = config(
        broker={"endpoint": "tcp://10.0.0.5:5755", "http": "10.0.0.5:5756"},
        weights={"http": "10.0.0.5:5757"},
        generator={"endpoint": "tcp://0.0.0.0:5760", "count": 3},
        **changes,
    )
    return Ticket(offbeat="1", protocol="4.5", run="r", host="gpu7", config=own)


def of_host(given, **changes):
    rest = {"keys": None, "sources": {}, "model": None, "counts": (2, 1), "grace_s": 90.0, **changes}
    return config_of_host(given, **rest)


def test_the_settings_of_a_host_are_those_of_the_run_with_what_is_its_own(tmp_path):
    made = of_host(ticket(), keys=tmp_path / "keys", model=tmp_path / "m")
    assert (made.generator.count, made.actor.count) == (2, 1)
    assert made.generator.endpoint == "tcp://0.0.0.0:0"
    assert made.actor.drain_timeout_s == 80.0
    assert made.security.keys == str(tmp_path / "keys")
    assert made.model.path == str(tmp_path / "m")
    assert made.learner == ticket().config.learner
    names = [post.name for post in posts_of_host(made, "gpu7")]
    assert names == ["generator-gpu7-0", "generator-gpu7-1", "actor-gpu7-0"]


def test_the_environment_that_came_with_the_ticket_is_run_under_its_name_on_the_head(tmp_path):
    given = ticket(env={"name": "/head/mine.py:Suite"})
    made = of_host(given, sources={"/head/mine.py": tmp_path / "mine.py"})
    assert made.env.name == f"{tmp_path / 'mine.py'}:Suite"


def test_overrides_win_and_are_checked():
    made = of_host(ticket(), overrides=["generator.endpoint=tcp://10.0.0.7:9", "generator.threads=3"])
    assert (made.generator.endpoint, made.generator.threads) == ("tcp://10.0.0.7:9", 3)
    with pytest.raises(ConfigError, match=r"generator\.threads"):
        of_host(ticket(), overrides=["generator.threads=none"])


def test_a_process_tells_of_the_one_before_it():
    (post, *_) = posts_of_host(of_host(ticket()), "gpu7")
    assert supervised(about(post, "gpu7", "slurm 7", "env=1")) == supervised(
        {SUPERVISED: json.dumps({"host": "gpu7", "job": "slurm 7", "digest": "env=1"})}
    )
    post.backoff.reasons.append("killed")
    post.backoff.total = 1
    told = supervised(about(post, "gpu7", "", ""))
    assert (told.restarts, told.died) == (1, "killed")


def test_a_process_that_was_starting_when_the_run_ended_does_not_hold_its_host():
    course = HostCourse(90.0)
    codes = {"generator-a-0": DONE, "actor-a-0": None}
    course.heard(0.0, answers=False)
    assert course.look(codes, GONE_S) == Step()
    assert course.look(codes, GONE_S + 1.0) == Step(drain=True)
    assert course.look({**codes, "actor-a-0": 1}, GONE_S + 2.0).code == DONE


def test_a_broker_that_answers_again_keeps_a_host_of_which_a_process_was_drained():
    course = HostCourse(90.0)
    codes = {"generator-a-0": DONE, "actor-a-0": None}
    course.heard(0.0, answers=False)
    course.heard(100.0, answers=True)
    course.heard(101.0, answers=False)
    assert course.look(codes, GONE_S + 50.0) == Step()
    # Nor does silence alone end a host: no process has heard that the run is over.
    silent = HostCourse(90.0)
    silent.heard(0.0, answers=False)
    assert silent.look({**codes, "generator-a-0": None}, 10 * GONE_S) == Step()


def test_a_path_that_loses_large_packets_is_found_before_anything_is_fetched_and_may_heal(
    tmp_path, monkeypatch
):
    given = ticket().model_copy(update={"offbeat": product_version(), "protocol": f"{MAJOR}.{MINOR}"})
    monkeypatch.setattr(host_module, "HostSignals", lambda course: None)
    monkeypatch.setattr(host_module, "fetch", lambda http, *, keys: None)
    monkeypatch.setattr(
        host_module, "path_trouble", lambda endpoint, keys, peer: f"{endpoint} {peer}: lower the MTU"
    )
    monkeypatch.setattr(host_module, "model_of_ticket", lambda *_, **__: pytest.fail("it fetches the model"))
    options = HostOptions(overrides=(f"run.dir={tmp_path}",))
    with pytest.raises(PathLost, match=r"tcp://10\.0\.0\.5:5755 actor-gpu7-0: lower the MTU") as caught:
        run_host(given, options, {}, "gpu7", lambda text: None)
    assert exit_code(caught.value) == COME_BACK
