"""One learner step on one trajectory of a given length, in its own process to measure its memory."""

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import peak_rss

LENGTHS = tuple(2**n for n in range(7, 16))
VOCABULARY = 2_048
PROMPT = 64
WAIT_S = 600.0

_spawn = multiprocessing.get_context("spawn")


def step_times(length: int, repetitions: int) -> dict[str, Any]:
    """Return the seconds of each step after one warm-up step, and the memory that the steps added (MiB).

    Raises:
        TimeoutError: the steps took longer than `WAIT_S`.
    """
    receiver, sender = _spawn.Pipe(duplex=False)
    process = _spawn.Process(target=_measure, args=(length, repetitions, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(WAIT_S):
            raise TimeoutError(f"{length} tokens: no step within {WAIT_S:g} s")
        result: dict[str, Any] = receiver.recv()
        return result
    finally:
        process.kill()
        process.join()


def fit(seconds: dict[int, float]) -> dict[int, float]:
    """Return the share of each step's time that grows with the square of the length.

    Fits a constant, a linear and a quadratic term by least squares of the relative errors. A term with a
    negative coefficient is left out.

    Example:
        >>> shares = fit({n: 1.0 + 2.0 * n + 0.5 * n * n for n in (1, 2, 4, 8)})
        >>> round(shares[4], 3)
        0.471
    """
    lengths = np.array(sorted(seconds), dtype=float)
    times = np.array([seconds[int(n)] for n in lengths])
    columns = np.stack([np.ones_like(lengths), lengths, lengths**2], axis=1) / times[:, None]
    kept = [0, 1, 2]
    # Leave out the terms with a negative coefficient, one at a time.
    while True:
        weights, *_ = np.linalg.lstsq(columns[:, kept], np.ones_like(times), rcond=None)
        if weights.min() >= 0 or len(kept) == 1:
            break
        kept.pop(int(weights.argmin()))
    square = float(weights[kept.index(2)]) if 2 in kept else 0.0
    return {int(n): float(square * n * n / t) for n, t in zip(lengths, times, strict=True)}


def _measure(length: int, repetitions: int, sender: Connection) -> None:
    from learner.settings.learner import LearnerConfig
    from learner.update.engine import TrainingEngine

    with tempfile.TemporaryDirectory() as name:
        _make_model(Path(name))
        config = LearnerConfig.model_validate({"zero_stage": 0})
        engine = TrainingEngine(config, model=name, total_steps=1000, seed=0)
        engine.update([_trajectory(LENGTHS[0])], current_version=0)
        start = _peak_mb()
        trajectories, times = [_trajectory(length)], []
        for _ in range(repetitions + 1):
            started = time.perf_counter()
            engine.update(trajectories, current_version=0)
            times.append(time.perf_counter() - started)
        sender.send({"step_s": times[1:], "peak_mb": _peak_mb() - start})
        engine.close()


def _peak_mb() -> float:
    return peak_rss() / 2**20


def _make_model(folder: Path) -> None:
    """Write a random Qwen3 model with two narrow layers, because only the growth of the cost matters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, intermediate_size=192, max_position_embeddings=max(LENGTHS), tie_word_embeddings=True,
        dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


def _trajectory(length: int) -> Any:
    from learner.trajectory import Trajectory
    from protocol.messages.episodes import Reward, Turn

    rng = np.random.default_rng(0)
    mask = np.arange(length) >= PROMPT
    return Trajectory(
        trajectory_id="t0",
        group_id="g0",
        group_size=1,
        env="benchmark",
        status="finished",
        purpose="train",
        token_ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
        action_mask=mask,
        logp_behaviour=np.where(mask, -np.log(VOCABULARY), 0).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turns=[Turn(0, 0, PROMPT, False), Turn(1, PROMPT, length, True)],
        rewards=[Reward("score", 1, 1.0)],
    )
