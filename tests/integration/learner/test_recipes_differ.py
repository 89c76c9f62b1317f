"""Recipes that are equal as shipped are declared in `recipes`, and all bounds act: the real engine tells.

Every recipe makes one learner step on equal data, with the updates and passes that it ships.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.run_file.load import METHODS_FOLDER, load, run_files
from learner.rewards import composed
from learner.settings.learner import OptimizerConfig
from learner.settings.surrogates import (
    ITSELF,
    ChunkSurrogate,
    EntropySurrogate,
    LagSurrogate,
    MiniRlSurrogate,
    MirrorDescentSurrogate,
    TrajectoryBalanceSurrogate,
    WeightedSurrogate,
)
from learner.update.engine import TrainingEngine
from protocol.messages.episodes import Reward, Turn, TurnMark
from recipes import ONE_ALGORITHM
from tests.integration.learner.published import weights_of
from tests.trajectories import make_trajectory

pytestmark = [
    # The first test makes a step with each recipe.
    pytest.mark.timeout(600),
]

LATER = ("gac", "replay-fifo")
"""Recipes whose part needs a step before it: a gradient to compare with, or rollouts to draw."""
OUTSIDE = ("sat",)
"""Recipes whose part does nothing at the lags here: SAT's tail lies outside its clip anyway."""
TAUGHT = ("distillation", "ampo")
"""Recipes with a teacher, of which a run has the answers; test_distillation.py and test_given.py train with one."""
SAMPLED = ("aepo-entropy", "a2fm")
"""Recipes that sample a part of each group otherwise, and train the rest as grpo does."""
FILES = {
    name: path
    for name, path in run_files().items()
    if path.parent.name not in ("families", "selection") and name not in (*LATER, *OUTSIDE, *TAUGHT, *SAMPLED)
}
"""Families and the choice of tasks are not here. They differ in what is sampled; a step is one of another recipe."""
NAMES = sorted(FILES)
WITHOUT_BOUNDS = ("flash-reinforce", "remax", "rloo", "tba", "trm", "vcpo")
"""Recipes whose surrogate is REINFORCE; the bounds of its weight, which is 1, are no part of the method. What TBA adds
is 0 where the policy is its own reference model, as here."""
OPTIMIZER = OptimizerConfig(lr=0.5, eps=1.0, max_grad_norm=1e9)
"""The eps is so large that a step is nearly proportional to the gradient, so methods may differ by a factor."""
EQUAL, DIFFERENT = 1e-4, 1e-2
"""Distances of two steps, as a share of the larger one. None may be between."""
VERSION = 2
FAR = 1e6


@pytest.fixture(scope="module")
def step(model, groups):
    """Return a function that makes one learner step from equal weights and returns the change as one vector."""
    before = torch.cat(
        [p.detach().flatten() for p in AutoModelForCausalLM.from_pretrained(model).parameters()]
    )

    def make(learner):
        engine = TrainingEngine(learner, model=model, total_steps=10, seed=5)
        greedy = learner.algorithm.advantage.kind == "greedy"
        members = [[t for t in group if greedy or not t.baseline] for group in groups]
        batch = [t for group in members for t in composed(learner.reward, group)]
        assert engine.update(batch, current_version=VERSION).applied
        change = torch.cat([tensor.flatten() for tensor in weights_of(engine).values()]) - before
        engine.close()
        return change

    return make


@pytest.fixture(scope="module")
def lm(model):
    return AutoModelForCausalLM.from_pretrained(model)


@pytest.fixture(scope="module")
def groups(lm):
    """Return rollout groups of two turns, unequal lengths, and lags from 0 to the least bound of a recipe."""
    assert min(settings(name).max_policy_lag for name in NAMES) == VERSION
    rng = np.random.default_rng(11)
    return [[*(rollout(lm, rng, g, i) for i in range(6)), greedy_rollout(rng, g)] for g in range(4)]


