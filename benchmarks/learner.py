"""Compare the trained tokens per second of a learner step with a bare PyTorch loop with the same passes.

    python -m benchmarks.learner [--sizes 1M 10M 50M 135M] [--lengths uniform ...] [--rounds 9] [--json FILE]

A step is `TrainingEngine.update`: credit assignment, batching, a proximal pass where needed, objective,
DeepSpeed, metrics. `benchmarks.learner.BareLoop` describes the bare loop. Both sides use one thread on
one core. They take turns, the side that begins alternates, and the first round is a warm-up. The bare loop
computes each trajectory in a row of its own. In the arms "one prompt" and "three turns" the members of a group
begin with the same tokens, which the learner computes once.

Each round gives a ratio of wall times and a ratio of CPU times. The table has their medians, with minimum and
maximum in brackets. Its last column is the ratio of the lowest CPU times of both sides, which other work on
the machine disturbs least. `--profile FOLDER` instead writes profiles that show where the learner's time
goes.
"""

import argparse
import logging
import math
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.report import middle_and_range, save_results
from learner.advantages import assign_advantages
from learner.settings.learner import LearnerConfig
from learner.trajectory import Trajectory
from learner.update.batch import Batch, make_batch
from learner.update.engine import TrainingEngine
from learner.update.micro_batches import MicroBatch, deal_mini_batches, make_micro_batches
from protocol.messages.episodes import Reward, Turn

LONGEST = 400
"""Upper limit of the tokens of an answer in the long-tailed arm."""


@dataclass(frozen=True)
class Size:
    """Shape of a Qwen3 model with tied embeddings, and the number of trajectories per round."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    inner: int
    trajectories: int


SIZES = {
    "1M": Size(vocabulary=128, width=160, layers=4, heads=4, inner=448, trajectories=128),
    "10M": Size(vocabulary=4096, width=320, layers=7, heads=5, inner=896, trajectories=64),
    "50M": Size(vocabulary=16384, width=512, layers=13, heads=8, inner=1408, trajectories=32),
    "135M": Size(vocabulary=49152, width=576, layers=30, heads=9, inner=1536, trajectories=32),
}
GROUP = 8
LEARNING_RATE = 3e-4
SHARED = {"one prompt": [(45, False), (6, True)], "three turns": [(45, False)] + [(8, True), (12, False)] * 3}
"""Turns (tokens, sampled) of arms in which a group shares the prompt, and all but the last sampled turn."""


def make_model(folder: Path, size: Size) -> int:
    """Write a Qwen3 model with random weights. Return the number of its parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, head_dim=64 if size.heads > 4 else 32,
        intermediate_size=size.inner, max_position_embeddings=1024, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def answer_lengths(lengths: str, count: int) -> NDArray[np.int64]:
    """Return the tokens of each answer: 6 to 14, or 8 plus a Pareto tail (shape 1.1) cut at `LONGEST`."""
    rng = np.random.default_rng(1)
    if lengths == "uniform":
        return rng.integers(6, 15, count)
    return np.minimum(LONGEST, 8 + rng.pareto(1.1, count) * 10).astype(np.int64)


def make_trajectories(lengths: str, size: Size) -> list[Trajectory]:
    """Return trajectories in groups of 8, with prompts of 22 to 28 tokens. All tokens are random.

    In the arms of `SHARED`, the members of a group begin with the same tokens.
    """
    if lengths in SHARED:
        return shared_trajectories(SHARED[lengths], size)
    rng = np.random.default_rng(0)
    result = []
    for i, answer in enumerate(answer_lengths(lengths, size.trajectories).tolist()):
        prompt = int(rng.integers(22, 29))
        total = prompt + answer
        mask = np.arange(total) >= prompt
        token_ids = rng.integers(0, size.vocabulary, total)
        turns = [Turn(0, 0, prompt, False), Turn(1, prompt, total, True)]
        result.append(_trajectory(i, token_ids, mask, turns, float(rng.random()), size))
    return result


def _trajectory(
    number: int,
    token_ids: NDArray[Any],
    mask: NDArray[np.bool_],
    turns: list[Turn],
    reward: float,
    size: Size,
) -> Trajectory:
    """Return a trajectory of the newest version, whose last turn has the reward."""
    return Trajectory(
        trajectory_id=f"t{number}",
        group_id=f"g{number // GROUP}",
        group_size=GROUP,
        env="benchmark",
        status="finished",
        purpose="train",
        token_ids=token_ids.astype(np.int32),
        action_mask=mask,
        logp_behaviour=np.where(mask, -math.log(size.vocabulary), 0).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turns=turns,
        rewards=[Reward("score", turns[-1].index, reward)],
    )


