"""All metrics of the learner, and how to look one up."""

import re

from learner.gauges.evaluation import EVALUATION, EVALUATION_SETS, HELDOUT_REWARD
from learner.gauges.families import FAMILY
from learner.gauges.replay import REPLAY
from learner.gauges.rollout import REWARD, ROLLOUT
from learner.gauges.update import CRITIC, ENTROPY, METHODS, UPDATE
from protocol.gauges import Gauge, table

SCALARS = table(
    [
        gauge
        for part in (ROLLOUT, UPDATE, METHODS, ENTROPY, CRITIC, REPLAY, FAMILY, EVALUATION)
        for gauge in part.values()
    ]
)
"""All metrics except the histograms, and except those of named evaluation sets."""
_OF_A_SET = re.compile(r"evaluation/[\w-]+/(.+)")


def declared(tag: str) -> Gauge:
    """Return the declaration of a metric.

    Raises:
        KeyError: it is not declared.

    Example:
        >>> declared("evaluation/hard/pass_at_4").unit
        'share'
    """
    if match := _OF_A_SET.fullmatch(tag):
        return EVALUATION_SETS[f"evaluation/NAME/{re.sub(r'pass_at_[0-9]+', 'pass_at_K', match[1])}"]
    return SCALARS[tag]


def is_declared(name: str) -> bool:
    """Return whether a metric of the learner is declared here, by its name or by its prefix.

    Example:
        >>> is_declared("learner/loss"), is_declared("reward/exact"), is_declared("learner/los")
        (True, True, False)
    """
    if name.startswith((REWARD, HELDOUT_REWARD)):
        return True
    try:
        declared(name)
    except KeyError:
        return False
    return True
