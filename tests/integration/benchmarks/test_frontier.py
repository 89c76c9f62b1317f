"""The loop of the frontier in one process: what it samples, how old that is, and what the learner makes of it."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.frontier import loop
from benchmarks.frontier.cells import Cell, config_of
from benchmarks.frontier.sampler import PlainModel, Shape, drawn
from envs.registry import make_suite
from launch.model import prepare
from learner.errors import SamplerDiffers


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return settings, tasks and first weights of a short cell."""
    config = config_of(Cell("letters", "uncorrected", lag=3, seed=0, rate=2.0, steps=32))
    section = config.model.model_copy(update={"cache": tmp_path_factory.mktemp("models")})
    config = config.model_copy(update={"model": section})
    return config.learner, make_suite(config.env.name, config.env.params), prepare(config)


def cell(job, folder, **changes):
    learner, suite, model = job
    again, probes = changes.pop("again", 0), changes.pop("probes", False)
    also, fresh_groups = changes.pop("also_after", ()), changes.pop("fresh_groups", 0)
    learner = learner.model_copy(update=changes)
    return loop.run_cell(
        learner,
        suite,
        model,
        seed=0,
        again=again,
        folder=folder,
        probes=probes,
        also_after=also,
        fresh_groups=fresh_groups,
    )


def test_a_cell_learns_at_the_forced_lag_and_compares_gradients(job, tmp_path):
    result = cell(job, tmp_path, probes=True, also_after=(16,))
    assert result.exact
    assert result.start < 0.2 < 0.5 < result.score
    assert result.scores[16] < result.score
    assert 0.5 < result.cosine <= 1
    assert 0.2 < result.numbers["ess"] < 1
    assert result.optimizer_steps == 32, "looking at a gradient is no step"
    assert [part["step"] for part in result.course] == [3, 6, 10, 13, 16, 22, 29]
    assert all(part["moved"] > 0 and -1 <= part["cosine"] <= 1 for part in result.course)


def test_a_group_that_does_not_lag_is_sampled_by_the_version_that_is_trained(job, tmp_path):
    result = cell(job, tmp_path, steps=6, fresh_groups=1)
    assert result.exact, "one group has lag 0, and the others the forced one"
    assert result.curve != cell(job, tmp_path, steps=6).curve


def test_a_cell_depends_on_its_seeds_alone_and_not_on_who_looks(job, tmp_path):
    first, same, other = (
        cell(job, tmp_path, steps=6, **changes) for changes in ({}, {"probes": True}, {"again": 1})
    )
    assert (first.curve[:6], first.score) == (same.curve[:6], same.score)
    assert first.curve != other.curve


def test_turns_that_the_environment_answers_are_played_to_their_end(job):
    """Three doors, each an answer of at most two tokens, with the number of the room between them."""
    _, _, model = job
    learner = config_of(Cell("corridor", "uncorrected", lag=0, seed=0, rate=1.0)).learner
    suite = make_suite("benchmarks/envs/corridor.py:CorridorSuite", {"rooms": 3, "doors": 2, "corridors": 1})
    player = loop.Player(suite, learner, model)
    theirs = PlainModel(player.shape, load_file(model / "model.safetensors"), player.positions)
    played = player.play(theirs, 5, indices=[0, 1], members=4, seed=[1])
    assert len(played) == 8
    for t in played:
        actions = [turn for turn in t.turns if turn.action]
        assert len(actions) == 3
        assert all(1 <= turn.end - turn.start <= 2 for turn in actions)
        assert [reward.name for reward in t.rewards] == ["through"]
        assert t.correct == (t.rewards[0].value == 1.0)
        assert (t.policy_version[t.action_mask] == 5).all()
        assert (t.logp_behaviour[t.action_mask] < 0).all()


def test_a_sampler_that_computes_something_else_is_refused(job, tmp_path, monkeypatch):
    step = PlainModel.step
    monkeypatch.setattr(PlainModel, "step", lambda *given: 0.9 * step(*given))
    with pytest.raises(SamplerDiffers, match="sample from another policy"):
        cell(job, tmp_path, steps=2)


def test_the_sampler_computes_what_transformers_computes(job):
    from transformers import AutoModelForCausalLM

    _, _, folder = job
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain = PlainModel(Shape.of_folder(folder), theirs.state_dict(), positions=12)
    ids = torch.arange(24).view(2, 12) % theirs.config.vocab_size
    cache = plain.cache(2)
    # The second row is one token behind, as rows with prompts of other lengths are.
    shifted = torch.stack([ids[0], ids[1].roll(1)])
    for at in range(12):
        places = torch.tensor([at, max(0, at - 1)])
        logits = plain.step(torch.stack([ids[0, at], ids[1, max(0, at - 1)]]), places, cache)
    with torch.no_grad():
        expected = [theirs(ids[:1]).logits[0, -1], theirs(shifted[1:, 1:]).logits[0, -1]]
    assert torch.allclose(logits, torch.stack(expected), atol=1e-4)


def test_drawn_tokens_have_the_probabilities_of_their_row():
    logp = torch.tensor([0.1, 0.0, 0.6, 0.3]).log().expand(20_000, 4)
    counts = torch.bincount(
        drawn(logp, torch.rand(20_000, 1, generator=torch.Generator().manual_seed(0))), minlength=4
    )
    assert np.allclose(counts / 20_000, [0.1, 0.0, 0.6, 0.3], atol=0.02)