def shared_trajectories(turns: Sequence[tuple[int, bool]], size: Size) -> list[Trajectory]:
    """Return trajectories whose groups share all tokens before the last sampled turn.

    Args:
        turns: number of tokens of each turn, and whether they are sampled.
    """
    rng = np.random.default_rng(0)
    ends = np.cumsum([tokens for tokens, _ in turns]).tolist()
    starts = [0, *ends[:-1]]
    mask = np.repeat([sampled for _, sampled in turns], [tokens for tokens, _ in turns])
    own = max(start for start, (_, sampled) in zip(starts, turns, strict=True) if sampled)
    numbered = enumerate(zip(starts, ends, turns, strict=True))
    listed = [Turn(number, start, end, sampled) for number, (start, end, (_, sampled)) in numbered]
    result = []
    for i in range(size.trajectories):
        if i % GROUP == 0:
            beginning = rng.integers(0, size.vocabulary, own)
        token_ids = np.concatenate([beginning, rng.integers(0, size.vocabulary, ends[-1] - own)])
        result.append(_trajectory(i, token_ids, mask, listed, float(rng.random()), size))
    return result


class BareLoop:
    """The loop that one would write by hand for just this loss: no roles, config, records or DeepSpeed.

    The loop gets the learner's own micro-batches as tensors before the clock starts. It thus pays nothing for
    batching and computes the same tokens, padding included. It is a tuned loop: it applies the output layer
    at the targets only, takes log-probabilities from the fused cross-entropy, and steps with the fused AdamW.
    It computes no entropy and no metrics, and does not check whether the loss is finite. With several
    optimizer steps per batch it makes the proximal pass as the learner does: once, before the first step,
    without gradient.
    """

    def __init__(self, folder: Path, mini_batches: Sequence[Sequence[MicroBatch]]) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.train()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._mini_batches = [[_tensors(m) for m in part] for part in mini_batches]

    def update(self) -> None:
        """Run one update: all optimizer steps on the batch."""
        proximal: list[list[Tensor | None]] = [[None] * len(part) for part in self._mini_batches]
        if len(self._mini_batches) > 1:
            with torch.no_grad():
                proximal = [[self._logp(m) for m in part] for part in self._mini_batches]
        for part, known in zip(self._mini_batches, proximal, strict=True):
            for m, logp_proximal in zip(part, known, strict=True):
                torch.autograd.backward(self._loss(m, logp_proximal))
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _logp(self, m: dict[str, Tensor]) -> Tensor:
        hidden = self._model.model(input_ids=m["token_ids"], use_cache=False).last_hidden_state
        logits = self._model.lm_head(hidden.flatten(0, 1)[m["position"]])
        return -F.cross_entropy(logits, m["target"], reduction="none")

    def _loss(self, m: dict[str, Tensor], logp_proximal: Tensor | None) -> Tensor:
        logp = self._logp(m)
        proximal = logp.detach() if logp_proximal is None else logp_proximal
        ratio, advantage = (logp - proximal).exp(), m["advantage"]
        weight = (proximal - m["logp_behaviour"]).exp().clamp(max=2.0)
        objective = weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        return -(objective * m["weight"]).sum()


def _tensors(m: MicroBatch) -> dict[str, Tensor]:
    arrays = {"token_ids": m.token_ids, "position": m.position, "target": m.target, **m.columns}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


INTERVAL = 0.002
WIDTH, ROW = 1200, 17
SHOWN = 0.003
"""Minimum share of the time that a frame needs to be drawn."""

Stack = tuple[str, ...]


