"""A part that does nothing for many steps is said once, with the metric that shows it."""

import pytest

from learner.families.reactions import PARTS, parts_of
from learner.gauges import is_declared
from learner.idle_parts import IDLE_STEPS, IdleParts, named_parts
from learner.settings.families import RetryFamily
from learner.settings.learner import LearnerConfig


def looks(values):
    idle = IdleParts(("replay/share",))
    return [idle.look({"replay/share": value}) for value in values]


def test_it_is_said_once_after_twenty_steps_without_an_effect():
    told = looks([0.0] * (3 * IDLE_STEPS))
    assert [step for step, texts in enumerate(told, start=1) if texts] == [IDLE_STEPS]
    assert told[IDLE_STEPS - 1] == [
        "replay/share has been 0 for 20 steps: this part of the method has done nothing"
    ]


def test_a_part_that_acts_now_and_then_is_not_named():
    assert not any(looks(([0.0] * (IDLE_STEPS - 1) + [0.1]) * 4))


def test_a_part_that_falls_idle_later_is_named():
    assert looks([0.1] + [0.0] * IDLE_STEPS)[-1]


def test_a_metric_that_does_not_come_counts_as_zero():
    idle = IdleParts(("family/readable_share",))
    assert [idle.look({}) for _ in range(IDLE_STEPS)][-1]


@pytest.mark.parametrize("kind", PARTS)
def test_each_kind_of_family_has_a_metric_of_its_part(kind):
    needed = {"taught": {"teachers": ["big"]}, "verdict": {"reward": "right"}}.get(kind, {})
    assert all(is_declared(name) for name in named_parts(LearnerConfig(family={"kind": kind, **needed})))


def test_retries_from_a_named_step_have_two_parts():
    named = RetryFamily(begin="named", reflection="Look: {attempt}", note="{reflection}")
    assert parts_of(named) == ("family/retried_right_share", "family/named_share")
