"""Each token of a trajectory with branches gets the numbers of its own conversation, and is trained once."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from learner.errors import BrokenTrajectory
from learner.metrics import rollout_metrics
from learner.trajectory import branches_of, ends_of, starts_of
from learner.update.micro_batches import make_micro_batches
from learner.update.policy import PolicyModule, micro_batch_inputs
from learner.update.ranks import RunUpdate, decode_batch, encode_batch
from protocol.messages.episodes import Turn
from tests.integration.learner.tiny_qwen3 import tiny_model
from tests.trajectories import batch_of, make_trajectory

CPU = torch.device("cpu")


def turns_of(shape):
    """Return turns from (tokens, action, index of the turn that it continues or -1)."""
    starts = np.concatenate([[0], np.cumsum([tokens for tokens, _, _ in shape])])
    return [
        Turn(i, int(starts[i]), int(starts[i + 1]), action, i - after if after >= 0 else 0 if i else 1)
        for i, (_, action, after) in enumerate(shape)
    ]


@st.composite
def trees(draw):
    shape = []
    for _ in range(draw(st.integers(1, 6))):
        answers = [i for i, (_, action, _) in enumerate(shape) if action]
        after = draw(st.sampled_from([-1, *answers]))
        shape.append((draw(st.integers(1, 4)), False, after))
        shape.append((draw(st.integers(1, 4)), True, len(shape) - 1))
    return shape


def conversation(turns, shape, turn):
    """Return the places of a turn and of all that it continues, by walking up."""
    places = []
    while turn >= 0:
        places = [*range(turns[turn].start, turns[turn].end), *places]
        turn = shape[turn][2]
    return places


def test_branches_and_prompts_that_begin_anew_are_counted():
    talk = [(3, False, -1), (2, True, 0), (4, False, -1), (1, True, 2), (2, False, 1), (4, True, 4)]
    branched = replace(make_trajectory("t0", prompt=3, actions=13), turns=turns_of(talk))
    metrics = rollout_metrics([branched, make_trajectory("t1", prompt=3, actions=13)], [])
    assert metrics["rollout/branches_mean"] == 1.5
    assert metrics["rollout/begun_anew_fraction"] == 4 / 32


@given(trees())
def test_every_token_is_trained_in_one_branch_behind_its_own_conversation(shape):
    turns = turns_of(shape)
    branches = branches_of(turns, turns[-1].end)
    assert len(ends_of(turns)) == len(branches)
    assert starts_of(turns, turns[-1].end) == sorted({int(branch.places[0]) for branch in branches})
    owned = np.concatenate([branch.places[branch.own] for branch in branches])
    assert sorted(owned.tolist()) == list(range(turns[-1].end))
    lasts = set(range(len(shape))) - {after for _, _, after in shape}
    assert [branch.places.tolist() for branch in branches] == [
        conversation(turns, shape, last) for last in sorted(lasts)
    ]


BROKEN = {
    "a gap": ([Turn(0, 0, 2, False), Turn(1, 3, 4, True, 0)], 4, "begin at token 2"),
    "no such turn": ([Turn(0, 0, 2, False), Turn(1, 2, 4, True, 2)], 4, "2 back, does not fit"),
    "too short": ([Turn(0, 0, 2, False), Turn(1, 2, 3, False, 0)], 4, "end at token 3"),
}


@pytest.mark.parametrize(("turns", "tokens", "why"), BROKEN.values(), ids=BROKEN)
def test_turns_that_do_not_fit_are_named(turns, tokens, why):
    with pytest.raises(BrokenTrajectory, match=why):
        branches_of(turns, tokens)


SHAPE = [
    (4, False, -1), (3, True, 0), (2, False, 1), (2, True, 2),
    (3, False, 1), (4, True, 4),
    (5, False, -1), (2, True, 6),
]  # fmt: skip


def branching(name, group="g0", shape=SHAPE, **changes):
    """Return a trajectory of this shape."""
    turns = turns_of(shape)
    total = turns[-1].end
    mask = np.zeros(total, dtype=np.bool_)
    for turn in turns:
        mask[turn.start : turn.end] = turn.action
    made = make_trajectory(name, group=group, prompt=1, actions=total - 1)
    return replace(
        made,
        turns=turns,
        action_mask=mask,
        logp_behaviour=np.where(mask, -3.0, 0.0).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        **changes,
    )


def model():
    lm = tiny_model(tied=True, seed=3)
    return PolicyModule(lm, after_head=None, value_head=True, sharing=lm.config.hidden_size)


def numbers(module, batch, micro_batches):
    """Return log-probabilities by seen token, and the gradient of their weighted sum."""
    module.zero_grad()
    logps, loss = torch.full((int(batch.seen_mask.sum()),), torch.nan), torch.zeros(())
    for m in micro_batches:
        found = module(**micro_batch_inputs(m, CPU), entropy_gradient=True)
        loss = loss + (torch.from_numpy(np.sin(m.token + 1.0)).float() * found.logp).sum()
        logps[m.token] = found.logp.detach()
    loss.backward()
    return logps, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("width", [0, 64])
@pytest.mark.parametrize("budget", [16, 10_000])
def test_probabilities_and_gradients_are_those_of_each_conversation_alone(width, budget):
    module = model()
    trajectories = [branching("a"), make_trajectory("b"), branching("c", "g1", SHAPE[:6])]
    batch = batch_of(trajectories)
    members = np.arange(3)
    found = numbers(
        module,
        batch,
        make_micro_batches(batch, members, aggregation="token_mean", budget=budget, width=width),
    )
    # The slow twin: every action turn with its conversation as a row of its own.
    module.zero_grad()
    expected, loss = [], torch.zeros(())
    for t in trajectories:
        shape = SHAPE[: len(t.turns)] if len(t.turns) > 2 else [(4, False, -1), (5, True, 0)]
        for turn in t.turns:
            if not turn.action:
                continue
            ids = torch.from_numpy(t.token_ids[conversation(t.turns, shape, turn.index)].astype(np.int64))
            logits = module.lm(ids[None, :-1]).logits[0].float()
            logps = torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0]
            expected.append(logps[-(turn.end - turn.start) :])
    expected = torch.cat(expected)
    loss = (torch.sin(torch.arange(len(expected)) + 1.0) * expected).sum()
    loss.backward()
    torch.testing.assert_close(found[0], expected.detach(), atol=2e-5, rtol=0)
    for name, gradient in found[1].items():
        own = dict(module.named_parameters())[name].grad
        torch.testing.assert_close(gradient, own, atol=2e-4, rtol=1e-3, msg=name)


def test_an_episode_does_not_weigh_more_because_it_has_branches():
    batch = batch_of([branching("a"), make_trajectory("b", actions=11)])
    micro_batches = make_micro_batches(
        batch, np.arange(2), aggregation="sequence_mean", budget=10_000, ranks=1
    )
    weight, owner = np.zeros(2), np.repeat([0, 1], batch.trained)
    for m in micro_batches:
        np.add.at(weight, owner[m.token], m.columns["weight"])
    assert weight.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_target_is_in_one_micro_batch_of_one_rank(ranks):
    batch = batch_of([branching("a"), branching("b"), make_trajectory("c")])
    plans = [
        make_micro_batches(
            batch, np.arange(3), aggregation="token_mean", budget=20, rank=rank, ranks=ranks, width=64
        )
        for rank in range(ranks)
    ]
    tokens = np.concatenate([m.token for plan in plans for m in plan if m.token[0] >= 0])
    assert sorted(tokens.tolist()) == list(range(int(batch.seen_mask.sum())))


def test_branches_reach_the_other_ranks():
    batch = batch_of([branching("a"), make_trajectory("b")])
    command, body = encode_batch(RunUpdate, batch)
    there = decode_batch(command, body)
    for name in ("owner", "lengths", "places", "own"):
        assert getattr(there.branches, name).tolist() == getattr(batch.branches, name).tolist()
    plain = batch_of([make_trajectory("b")])
    assert plain.branches is None
    assert decode_batch(*encode_batch(RunUpdate, plain)).branches is None


def test_each_input_knows_its_token_of_the_batch():
    batch = batch_of([make_trajectory("b"), branching("a")])
    for m in make_micro_batches(batch, np.arange(2), aggregation="token_mean", budget=10_000, width=64):
        read = m.token_ids.reshape(-1)[m.input_place]
        assert read.tolist() == batch.token_ids[m.input_token].tolist()
        assert len(read) == m.inputs


def test_auxiliary_turns_are_seen_as_context_and_not_trained():
    plain, aux = branching("a"), branching("a", auxiliary=[1, 7])
    assert aux.action_tokens == plain.action_tokens, "the ledger counts them"
    whole, part = batch_of([plain]), batch_of([aux])
    assert part.loss_mask.tolist() == (whole.loss_mask & ~np.isin(plain.action_turn_index(), [1, 7])).tolist()
    assert part.trained.tolist() == [6]
    [m] = make_micro_batches(part, np.arange(1), aggregation="token_mean", budget=10_000, width=64)
    assert len(m.token) == 6


def test_a_branch_that_begins_with_an_action_is_broken():
    from learner.intake.trajectories import _check_trajectory

    turns = turns_of([(2, False, -1), (2, True, 0), (2, True, -1)])
    bad = branching("a", shape=[(2, False, -1), (2, True, 0), (2, True, -1)])
    assert bad.turns == turns
    with pytest.raises(BrokenTrajectory, match="begins with token 4, an action token"):
        _check_trajectory(bad)