def write_profile(run: Callable[[], object], rounds: int, path: Path) -> None:
    """Profile ``run``: write ``path.svg`` (flame graph of ``rounds`` calls) and ``path.txt`` (operators)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stacks = sample(lambda: [run() for _ in range(rounds)])
    Path(f"{path}.svg").write_text(flame_graph(stacks))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    table = profiler.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50
    )
    Path(f"{path}.txt").write_text(table)


def sample(run: Callable[[], object], interval: float = INTERVAL) -> Counter[Stack]:
    """Sample the stack of the calling thread every ``interval`` seconds while ``run`` runs.

    Return how often each stack was seen. A stack lists its outermost frame first.
    """
    stacks: Counter[Stack] = Counter()
    done, ident = threading.Event(), threading.get_ident()

    def watch() -> None:
        while not done.is_set():
            frame, names = sys._current_frames().get(ident), []
            while frame is not None:
                code = frame.f_code
                names.append(f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-2:])})")
                frame = frame.f_back
            stacks[tuple(reversed(names))] += 1
            time.sleep(interval)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(interval / 4)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(switch)
    return stacks


def flame_graph(stacks: Counter[Stack]) -> str:
    """Return an SVG picture. Time runs to the right, callers lie below callees, names show on hovering."""
    common = _common(list(stacks))
    total = sum(stacks.values())
    boxes: list[str] = []
    deepest = max((len(stack) for stack in stacks), default=0) - common

    def draw(level: int, left: float, members: list[tuple[Stack, int]]) -> None:
        groups: dict[str, list[tuple[Stack, int]]] = {}
        for stack, count in members:
            if len(stack) > common + level:
                groups.setdefault(stack[common + level], []).append((stack, count))
        for name, group in sorted(groups.items()):
            share = sum(count for _, count in group) / total
            if share >= SHOWN:
                boxes.append(_box(name, left, share, (deepest - level) * ROW))
                draw(level + 1, left, group)
            left += share

    draw(0, 0.0, sorted(stacks.items()))
    height = (deepest + 2) * ROW
    size = f'width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *boxes, "</svg>"]) + "\n"


def _common(stacks: list[Stack]) -> int:
    """Return the number of outermost frames that all stacks share."""
    shortest = min((len(stack) for stack in stacks), default=0)
    return next((i for i in range(shortest) if len({stack[i] for stack in stacks}) > 1), shortest)


def _box(name: str, left: float, share: float, top: float) -> str:
    shade = 120 + sum(name.encode()) % 80
    width = share * WIDTH
    shown = escape(name[: int(width / 6.7)]) if width > 25 else ""
    return (
        f'<g><title>{escape(name)}: {share:.1%}</title><rect x="{left * WIDTH:.1f}" y="{top}" '
        f'width="{width:.1f}" height="{ROW - 1}" fill="rgb(235,{shade},70)"/>'
        f'<text x="{left * WIDTH + 2:.1f}" y="{top + 12}">{shown}</text></g>'
    )


LENGTHS = ("uniform", "long-tailed")
"""Lengths of the arms that run unless `--lengths` says otherwise; nothing is shared in them."""
SEED = 0


class Time(NamedTuple):
    """Wall and CPU seconds of one update."""

    wall: float
    cpu: float


def timed(update: Callable[[], object]) -> Time:
    """Run an update once and return its time."""
    wall, cpu = time.perf_counter(), time.process_time()
    update()
    return Time(time.perf_counter() - wall, time.process_time() - cpu)


def plan(batch: Batch, config: LearnerConfig) -> list[list[MicroBatch]]:
    """Return the micro-batches of the learner's first update, grouped by optimizer step."""
    return [
        make_micro_batches(
            batch,
            members,
            aggregation=config.algorithm.aggregation,
            budget=config.micro_batch_tokens,
        )
        for members in deal_mini_batches(len(batch.lengths), config.algorithm.updates_per_batch, [SEED, 0, 0])
    ]


def learner_config(updates: int, zero_stage: int | str = "auto") -> LearnerConfig:
    """Return settings under which the learner takes the steps of `BareLoop`."""
    return LearnerConfig.model_validate(
        {
            "zero_stage": zero_stage,
            "algorithm": {"updates_per_batch": updates},
            "optimizer": {"lr": LEARNING_RATE},
        }
    )


class Arm:
    """Both sides of one row of the table."""

    def __init__(self, folder: Path, size: str, lengths: str, updates: int, zero_stage: int | str) -> None:
        self.parameters = make_model(folder, SIZES[size])
        self.config = learner_config(updates, zero_stage)
        self.trajectories: list[Trajectory] = make_trajectories(lengths, SIZES[size])
        self.engine = TrainingEngine(self.config, model=str(folder), total_steps=1000, seed=SEED)
        credit = assign_advantages(self.config.algorithm, self.trajectories)
        self.batch = make_batch(self.trajectories, credit, current_version=0, max_policy_lag=0)
        self.mini_batches = plan(self.batch, self.config)
        self.bare = BareLoop(folder, self.mini_batches)

    def ours(self) -> None:
        """Run one step of the learner."""
        report = self.engine.update(self.trajectories, current_version=0)
        assert report.applied

    def rounds(self, count: int) -> list[tuple[Time, Time]]:
        """Run both sides in turns. Return the times (ours, bare) of each round."""
        found = []
        for i in range(count + 1):
            if i % 2:
                theirs, mine = timed(self.bare.update), timed(self.ours)
            else:
                mine, theirs = timed(self.ours), timed(self.bare.update)
            found.append((mine, theirs))
        # The first round is a warm-up.
        return found[1:]


