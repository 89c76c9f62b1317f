"""Check that codec, batching and objective have not become more expensive than a baseline allows.

    python -m benchmarks.ratios [--renew] [--json build/ratios.json]

Each is compared with a plain implementation that does only the minimum. The counts do not depend on how busy
the machine is: Python and C functions called, peak bytes held, torch operators called, and bytes that the
operators return. A ratio is the count of the plain implementation over the count of ours: 1 means no
overhead, and a drop is a loss. If a ratio is more than 20 % below `benchmarks/ratios/baseline.json`, the
program exits with code 1. The program also compares times: the best of many short repetitions in turns. The
limit for times is 50 %, because they depend on the processor.

`--renew` writes the baseline, for a change that is worth its cost or that has made something cheaper.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.learner import SIZES, make_trajectories
from benchmarks.report import save_results
from learner.advantages import assign_advantages
from learner.settings.algorithm import AlgorithmConfig
from learner.update.batch import make_batch
from learner.update.micro_batches import make_micro_batches
from learner.update.objective import Adaptive, Tokens, make_objective
from learner.update.target_logp import target_logp
from protocol.codec import decode, encode_arrays, unpack_arrays
from protocol.messages.episodes import Reward, Segment, Turn

TOKENS = 1024
TARGETS, WIDTH, VOCABULARY = 128, 64, 4096

Functions = tuple[Callable[[], object], Callable[[], object], bool]


def pairs() -> dict[str, Functions]:
    """Return the pairs by name: (ours, plain, True if the work is counted in torch operators)."""
    return {
        **codec(),
        "batching": batching(),
        "objective": objective(),
        "log-probabilities": log_probabilities(),
    }


def codec() -> dict[str, Functions]:
    """Return two pairs: a segment with its arrays to frames, and back, against plain MessagePack."""
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {
        "token_ids": rng.integers(0, 1000, TOKENS).astype("<i4"),
        "action_mask": np.ones(TOKENS, dtype="u1"),
        "logp_behaviour": -rng.random(TOKENS).astype("<f4"),
        "policy_version": np.zeros(TOKENS, dtype="<i4"),
    }
    segment = Segment(
        trajectory_id="t.0", task_id="t", group_id="g", group_size=8, index=0, offset=0, tokens=TOKENS,
        action_tokens=TOKENS, status="finished", env="benchmark", version_min=0, version_max=0,
        turns=[Turn(0, 0, TOKENS // 2, False), Turn(1, TOKENS // 2, TOKENS, True)],
        rewards=[Reward("score", 1, 1.0)],
    )  # fmt: skip
    fields = msgspec.to_builtins(segment)
    types = {name: array.dtype for name, array in arrays.items()}

    def plain_encode() -> bytes:
        return msgspec.msgpack.encode((fields, {name: array.tobytes() for name, array in arrays.items()}))

    def plain_decode() -> object:
        header, bodies = msgspec.msgpack.decode(packed)
        return header, {name: np.frombuffer(body, types[name]) for name, body in bodies.items()}

    def our_decode() -> object:
        message, [body] = decode(frames)
        assert isinstance(message, Segment)
        return message, unpack_arrays(message.arrays, body)

    packed, frames = plain_encode(), encode_arrays(segment, arrays)
    return {
        "encoding": (lambda: encode_arrays(segment, arrays), plain_encode, False),
        "decoding": (our_decode, plain_decode, False),
    }


def batching() -> Functions:
    """Return a pair: trajectories to micro-batches, against copying the same arrays into one padded block."""
    config = AlgorithmConfig()
    trajectories = make_trajectories("long-tailed", SIZES["1M"])
    credit = assign_advantages(config, trajectories)
    longest = max(map(len, trajectories))
    members = np.arange(len(trajectories))

    def ours() -> object:
        batch = make_batch(trajectories, credit, current_version=0, max_policy_lag=0)
        return make_micro_batches(batch, members, aggregation=config.aggregation, budget=8192)

    def plain() -> object:
        token_ids = np.zeros((len(trajectories), longest), dtype=np.int64)
        logp = np.zeros((len(trajectories), longest), dtype=np.float32)
        advantage = np.zeros((len(trajectories), longest), dtype=np.float32)
        mask = np.zeros((len(trajectories), longest), dtype=np.bool_)
        for i, t in enumerate(trajectories):
            np.copyto(token_ids[i, : len(t)], t.token_ids)
            np.copyto(logp[i, : len(t)], t.logp_behaviour)
            np.copyto(mask[i, : len(t)], t.action_mask)
            np.copyto(advantage[i, : len(t)], t.return_)
        return token_ids, logp, advantage, mask

    return ours, plain, False


def objective() -> Functions:
    """Return a pair: the default objective with its gradient, against the formula with weight and clip."""
    generator = torch.Generator().manual_seed(0)
    behaviour, advantage = -torch.rand(2, TOKENS, generator=generator)
    current = (behaviour + 0.1 * torch.randn(TOKENS, generator=generator)).requires_grad_()
    entropy, row = torch.ones(TOKENS), torch.zeros(TOKENS, dtype=torch.int64)
    weight = torch.full((TOKENS,), 1 / TOKENS)
    tokens = Tokens(behaviour, advantage, weight, torch.zeros(TOKENS), row, row)
    numbers, function = Adaptive(), make_objective(AlgorithmConfig())

    def ours() -> object:
        loss, _ = function(tokens, numbers, current, entropy)
        return torch.autograd.grad(loss, current)

    def plain() -> object:
        proximal = current.detach()
        ratio, correction = (current - proximal).exp(), (proximal - behaviour).exp().clamp(max=2.0)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        return torch.autograd.grad(-(weight * correction * surrogate).sum(), current)

    return ours, plain, True


def log_probabilities() -> Functions:
    """Return a pair: log-probabilities and entropies with gradient, against torch's fused cross-entropy."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TARGETS, WIDTH, generator=generator).requires_grad_()
    head = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    target, temperature = torch.arange(TARGETS), torch.ones(TARGETS)

    def ours() -> object:
        logp, _ = target_logp(hidden, lambda h: h @ head.T, target, temperature, vocabulary=VOCABULARY)
        return torch.autograd.grad(logp.sum(), (hidden, head))

    def plain() -> object:
        return torch.autograd.grad(F.cross_entropy(hidden @ head.T, target, reduction="sum"), (hidden, head))

    return ours, plain, True


