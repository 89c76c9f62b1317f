"""Tries formulas of the user's own before a run: shapes, types, finite gradients, and trajectories without tokens.

``python -m learner.update.formula_probe`` reads the settings `[learner]` as JSON from its input, and writes what it
found as JSON: what is wrong, and remarks. A process of its own does it, so that the caller never loads torch.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from learner.advantages import own_advantages
from learner.budget import predicted
from learner.errors import FormulaError
from learner.formulas import Members, Rollouts, load_formula
from learner.rewards import own_rewards
from learner.selection import TaskStats
from learner.settings.budget import OwnPrediction
from learner.settings.formulas import (
    OwnAdvantage,
    OwnCorrection,
    OwnFormula,
    OwnReward,
    OwnSurrogate,
    own_formulas,
)
from learner.settings.learner import LearnerConfig
from learner.trajectory import Trajectory
from learner.update.objective import Adaptive, Tokens, View, make_corrections, make_surrogate
from protocol.messages.episodes import Reward, Turn

R = TypeVar("R")
LENGTHS = (7, 0, 4, 1)
"""Tokens of the trajectories of a probe that carry policy gradient: of two turns, none, some, and a single one."""
TOLERANCE = 1e-4
"""Largest difference of a token's value by the trajectories beside it, in parts of the value."""


def problems(config: LearnerConfig) -> tuple[list[str], list[str]]:
    """Try all formulas of the user's own. Return what is wrong with them, a line each, and remarks."""
    wrong, remarks = [], []
    for place, own in own_formulas(config, "learner"):
        try:
            remarks += [f"{place}: {own.kind} {remark}" for remark in _try(own, place)]
        except FormulaError as error:
            wrong.append(str(error))
    return wrong, remarks


def _try(own: OwnFormula, place: str) -> Iterator[str]:
    """Try one formula, and yield remarks.

    Raises:
        FormulaError: it cannot be loaded, raised an exception, or returned what cannot be trained.
    """
    # The place of a reincarnation or of a later correction is known here only.
    load_formula(own, place)
    match own:
        case OwnSurrogate():
            yield from _try_surrogate(own, place)
        case OwnCorrection():
            yield from _try_correction(own, place)
        case OwnAdvantage():
            _try_advantage(own)
        case OwnReward():
            _try_reward(own)
        case OwnPrediction():
            predicted(own, TaskStats(4))