def rollout(lm, rng, g, i, forced=None):
    """Return a prompt, an action, an observation of two tokens, and an action; behaviour drifts with lag."""
    first, second = (int(n) for n in rng.integers(2, 7, 2))
    prompt, actions = 3, first + 2 + second
    t = make_trajectory(f"g{g}.{i}", group=f"g{g}", prompt=prompt, actions=actions,
                        observation=(prompt + first, prompt + first + 2))  # fmt: skip
    newest = VERSION if forced is None else VERSION + 2
    lags = rng.integers(0, VERSION + 1, len(t)) if forced is None else np.full(len(t), forced)
    lag = np.where(t.action_mask, lags, 0)
    with torch.no_grad():
        ids = torch.from_numpy(t.token_ids).long()[None]
        logp = lm(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    drift = 0.5 * lag * rng.standard_normal(len(t)) * t.action_mask
    behaviour = np.minimum(np.concatenate([[0.0], logp]) + drift, -1e-3) * t.action_mask
    ends = np.cumsum([prompt, first, 2, second]).tolist()
    return replace(
        t,
        logp_behaviour=behaviour.astype(np.float32),
        policy_version=np.where(t.action_mask, newest - lag, -1).astype(np.int32),
        turns=[
            Turn(k, start, end, k % 2 == 1) for k, (start, end) in enumerate(itertools.pairwise([0, *ends]))
        ],
        rewards=[Reward("step", 1, float(rng.random())), Reward("answer", 3, float(rng.random()))],
        correct=bool(rng.random() < 0.5),
        marks=[
            *(TurnMark("anchor", turn, str(state)) for turn, state in ((1, "start"), (3, rng.integers(2)))),
            *(TurnMark("calls", turn, float(rng.integers(3))) for turn in (1, 3)),
            TurnMark("call", 1, ("exploration", "redundant_query")[i % 2]),
        ],
    )


def greedy_rollout(rng, g):
    """Return the greedy answer of a group, which is trained by nobody."""
    return make_trajectory(
        f"g{g}.greedy", group=f"g{g}", reward=float(rng.random()), version=VERSION, temperature=0.0
    )


def settings(name):
    """Return the learner's settings of a recipe, after the steps that train the critic alone."""
    learner = load(run_files()[name]).learner
    algorithm = learner.algorithm
    if algorithm.critic is not None:
        critic = algorithm.critic.model_copy(update={"warmup_steps": 0})
        algorithm = algorithm.model_copy(update={"critic": critic})
    if (bonus := algorithm.entropy).coefficient:
        # EPO's band acts from the second update on, and its bonus is small beside the surrogate.
        louder = bonus.model_copy(update={"coefficient": 100 * bonus.coefficient})
        algorithm = algorithm.model_copy(update={"entropy": louder})
    return learner.model_copy(update={"optimizer": OPTIMIZER, "algorithm": algorithm})


def without_bounds(learner):
    """Return the settings with the surrogate's clip, mask, bound or penalty taken out: REINFORCE by a ratio."""
    surrogate = learner.algorithm.surrogate
    match surrogate:
        case EntropySurrogate():
            plain = surrogate.model_copy(update={"low": 1.0, "high": FAR, "dual": 0.0})
        case MiniRlSurrogate(ceiling=ceiling):
            plain = WeightedSurrogate(centre="behaviour", high=ceiling)
        case _ if isinstance(surrogate, ITSELF):
            plain = WeightedSurrogate(centre="behaviour", high=FAR)
        case ChunkSurrogate() | LagSurrogate() | MirrorDescentSurrogate() | TrajectoryBalanceSurrogate():
            plain = WeightedSurrogate(centre="proximal", high=FAR)
        case _:
            plain = WeightedSurrogate(centre=surrogate.centre, high=FAR)
    return learner.model_copy(update={"algorithm": learner.algorithm.model_copy(update={"surrogate": plain})})


def distance(a, b):
    return float((a - b).norm() / max(a.norm(), b.norm()))


@pytest.fixture(scope="module")
def steps(step):
    return {name: step(settings(name)) for name in NAMES}


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(NAMES, 2)))
def test_recipes_that_are_equal_are_declared_as_one_algorithm(steps, a, b):
    declared = any(a in group and b in group for group in ONE_ALGORITHM)
    found = distance(steps[a], steps[b])
    assert found < EQUAL or found > DIFFERENT
    assert (found < EQUAL) == declared, (
        "declare it in recipes/__init__.py and on the page docs/recipes/README.md"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_bounds_of_each_recipe_act(step, steps, name):
    found = distance(steps[name], step(without_bounds(settings(name))))
    assert found < EQUAL or found > DIFFERENT
    assert (found < EQUAL) == (name in WITHOUT_BOUNDS)


def test_the_page_shows_what_is_declared():
    text = (Path(__file__).parents[3] / "docs" / "recipes" / "README.md").read_text()
    section = text.partition("## What acts as shipped")[2].partition("\n## ")[0]
    for group in ONE_ALGORITHM:
        assert ", ".join(
            f"`{name}`" for name in group[:-1]
        ) + f" and `{group[-1]}` are one algorithm" in " ".join(section.split())


STALE = sorted(path.stem for path in METHODS_FOLDER.glob("*.toml") if path.stem not in LATER)
PLAIN_WHEN_FRESH = {
    *(
        "cispo",
        "flash-reinforce",
        "grpo",
        "hispo",
        "r2vpo",
        "remax",
        "rloo",
        "sao",
        "tba",
        "trm",
        "uncorrected",
    ),
}
"""Recipes that are REINFORCE on fresh tokens: a single step, in which every ratio is 1."""


@pytest.mark.parametrize("name", STALE)
def test_the_objective_acts_on_fresh_and_on_stale_tokens(model, lm, name):
    """In the last mini-batch at lag 0, and at lag 4, some tokens have not the gradient of weight 1."""
    learner = settings(name)
    learner = learner.model_copy(update={"max_policy_lag": 4})
    rng = np.random.default_rng(3)
    engine = TrainingEngine(learner, model=model, total_steps=10, seed=5)
    greedy = learner.algorithm.advantage.kind == "greedy"
    acted = []
    for lag in (0, 4):
        members = [
            [*(rollout(lm, rng, g, i, lag) for i in range(6)), *([greedy_rollout(rng, g)] if greedy else [])]
            for g in range(4)
        ]
        batch = [t for group in members for t in composed(learner.reward, group)]
        acted.append(engine.update(batch, current_version=VERSION + 2).metrics["learner/acted_fraction"])
    engine.close()
    assert (acted[0] > 0) == (name not in PLAIN_WHEN_FRESH)
    assert (acted[1] > 0) == (name != "uncorrected")
