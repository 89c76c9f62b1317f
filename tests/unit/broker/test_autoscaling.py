"""Advice on the numbers of generators and actors: what is asked for, when nothing is, and how the broker shows it."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from broker.config import FleetConfig
from broker.core.autoscaling import CHANGE_S, Autoscaler, Bounds, Counts, Look
from broker.core.state import gauges_of
from broker.metrics import prometheus
from broker.status import status
from launch.errors import ConfigError
from launch.run_file.load import check
from protocol.messages.peers import Heartbeat, Hello
from protocol.wanted import Wanted
from tests.broker_driver import Driver


class Course:
    """A run whose figures grow at constant rates."""

    def __init__(self, generators=2, actors=2, bounds=None, settle_steps=1):
        self.scaler = Autoscaler(bounds or Bounds(), settle_steps)
        self.counts = Counts(generators, actors)
        self.look = Look(at=0.0, generators=generators, actors=actors, trained_tokens=0.0)

    def run(self, seconds, *, pace=1000.0, idle=0.5, rate=300.0, dropped=0.2, unused=0.0, **now):
        """Let a time pass, in which the learner makes a step each second."""
        advice = None
        for _ in range(int(seconds)):
            one = self.look
            trained = pace * (1 - idle)
            self.look = replace(
                one,
                at=one.at + 1,
                trained_tokens=one.trained_tokens + trained,
                busy_s=one.busy_s + 1 - idle,
                idle_s=one.idle_s + idle,
                sampled_tokens=one.sampled_tokens + rate * one.generators * (1 - unused),
                serving_s=one.serving_s + one.generators,
                unused_s=one.unused_s + one.generators * unused,
                kept_tokens=one.kept_tokens + trained,
                dropped_tokens=one.dropped_tokens + trained * dropped,
                **now,
            )
            advice = self.scaler.look(self.look, self.counts)
        return advice

    def follow(self, advice):
        self.counts = advice.counts
        self.scaler.look(self.look, self.counts)
        self.look = replace(self.look, generators=self.counts.generators, actors=self.counts.actors)


def test_a_waiting_learner_gets_what_its_pace_needs():
    advice = Course().run(90)
    # ceil(1000 tokens/s * 1.2 / 300 tokens/s)
    assert advice.counts == Counts(4, 2)
    assert advice.measured
    assert advice.reason == (
        "the learner is idle 50% of the time; its pace needs 1,200 tokens/s, and a generator samples 300"
    )


def test_at_most_twice_as_many_at_a_time():
    assert Course(generators=2).run(90, idle=0.9, pace=9000.0).counts.generators == 4


def test_a_learner_that_is_never_idle_may_do_with_fewer_but_not_with_fewer_than_lacked_tokens():
    course = Course(generators=8)
    advice = course.run(90, idle=0.0, rate=150.0)
    assert advice.counts.generators == 6
    course.follow(advice)
    advice = course.run(90, idle=0.2, rate=160.0)
    assert advice.counts.generators == 8
    course.follow(advice)
    advice = course.run(600, idle=0.0, rate=150.0)
    assert advice.counts.generators == 8
    assert "fewer generators would not do" in advice.reason


def test_further_generators_that_brought_nothing_leave_again():
    course = Course(generators=2)
    course.follow(course.run(90, idle=0.5))
    assert course.counts.generators == 4
    advice = course.run(90, idle=0.49, rate=150.0)
    assert advice.counts.generators == 2
    assert "generators are not what the learner waits for" in advice.reason
    course.follow(advice)
    assert course.run(1000, idle=0.5).counts.generators == 2


def test_actors_come_first_where_tasks_wait_for_them():
    advice = Course(actors=4).run(90, unused=0.3, tasks_waiting=True)
    assert advice.counts == Counts(2, 5)
    assert advice.reason == "generators idle 30% of the time while tasks wait for an actor"


def test_nothing_is_asked_for_before_it_is_measured():
    course = Course()
    assert not course.run(30).measured
    silent = Autoscaler(Bounds(), 1)
    for second in range(200):
        advice = silent.look(Look(float(second), 2, 2, None), Counts(2, 2))
    assert (advice.measured, advice.counts) == (False, Counts(2, 2))
    nobody = Autoscaler(Bounds(), 1).look(Look(0.0, 0, 0, None), Counts(0, 0))
    assert not nobody.measured


def test_nothing_is_asked_for_while_the_last_one_has_not_joined():
    course = Course()
    course.run(90)
    course.counts = Counts(4, 2)
    advice = course.run(200)
    assert advice.counts == course.counts
    assert advice.reason.startswith("the last change is under way: 2 of 4 generators")


def test_one_change_a_minute():
    course = Course()
    course.follow(course.run(90))
    advice = course.run(CHANGE_S - 2)
    assert advice.counts == course.counts


def test_a_change_that_is_reached_in_parts_is_one_change():
    course = Course(generators=8)
    advice = course.run(90, idle=0.0, rate=150.0)
    assert advice.counts.generators == 6
    for number in (7, 6):
        course.counts = Counts(number, 2)
        course.look = replace(course.look, generators=number)
        advice = course.run(2, idle=0.0, rate=150.0)
    assert advice.reason == "the last change is 1 s old"
    assert advice.counts.generators == 6


def test_none_leaves_while_a_version_is_fetched():
    course = Course(generators=8)
    advice = course.run(90, idle=0.0, rate=150.0, fetching=True)
    assert advice.counts.generators == 8
    assert advice.reason == "none leaves while a version is fetched"
    assert course.run(1, idle=0.0, rate=150.0, fetching=False).counts.generators == 6


def test_bounds_hold_at_once_and_are_named():
    assert Course(generators=9, bounds=Bounds((1, 4))).run(1).counts.generators == 4
    advice = Course(bounds=Bounds((1, 2))).run(90)
    assert advice.counts.generators == 2
    assert advice.reason.endswith("fleet.generators allows 1 to 2")


def test_a_change_that_takes_back_the_one_before_doubles_the_pause():
    course = Course(generators=8)
    course.follow(course.run(90, idle=0.0, rate=150.0))
    course.follow(course.run(90, idle=0.2, rate=160.0))
    assert course.counts.generators == 8
    advice = course.run(100, idle=0.07, rate=130.0)
    assert "the last change is" in advice.reason
    assert course.run(30, idle=0.07, rate=130.0).counts.generators == 9


def test_a_learner_that_counts_anew_is_measured_anew():
    course = Course()
    course.run(90)
    course.look = replace(course.look, busy_s=0.0, idle_s=0.0, trained_tokens=0.0)
    assert not course.run(3).measured
    assert course.run(90).counts.generators == 4


# --- the broker -------------------------------------------------------------------------------------------


def driven(seconds=100):
    driver = Driver(lag=0)
    driver.learner()
    driver.actor("actor-0")
    generator = Hello(role="generator", peer="generator-0", incarnation=1, endpoint="tcp://10.0.0.7:1")
    driver.say("generator-0", generator)
    go_on(driver, range(seconds))
    return driver


def go_on(driver, times):
    """Let a second pass for each time, in which the learner waits for half of it."""
    for second in times:
        learner = {"trained_tokens_total": 500.0, "busy_seconds_total": 0.5, "idle_seconds_total": 0.5}
        generator = {"tokens_total": 500.0, "serving_seconds_total": 1.0, "idle_seconds_total": 0.0}
        for peer, sums in (("learner", learner), ("generator-0", generator), ("actor-0", {})):
            driver.say(peer, Heartbeat(gauges={name: value * second for name, value in sums.items()}))
        driver.dispatcher.state.ledger.outcomes["trained"].action_tokens += 500
        driver.wait(1.0)


def test_status_and_metrics_show_the_advice():
    driver = driven()
    assert gauges_of(driver.dispatcher.state)["fleet/wanted_generators"] == 2.0
    advice = status(driver.dispatcher, driver.now)["fleet"]["wanted"]
    assert (advice["generators"], advice["actors"], advice["measured"]) == (2, 1, True)
    assert advice["reason"].startswith("the learner is idle 50% of the time")
    assert b"\noffbeat_fleet_wanted_generators 2.0\n" in prometheus(driver.dispatcher, driver.now)


def test_a_figure_that_was_not_measured_is_no_gauge():
    driver = driven(seconds=10)
    assert "fleet/wanted_generators" not in gauges_of(driver.dispatcher.state)
    assert not status(driver.dispatcher, driver.now)["fleet"]["wanted"]["measured"]


def test_a_number_that_the_user_wants_is_waited_for():
    driver = driven()
    driver.dispatcher.wanted = Wanted(generators=3)
    go_on(driver, range(100, 102))
    advice = status(driver.dispatcher, driver.now)["fleet"]["wanted"]
    assert advice["generators"] == 3
    assert "1 of 3 generators" in advice["reason"]


# --- settings ---------------------------------------------------------------------------------------------


def test_bounds_are_part_of_the_settings():
    fleet = FleetConfig.model_validate({"auto": True, "generators": [2, 8]})
    assert fleet.bounds.generators == (2, 8)
    assert fleet.bounds.actors == Bounds().actors


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"auto": True}, "auto is true without bounds"),
        ({"generators": [4, 2]}, r"generators is \[4, 2\]: write \[least, largest\]"),
        ({"actors": [0, 2]}, r"actors is \[0, 2\]"),
    ],
)
def test_contradictions_are_refused(settings, text):
    with pytest.raises(ValidationError, match=text):
        FleetConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"run": {"mode": "sync"}}, 'run.mode is "sync", in which learner and generators wait'),
        ({"generator": {"count": 9}}, r"generator.count is 9, and fleet.generators = \[1, 4\]"),
    ],
)
def test_settings_of_other_sections_that_contradict_are_refused(settings, text):
    run = {
        "model": {"path": "m"},
        "env": {"name": "calculator"},
        "fleet": {"auto": True, "generators": [1, 4]},
    }
    assert check(run, "a test").fleet.auto
    with pytest.raises(ConfigError, match=text):
        check(run | settings, "a test")
