"""Each shipped method runs on a shipped job that gives what it needs: rewards and marks by name, hints, turns, room."""

import asyncio
import json
from functools import cache

import pytest

from envs.base import SuiteFacts
from envs.registry import make_suite
from launch.preflight.environment import lacking
from launch.run_file.load import METHODS_FOLDER, load, run_files
from learner.rewards import needed_marks, needed_rewards
from learner.settings.families import BranchFamily, RefineFamily

ROOM = ("learner.sampling.max_trajectory_tokens=1024", "generator.max_model_len=1024")
"""Room for prompts in which other answers stand."""
OVERRIDES = {
    "ppo": ("learner.algorithm.critic.warmup_steps=1",),
    "sao": ("learner.algorithm.critic.warmup_steps=1",),
    "tppo": ("learner.algorithm.critic.warmup_steps=1", "actor.segment_tokens=8"),
    "remix": ("learner.algorithm.reincarnation.step=2", "learner.replay.stop_at_step=2"),
    "dapo-direct": ("learner.algorithm.critic.warmup_steps=1",),
    "fapo-judge": (
        "learner.reward.wrong.reward=answer",
        'learner.reward.flawed={reward = "answer", needs = "step", least = 0.35, trained = false}',
    ),
    **dict.fromkeys(("agent-r", "dyna-mind", "r3l", "urpo", "xrpo-seeding", "icpo"), ROOM),
    "fapo": (
        *ROOM,
        "learner.family.reward=answer",
        "learner.reward.wrong.reward=answer",
    ),
    "a2fm": ("learner.batch_trajectories=36", "env.params.modes=true", "env.params.answer_needs_steps=false"),
    "aepo-entropy": ("learner.sampling.temperature=1.0",),
    "riskpo": ("learner.algorithm.advantage.bundle=2",),
    **dict.fromkeys(("ghpo", "scaf-grpo"), ("env.params.hints=true",)),
    "prs": ("learner.reward.stages=[{until_version = 1, weights = {step = 1.0, answer = 0.0}}]",),
}
"""Overrides of methods that need hints or room, or whose parts act in later steps or larger batches."""
ON_CALCULATOR = {
    "aepo-agentic", "agent-r", "arpo-branch", "dapo-direct", "dyna-mind", "fapo", "fapo-judge", "fapo-rule",
    "a2fm", "gigpo", "grpo-tcr", "hgpo", "otc", "prs", "r3l", "rapo", "spear", "subpo",
}  # fmt: skip
"""Methods that need several turns, marks, or rewards of certain names, which SmolLM2's job does not give."""
SHORT = (
    "learner.batch_trajectories=32",
    "learner.evaluation_tasks=0",
    "learner.checkpoint_every=1",
    "learner.steps=2",
)


@cache
def facts_of(env, params) -> SuiteFacts:
    suite = make_suite(env, json.loads(params))
    try:
        return suite.facts()
    finally:
        asyncio.run(suite.close())


@pytest.mark.parametrize("name", run_files(METHODS_FOLDER))
def test_the_job_of_a_method_takes_its_settings_and_gives_what_it_needs(name):
    job = run_files()["calculator" if name in ON_CALCULATOR else "smollm2"]
    config = load(job, [*SHORT, f"method={name}", *OVERRIDES.get(name, ())])
    facts = facts_of(config.env.name, json.dumps(config.env.params))
    assert {name for _, name in needed_rewards(config.learner)} <= set(facts.reward_names)
    assert {name for _, name in needed_marks(config.learner)} <= set(facts.mark_names)
    assert not list(lacking(config.learner, facts))
    family = config.learner.family
    if isinstance(family, BranchFamily | RefineFamily) or getattr(family, "begin", "prompt") != "prompt":
        assert config.env.name == "calculator", "the part of the method lies behind an observation"


def test_the_tables_name_methods_that_there_are():
    assert {*OVERRIDES, *ON_CALCULATOR} <= {*run_files(METHODS_FOLDER)}
    assert {path.parent.name for path in METHODS_FOLDER.rglob("*.toml")} >= {
        "credit",
        "families",
        "objectives",
    }