def measure(size: str, lengths: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one row of the table."""
    with tempfile.TemporaryDirectory() as name:
        arm = Arm(Path(name), size, lengths, arguments.updates, arguments.zero_stage)
        found = arm.rounds(arguments.rounds)
        arm.engine.close()
    micro_batches = [m for part in arm.mini_batches for m in part]
    trained = int(arm.batch.trained.sum())
    filled, computed = sum(m.filled for m in micro_batches), sum(m.token_ids.size for m in micro_batches)
    return {
        "size": size,
        "lengths": lengths,
        "parameters": arm.parameters,
        "zero_stage": arguments.zero_stage,
        "optimizer_steps": arguments.updates,
        "trajectories": len(arm.trajectories),
        "trained_tokens": trained,
        "computed_tokens": computed,
        "padded_tokens": computed - filled,
        "padding_fraction": round(1 - filled / computed, 4),
        "micro_batches": len(micro_batches),
        "tokens_per_second": middle_and_range([trained / mine.wall for mine, _ in found]),
        "bare_tokens_per_second": middle_and_range([trained / bare.wall for _, bare in found]),
        "ratio_wall": middle_and_range([bare.wall / mine.wall for mine, bare in found]),
        "ratio_cpu": middle_and_range([bare.cpu / mine.cpu for mine, bare in found]),
        "ratio_best_cpu": round(min(bare.cpu for _, bare in found) / min(mine.cpu for mine, _ in found), 4),
        "rounds": [{"ours": mine._asdict(), "bare": bare._asdict()} for mine, bare in found],
    }


def _stage(text: str) -> int | str:
    return text if text == "auto" else int(text)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| parameters | lengths | trained | computed | of it padding | trained tokens/s, ours | bare "
        "| speed over bare, wall | CPU | CPU, best of each |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        wall, cpu = (
            f"{m:.2f} [{low:.2f}, {high:.2f}]" for m, low, high in (row["ratio_wall"], row["ratio_cpu"])
        )
        steps = f", {row['optimizer_steps']} optimizer steps" if row["optimizer_steps"] > 1 else ""
        lines.append(
            f"| {row['parameters'] / 1e6:.1f} M | {row['lengths']}{steps} | {row['trained_tokens']:,} "
            f"| {row['computed_tokens']:,} | {row['padded_tokens']:,} ({row['padding_fraction']:.1%}) "
            f"| {row['tokens_per_second'][0]:,.0f} | {row['bare_tokens_per_second'][0]:,.0f} | {wall} | {cpu} "
            f"| {row['ratio_best_cpu']:.2f} |"
        )
    return "\n".join(lines)


def headline(rows: list[dict[str, Any]]) -> tuple[str, str, str]:
    """Return the range of the arms' median ratios, for the README."""
    ratios = [row["ratio_wall"][0] for row in rows]
    sizes = [row["parameters"] / 1e6 for row in rows]
    span = " to ".join(dict.fromkeys(f"{size:.0f}" for size in (min(sizes), max(sizes))))
    shared = ", rows that share tokens" if all(row["lengths"] in SHARED for row in rows) else ""
    what = f"trained tokens/s of a learner step, {span} M parameters{shared}"
    return what, "a bare PyTorch loop", f"{min(ratios):.2f} to {max(ratios):.2f}"


def pin() -> None:
    """Limit this process to one thread on one core."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1M", "10M", "50M"])
    parser.add_argument("--lengths", nargs="+", choices=[*LENGTHS, *SHARED], default=list(LENGTHS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps on a batch")
    parser.add_argument("--zero-stage", type=_stage, default="auto", help="auto (as it is), 0, 1, 2 or 3")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="write a flame graph and tables there")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    pin()
    if arguments.profile is not None:
        profile(arguments)
        return
    rows = []
    for size in arguments.sizes:
        for lengths in arguments.lengths:
            rows.append(measure(size, lengths, arguments))
            logging.info("%s", {name: value for name, value in rows[-1].items() if name != "rounds"})
    if arguments.json is not None:
        found = {"torch": torch.__version__, "rows": rows}
        save_results(arguments.json, {"arms": table(rows)}, found, [headline(rows)])
    sys.stdout.write(table(rows) + "\n")


def profile(arguments: argparse.Namespace) -> None:
    """Write, for each row of the table, profiles of the learner's step."""

    for size in arguments.sizes:
        for lengths in arguments.lengths:
            with tempfile.TemporaryDirectory() as name:
                arm = Arm(Path(name), size, lengths, arguments.updates, arguments.zero_stage)
                arm.ours()
                write_profile(arm.ours, arguments.rounds, arguments.profile / f"{size}-{lengths}")
                arm.engine.close()


if __name__ == "__main__":
    main()
