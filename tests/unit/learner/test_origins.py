"""What offbeat check says of losses by origin, and what a batch makes of taught tokens."""

import re

import numpy as np
import pytest
from pydantic import ValidationError

from learner.advantages import TokenAdvantages
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.families import RetryFamily
from learner.settings.given import GivenConfig
from learner.settings.learner import LearnerConfig
from learner.settings.origins import OriginLoss
from learner.settings.rules import contradictions
from learner.settings.surrogates import ClipSurrogate, ShapedSurrogate
from learner.settings.taught import TaughtConfig
from learner.update.batch import make_batch
from tests.trajectories import make_trajectory

SHAPED = {"kind": "shaped"}


def said(*losses, **settings):
    """Return all that is refused of losses, in one text."""
    rules = tuple(OriginLoss.model_validate(each) for each in losses)
    algorithm = AlgorithmConfig(by_origin=rules, **settings.pop("algorithm", {}))
    learner = LearnerConfig(algorithm=algorithm, **settings)
    parts = [line for n, rule in enumerate(rules) for line in rule.contradictions(f"by_origin.{n}")]
    return "\n".join([*parts, *algorithm.contradictions("learner.algorithm"), *contradictions(learner)])


@pytest.mark.parametrize(
    ("losses", "settings", "text"),
    [
        ([{"origin": "taught", "surrogate": {"kind": "clip", "centre": "behaviour"}}], {}, "no behaviour probability"),
        ([{"origin": "taught"}], {}, "no behaviour probability"),
        ([{"origin": "given", "surrogate": {"kind": "clip"}}], {"given": GivenConfig(share=0.5)}, "is not shaped"),
        (
            [{"origin": "taught", "surrogate": SHAPED, "corrections": [{"kind": "truncated"}]}],
            {},
            "corrections are ratios",
        ),
        ([{"origin": "replayed", "weight": 0.5}], {}, r"brings such tokens; add \[learner.replay\]"),
        ([{"origin": "guided", "surrogate": SHAPED}], {}, "nothing in this run brings such tokens"),
        ([{"origin": "guided", "surrogate": SHAPED}], {"family": RetryFamily()}, "brings such tokens"),
        ([{"origin": "given", "surrogate": SHAPED}], {}, r"add \[learner.given\]"),
        ([{"origin": "taught", "surrogate": SHAPED}], {}, r"add \[learner.taught\]"),
        ([], {"taught": TaughtConfig()}, r"add \[\[learner.algorithm.by_origin\]\]"),
        ([{"origin": "taught", "surrogate": SHAPED}], {"taught": TaughtConfig(members=8)}, "lower members"),
        (
            [{"origin": "taught", "surrogate": SHAPED}],
            {"taught": TaughtConfig(), "given": GivenConfig(share=0.5)},
            "learner.taught cannot be together with learner.given",
        ),
        (
            [{"origin": "taught", "surrogate": SHAPED}],
            {"taught": TaughtConfig(), "train_on": "trajectories"},
            "needs whole groups",
        ),
        ([{"origin": "own"}], {"given": GivenConfig()}, "lower learner.given.share"),
        (
            [{"origin": "given", "surrogate": SHAPED}],
            {"given": GivenConfig(share=0.5, shaping=0.1)},
            "both shape what is given",
        ),
        ([{"origin": "given", "only": "failure", "surrogate": SHAPED}], {}, "nobody says whether"),
        ([{"origin": "own"}, {"origin": "own", "only": "failure"}], {}, "by_origin.1 .* is never reached"),
        ([{"origin": "own", "corrections": []}], {}, "corrections but no surrogate"),
        (
            [{"origin": "own", "surrogate": {"kind": "triplet"}, "corrections": [{"kind": "truncated"}]}],
            {},
            "weigh staleness a second time",
        ),
        (
            [{"origin": "own", "surrogate": SHAPED, "corrections": [{"kind": "truncated", "level": "group"}]}],
            {},
            "over tokens of several losses",
        ),
        ([{"origin": "own"}], {"algorithm": {"lr_by_ess": "sqrt"}}, "cannot be together with"),
        ([{"origin": "own"}], {"algorithm": {"surrogate": {"kind": "balanced"}}}, "number from the ratios of all"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(losses, settings, text):
    assert re.search(text, said(*losses, **settings))


def test_what_can_be_is_not_refused():
    assert not said(
        {"origin": "own", "only": "failure", "weight": 0.5}, {"origin": "own", "surrogate": SHAPED}
    )
    clean = RetryFamily(clean=True)
    assert not said({"origin": "guided", "surrogate": SHAPED}, family=clean, group_size=8)
    assert not said({"origin": "given", "surrogate": SHAPED}, given=GivenConfig(share=0.5))
    assert not said({"origin": "taught", "surrogate": SHAPED}, taught=TaughtConfig())


def test_a_surrogate_that_compares_tokens_is_no_loss_of_an_origin():
    with pytest.raises(ValidationError, match="balanced"):
        OriginLoss.model_validate({"origin": "own", "surrogate": {"kind": "balanced"}})


def test_the_loss_of_what_is_given_may_be_an_entry():
    rule = OriginLoss(origin="given", surrogate=ShapedSurrogate(shaping=0.2), weight=0.5)
    given = GivenConfig(coefficient=3.0, share=0.5)
    learner = LearnerConfig(given=given, algorithm=AlgorithmConfig(by_origin=(rule,)))
    assert learner.given_loss == (1.5, 0.2)
    assert LearnerConfig(given=given).given_loss == (3.0, None)


def test_taught_tokens_are_trained_at_any_version_and_numbered():
    own = make_trajectory("own", reward=0.0)
    taught = make_trajectory("taught", reward=1.0, version=-1, logp=0.0, origin="taught", correct=True)
    batch = [own, taught]
    tokens = sum(map(len, batch))
    advantages = TokenAdvantages.of_tokens(np.ones(tokens), np.zeros(tokens))
    rules = (OriginLoss(origin="taught", only="success", surrogate=ShapedSurrogate()),)
    made = make_batch(batch, advantages, current_version=9, max_policy_lag=0, by_origin=rules)
    assert made.trained.tolist() == [0, 5], "the policy's own tokens are too old, a teacher's have no age"
    assert made.columns["lag"].max() == 0
    assert made.columns["loss_number"].tolist() == [0] * 9 + [1] * 9
    assert made.columns["foreign"].tolist() == [0] * 13 + [1] * 5
    plain = make_batch(
        batch[:1], TokenAdvantages.of_tokens(np.ones(9), np.ones(9)), current_version=0, max_policy_lag=0
    )
    assert not {"loss_number", "foreign"} & set(plain.columns)


def test_a_surrogate_of_own_tokens_has_the_clips_defaults():
    assert OriginLoss(origin="own", surrogate=ClipSurrogate()).corrections is None