def probe_view(lengths: tuple[int, ...] = LENGTHS, *, first: int = 0) -> View:
    """Return a view of trajectories with so many tokens, with ratios off 1, both signs of advantages, and lags.

    Args:
        first: number of the first trajectory, by which its numbers are drawn.
    """
    rows = [_row(first + index, length) for index, length in enumerate(lengths)]
    columns = {name: torch.cat([row[name] for row in rows]) if rows else torch.zeros(0) for name in COLUMNS}
    counts = torch.tensor(lengths, dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    numbers = first + sequence
    tokens = Tokens(
        logp_behaviour=columns["behaviour"],
        advantage=columns["advantage"],
        weight=torch.full((len(sequence),), 1 / 12),
        lag=columns["lag"],
        sequence=sequence,
        turn=4 * sequence + columns["turn"].long(),
        logp_proximal=columns["proximal"],
        median_advantage=columns["advantage"],
        group=numbers // 2,
        length=torch.repeat_interleave(counts, counts).float(),
    )
    current = columns["current"].clone().requires_grad_()
    return View(tokens, Adaptive(version=9), current, columns["proximal"])


COLUMNS = ("behaviour", "proximal", "current", "advantage", "lag", "turn")


def _row(number: int, length: int) -> dict[str, Tensor]:
    """Return columns of one trajectory, which depend on its number alone."""
    rng = torch.Generator().manual_seed(number)
    behaviour = -2 * torch.rand(length, generator=rng) - 0.05
    proximal = (behaviour + 0.3 * torch.randn(length, generator=rng)).clamp(max=-0.01)
    current = (proximal + 0.3 * torch.randn(length, generator=rng)).clamp(max=-0.01)
    return {
        "behaviour": behaviour,
        "proximal": proximal,
        "current": current,
        "advantage": torch.full((length,), 1.0 if number % 2 == 0 else -1.0),
        "lag": torch.full((length,), float(number % 3)),
        "turn": (torch.arange(length) >= 4).float(),
    }


def _try_surrogate(own: OwnSurrogate, place: str) -> Iterator[str]:
    refused = load_formula(own, place).refused
    surrogate = make_surrogate(own)
    view = probe_view()
    result = _untouched(own, place, view, surrogate)
    if not torch.isfinite(result.value).all():
        raise refused("returned a value that is not finite, for ratios between 0.3 and 3")
    if not result.value.requires_grad:
        raise refused("returned a value without gradient; form it from view.logp_current or view.ratio(...)")
    (gradient,) = torch.autograd.grad(result.value.sum(), view.logp_current, allow_unused=True)
    if gradient is None:
        raise refused(
            "returned a value without gradient to view.logp_current; form it from that or view.ratio(...)"
        )
    if not torch.isfinite(gradient).all():
        raise refused("has a gradient that is not finite, for ratios between 0.3 and 3")
    if not gradient.any():
        yield "has a gradient of 0 for every token that was tried, so nothing would be trained"
    _without_tokens(surrogate)
    yield from _by_itself(result.value, lambda v: surrogate(v).value)


def _try_correction(own: OwnCorrection, place: str) -> Iterator[str]:
    refused = load_formula(own, place).refused
    correct = make_corrections([own])
    result = _untouched(own, place, probe_view(), correct)
    if not torch.isfinite(result.weight).all():
        raise refused("returned a weight that is not finite, for ratios between 0.3 and 3")
    if (result.weight < 0).any():
        raise refused("returned a weight below 0, which would turn the gradient round")
    if not result.weight.any():
        yield "returned 0 for every token that was tried, so nothing would be trained"
    _without_tokens(correct)
    yield from _by_itself(result.weight, lambda v: correct(v).weight)


def _without_tokens(call: Callable[[View], object]) -> None:
    """Try a view of no tokens, which a micro-batch without policy gradient has.

    Raises:
        FormulaError: the formula cannot be computed for it.
    """
    try:
        call(probe_view(()))
    except FormulaError as error:
        raise FormulaError(
            f"{error}, for a view without tokens: some micro-batches have none to train"
        ) from error


def _untouched(own: OwnFormula, place: str, view: View, call: Callable[[View], R]) -> R:
    """Return the result of a formula, after a check that it changed nothing of its view."""
    tensors = {
        field.name: value
        for field in fields(view.tokens)
        if isinstance(value := getattr(view.tokens, field.name), Tensor)
    }
    before = {name: value.clone() for name, value in tensors.items()}
    result = call(view)
    if changed := [name for name, value in tensors.items() if not torch.equal(value, before[name])]:
        raise load_formula(own, place).refused(
            f"changed view.{changed[0]}, which others read; make a new tensor"
        )
    return result


def _by_itself(together: Tensor, call: Callable[[View], Tensor]) -> Iterator[str]:
    """Yield a remark if a trajectory's numbers differ when it is alone: micro-batches and ranks would change them."""
    start = 0
    for number, length in enumerate(LENGTHS):
        if not length:
            continue
        alone, here = (
            call(probe_view((length,), first=number)).detach(),
            together[start : start + length].detach(),
        )
        start += length
        if not torch.allclose(alone, here, rtol=TOLERANCE, atol=TOLERANCE):
            yield (
                "gives a token other numbers when other trajectories are beside it; how they are cut into "
                "micro-batches and dealt to ranks would then change what is trained"
            )
            return


def probe_trajectories() -> list[Trajectory]:
    """Return two groups: one with both outcomes, and an answer without a token to train; one with equal returns."""
    returns = [("g0", 1.0, 5), ("g0", 0.0, 3), ("g0", 0.5, 0), ("g1", 1.0, 2), ("g1", 1.0, 4)]
    return [
        _trajectory(f"{group}.{index}", group, value, actions)
        for index, (group, value, actions) in enumerate(returns)
    ]


def _trajectory(name: str, group: str, value: float, actions: int) -> Trajectory:
    prompt, total = 2, 2 + actions
    mask = np.arange(total) >= prompt
    return Trajectory(
        trajectory_id=name,
        group_id=group,
        group_size=3,
        env="probe",
        status="finished",
        purpose="train",
        token_ids=np.arange(total, dtype=np.int32),
        action_mask=mask,
        logp_behaviour=np.where(mask, -0.5, 0.0).astype(np.float32),
        policy_version=np.where(mask, 3, -1).astype(np.int32),
        temperature=1.0,
        rewards=[Reward("correct", 1, value)],
        turns=[Turn(0, 0, prompt, False), Turn(1, prompt, total, True)],
    )


def _try_advantage(own: OwnAdvantage) -> None:
    refused = load_formula(own, "learner.algorithm.advantage").refused
    for what, members in (
        ("", probe_trajectories()),
        (" of a single trajectory", probe_trajectories()[:1]),
        (" of a group with equal returns", probe_trajectories()[3:]),
    ):
        found = own_advantages(own, Rollouts(members, current_version=4))
        if not np.isfinite(found).all():
            raise refused(f"returned advantages{what} that are not finite")


def _try_reward(own: OwnReward) -> None:
    members = probe_trajectories()[:3]
    for group in (members, members[:1], [replace(members[0], rewards=[])]):
        own_rewards(own, Members(group, group=len(group) > 1, updates=0))


def main() -> None:
    """Read settings, and write what is wrong with their formulas."""
    wrong, remarks = problems(LearnerConfig.model_validate_json(sys.stdin.read()))
    sys.stdout.write("\n" + json.dumps({"wrong": wrong, "remarks": remarks}) + "\n")


if __name__ == "__main__":
    main()
