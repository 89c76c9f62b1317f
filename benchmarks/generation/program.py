"""Compare the tokens per second through actor and generator with a bare AsyncLLM on the same prompts.

    python -m benchmarks.generation [--size 1M] [--repetitions 7] [--json build/generation.json]
                                    [--profile FOLDER]

Our side is a broker with a journal, a generator and an actor. Each is a process as in `offbeat train`,
encrypted by default. Log-probabilities and policy versions travel with every token, and a round ends when its
last segment has reached the learner. The bare side is an AsyncLLM with the same engine settings and sampling
parameters, and a loop that keeps the same number of requests running. Both sides stay up and take turns. The
first round of each side is a warm-up. On shared cores only the ratios are meaningful.
"""

import argparse
import logging
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from actors.config import GeneratorConfig
from benchmarks.envs.random_prompt import LETTERS
from benchmarks.generation.system import Bare, Outcome, System, Work
from benchmarks.report import middle_and_range, save_results
from protocol.security import key_files

PRETRAINED = "smollm2"
"""SmolLM2-135M-Instruct with its own tokenizer and chat template, see `offbeat model`."""
SIZES: dict[str, dict[str, Any]] = {
    "1M": {"hidden_size": 160, "intermediate_size": 448, "layers": 4, "heads": 4, "head_dim": 32},
    "10M": {"hidden_size": 384, "intermediate_size": 1024, "layers": 6, "heads": 6, "head_dim": 64},
    "50M": {"hidden_size": 768, "intermediate_size": 2048, "layers": 7, "heads": 12, "head_dim": 64},
}


def model_folder(size: str, folder: Path) -> Path:
    """Return the folder of a model: a random one, which is made in ``folder``, or the pretrained one."""
    from launch.model import existing
    from launch.run_file.sections import ModelSection

    if size == PRETRAINED:
        return existing(ModelSection(path=PRETRAINED))
    make_model(size, folder)
    return folder


def make_model(size: str, folder: Path) -> int:
    """Write a random Qwen3 model of this size and a tokenizer of single characters.

    Returns:
        The number of its parameters.
    """
    from safetensors import safe_open

    from launch.model import make_tokenizer, save_tokenizer
    from learner.warmstart import make_tiny_model

    save_tokenizer(make_tokenizer(list(LETTERS)), folder, max_length=1024)
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    make_tiny_model(folder, files, max_positions=1024, tied=False, **SIZES[size])
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        return sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 (no mapping)


OURS, PLAIN = "ours", "ours, not encrypted"
BARE = {
    "bare AsyncLLM, log-probs": "log-probs",
    "bare AsyncLLM, no log-probs": "plain",
    "bare AsyncLLM, no log-probs, final output only": "final",
}
BAR = "bare AsyncLLM, log-probs"
KV_CACHE_MB = {PRETRAINED: 512}
"""Memory of both engines' KV cache, in MiB, where the default has no room for all requests."""

Rounds = dict[str, list[Outcome]]


def measure(arguments: argparse.Namespace, folder: Path, rounds: Rounds) -> None:
    """Measure all arms in turns. Add their outcomes to ``rounds``."""
    work = Work(arguments.requests, arguments.concurrent, arguments.prompt, arguments.answer)
    config = GeneratorConfig(
        stream_interval=arguments.stream_interval, kv_cache_mb=KV_CACHE_MB.get(arguments.size, 128)
    )
    model = model_folder(arguments.size, folder / "model")
    key_files.make(folder / "keys")
    if arguments.profile is not None:
        arguments.profile.mkdir(parents=True, exist_ok=True)
    systems = {OURS: folder / "keys"} | ({PLAIN: None} if arguments.plain else {})
    sides: list[Any] = []
    try:
        for name, keys in systems.items():
            sides.append(System(model, config, work, folder / name, keys, arguments.profile))
        bare = Bare(model, config, work)
        for repetition in range(arguments.repetitions + 1):
            found = {name: side.round() for name, side in zip(systems, sides, strict=True)}
            found |= {name: bare.round(mode) for name, mode in BARE.items()}
            logging.info("%s", {name: round(rate(outcome)) for name, outcome in found.items()})
            # The first round is a warm-up.
            for name, outcome in found.items() if repetition else ():
                rounds.setdefault(name, []).append(outcome)
        bare.close()
    finally:
        for side in sides:
            side.close()


def rate(outcome: Outcome) -> float:
    return outcome.tokens / outcome.seconds


def summary(rounds: Rounds) -> dict[str, Any]:
    """Return the figures of each arm.

    They are the median, minimum and maximum of its rate and of its ratio to `BAR` in the same round, and the
    CPU microseconds per token of each process.
    """
    result: dict[str, Any] = {}
    for name, found in rounds.items():
        tokens = sum(outcome.tokens for outcome in found)
        result[name] = {
            "tokens_per_second": middle_and_range([rate(outcome) for outcome in found]),
            "over_bare": middle_and_range(
                [rate(o) / rate(b) for o, b in zip(found, rounds[BAR], strict=True)]
            ),
            "cpu_us_per_token": {
                process: 1e6 * sum(outcome.cpu[process] for outcome in found) / tokens
                for process in found[0].cpu
            },
        }
    return result


def table(results: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| | tokens/s | over the bare engine with log-probs | CPU us per token |", "|---|---|---|---|"
    ]  # fmt: skip
    for name, row in results.items():
        tokens, low, high = row["tokens_per_second"]
        ratio, least, most = row["over_bare"]
        cpu = ", ".join(f"{process} {us:.0f}" for process, us in row["cpu_us_per_token"].items())
        rates = f"{tokens:,.0f} [{low:,.0f}, {high:,.0f}]"
        lines.append(f"| {name} | {rates} | {ratio:.2f} [{least:.2f}, {most:.2f}] | {cpu} |")
    return "\n".join(lines)


def named(size: str) -> str:
    return "SmolLM2" if size == PRETRAINED else f"{size} parameters"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=[*SIZES, PRETRAINED], default="1M")
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=30, help="characters")
    parser.add_argument("--answer", type=int, default=64, help="tokens at most")
    parser.add_argument("--stream-interval", type=int, default=GeneratorConfig().stream_interval)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--plain", action="store_true", help="also without encryption")
    parser.add_argument(
        "--profile", type=Path, default=None, help="folder for profiles of generator and actor"
    )
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    # Exit through Python on SIGTERM, so that the processes of the benchmark end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rounds: Rounds = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(arguments, Path(folder), rounds)
    finally:
        # Report what was measured so far, even if the benchmark is cut short.
        if rounds:
            report(arguments, summary(rounds))


def report(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    if arguments.json is not None:
        settings = {name: str(value) for name, value in vars(arguments).items()}
        ratio, least, most = results[OURS]["over_bare"]
        headline = (
            f"tokens/s through broker, generator and actor, encrypted, {named(arguments.size)}",
            "bare vLLM",
            f"{ratio:.2f} [{least:.2f}, {most:.2f}]",
        )
        found = {"settings": settings, "arms": results}
        save_results(arguments.json, {"arms": table(results)}, found, [headline])
    logging.info("%s", table(results))
