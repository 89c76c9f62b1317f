"""What retries and examples are made of changes a learner step: with each named part left out it is another one."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.run_file.load import load, run_files
from learner.families.family import FamilyStage, TaskFamily
from learner.families.reactions import settle
from learner.settings.learner import OptimizerConfig
from learner.update.engine import TrainingEngine
from protocol import names
from protocol.messages.episodes import Reward, Turn
from tests.integration.learner.published import weights_of
from tests.integration.learner.tiny_qwen3 import save, tiny_model
from tests.trajectories import make_trajectory

OPTIMIZER = OptimizerConfig(lr=0.5, eps=1.0, max_grad_norm=1e9)
"""The eps is so large that a step is nearly proportional to the gradient."""
DIFFERENT = 1e-2
PROMPT, NOTE, STEP, SEEN = [7, 8, 9], [20, 21, 22], [30, 31], [40]


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Return a function that makes one learner step from equal weights, and returns the change as one vector."""
    model = str(save(tiny_model(tied=True, seed=3), tmp_path_factory.mktemp("model")))
    plain = AutoModelForCausalLM.from_pretrained(model)
    before = torch.cat([p.detach().flatten() for p in plain.parameters()])

    def make(recipe, trajectories, algorithm=None):
        learner = load(run_files()[recipe]).learner
        learner = learner.model_copy(
            update={"optimizer": OPTIMIZER, "algorithm": algorithm or learner.algorithm}
        )
        engine = TrainingEngine(learner, model=model, total_steps=10, seed=5)
        assert engine.update(trajectories, current_version=0).applied
        change = torch.cat([tensor.flatten() for tensor in weights_of(engine).values()]) - before
        engine.close()
        return change

    return make


def differ(a, b):
    return float((a - b).norm() / max(a.norm(), b.norm())) > DIFFERENT


def episode(stage, member, prompt, answer, reward, *, repeated=False):
    """Return an episode of two steps, the first of which may be a repeated one."""
    group = names.stage_id("0g3", stage)
    bounds = np.cumsum([0, len(prompt), len(STEP), len(SEEN), len(answer)]).tolist()
    turns = [
        Turn(n, start, end, n == 3 or (n == 1 and not repeated))
        for n, (start, end) in enumerate(itertools.pairwise(bounds))
    ]
    mask = np.zeros(bounds[-1], np.bool_)
    for turn in turns:
        mask[turn.start : turn.end] = turn.action
    made = make_trajectory(
        f"{group}.{member}.0", group=group, prompt=len(prompt), actions=bounds[-1] - len(prompt)
    )
    return replace(
        made,
        token_ids=np.array([*prompt, *STEP, *SEEN, *answer], np.int32),
        action_mask=mask,
        logp_behaviour=np.where(mask, -3.5, 0).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turns=turns,
        rewards=[Reward("score", 3, reward)],
        correct=reward == 1,
    )


def family_of(*stages):
    return TaskFamily("0g3", [FamilyStage(each[0].group_id, each[0].group_id, each) for each in stages])


def retried(number):
    """Return a family with wrong first episodes and two retries behind a note, each of its own episode."""
    first = [episode(0, n, PROMPT, [11 + n, 2], 0.3 * n) for n in range(2)]
    retries = [
        replace(
            episode(number, n, PROMPT + NOTE, [14 + n, 2], 1.0 - 0.5 * n, repeated=True),
            parent=first[n].trajectory_id,
        )
        for n in range(2)
    ]
    return family_of(first, retries)


@pytest.mark.parametrize(("recipe", "part"), [("r3l", "clean"), ("r3l", "mask_shared"), ("agent-r", "clean")])
def test_a_part_of_retries_changes_the_step(step, recipe, part):
    config = load(run_files()[recipe]).learner.family
    family = retried(config.stages)
    without = config.model_copy(update={part: False})
    assert differ(step(recipe, settle(config, family).trained), step(recipe, settle(without, family).trained))


@pytest.mark.parametrize("recipe", ["r3l", "agent-r"])
def test_retries_change_the_step(step, recipe):
    config = load(run_files()[recipe]).learner.family
    family = retried(config.stages)
    first = settle(config, TaskFamily("0g3", family.stages[:1]))
    assert differ(step(recipe, settle(config, family).trained), step(recipe, first.trained))


def test_amplified_advantages_change_the_step(step):
    recipe = load(run_files()["r3l"]).learner
    plain = recipe.algorithm.advantage.model_copy(update={"amplify": None})
    algorithm = recipe.algorithm.model_copy(update={"advantage": plain})
    trained = settle(recipe.family, retried(2)).trained
    assert differ(step("r3l", trained), step("r3l", trained, algorithm))


def test_examples_give_a_step_to_a_task_that_had_none(step):
    config = load(run_files()["xrpo-seeding"]).learner.family
    first = [episode(0, n, PROMPT, [11 + n, 2], 0.0) for n in range(2)]
    found = [episode(1, 0, PROMPT, [13, 2], 1.0)]
    guided = [episode(2, n, PROMPT + NOTE, [14 + n, 2], float(n)) for n in range(2)]
    plain = step("xrpo-seeding", settle(config, family_of(first)).trained)
    seeded = step("xrpo-seeding", settle(config, family_of(first, found, guided)).trained)
    assert plain.norm() < 1e-9 < seeded.norm()