BASELINE = Path(__file__).with_name("baseline.json")
MOST_DROP = {"calls": 0.2, "peak bytes": 0.2, "operators": 0.2, "operators' bytes": 0.2, "time": 0.5}
"""Largest allowed drop of each quantity, as a share of the baseline's ratio."""
TIMES, REPETITIONS = 5, 25


class Pair(NamedTuple):
    """Two implementations of the same work."""

    ours: Callable[[], object]
    plain: Callable[[], object]
    torch: bool
    """True if the work is counted in torch operators, False if in function calls and memory."""


class Operators(TorchDispatchMode):
    """Counter of the operators that reach torch's dispatcher, in forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        self.nbytes += sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def calls(run: Callable[[], object]) -> int:
    """Return the number of Python and C functions called while ``run`` runs."""
    found = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak bytes that ``run`` holds beyond those held before it, its result included."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def counts(pair: Pair) -> dict[str, float]:
    """Return the ratio plain over ours of each quantity."""
    sides: list[dict[str, int]] = []
    for run in (pair.ours, pair.plain):
        # Do the work that happens only once, such as imports and caches, before counting.
        run()
        if pair.torch:
            with Operators() as operators:
                run()
            sides.append({"operators": operators.count, "operators' bytes": operators.nbytes})
        else:
            sides.append({"calls": calls(run), "peak bytes": peak_bytes(run)})
    ours, plain = sides
    return {name: plain[name] / ours[name] for name in ours}


def time_ratio(pair: Pair) -> float:
    """Return the time ratio plain over ours: the median of several ratios between the best repetitions."""
    ratios = []
    for _ in range(TIMES):
        best = [float("inf"), float("inf")]
        for _ in range(REPETITIONS):
            for side, run in enumerate((pair.ours, pair.plain)):
                began = time.perf_counter_ns()
                run()
                best[side] = min(best[side], time.perf_counter_ns() - began)
        ratios.append(best[1] / best[0])
    return statistics.median(ratios)


def measure() -> dict[str, float]:
    """Return every ratio by its name."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    gc.disable()
    try:
        for name, functions in pairs().items():
            pair = Pair(*functions)
            quantities = counts(pair) | {"time": time_ratio(pair)}
            gc.collect()
            found |= {f"{name}, {quantity}": round(ratio, 5) for quantity, ratio in quantities.items()}
    finally:
        gc.enable()
    return found


def complaints(found: dict[str, float], baseline: dict[str, float]) -> list[str]:
    """Return what is worse than the baseline allows, and the names that are in only one of the two."""
    wrong = [
        f"{name}: in one of the two only; renew the baseline"
        for name in sorted(found.keys() ^ baseline.keys())
    ]
    for name in sorted(found.keys() & baseline.keys()):
        least = baseline[name] * (1 - MOST_DROP[name.rpartition(", ")[2]])
        if found[name] < least:
            wrong.append(f"{name}: {found[name]:.4f}, at least {least:.4f} (baseline {baseline[name]:.4f})")
    return wrong


def table(found: dict[str, float], baseline: dict[str, float]) -> str:
    """Return all ratios as a Markdown table."""
    lines = ["| plain over ours | now | baseline |", "|---|---|---|"]
    return "\n".join(
        [
            *lines,
            *(f"| {name} | {ratio:.4f} | {baseline.get(name, 0):.4f} |" for name, ratio in found.items()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--renew", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure()
    if arguments.renew:
        BASELINE.write_text(json.dumps(found, indent=1) + "\n")
    baseline: dict[str, float] = json.loads(BASELINE.read_text())
    if arguments.json is not None:
        save_results(arguments.json, {"ratios": table(found, baseline)}, {"now": found, "baseline": baseline})
    sys.stdout.write(table(found, baseline) + "\n")
    wrong = complaints(found, baseline)
    if wrong:
        sys.exit("dearer than the baseline allows:\n  " + "\n  ".join(wrong))
