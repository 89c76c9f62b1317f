"""Compare tokens per second of many agents at a time: through our endpoint up to the learner, and on `vllm serve`."""

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.config import GeneratorConfig
from benchmarks.agent_cost.serving import Serve
from benchmarks.envs.random_prompt import PromptSuite
from benchmarks.generation.program import rate, spread
from benchmarks.generation.system import Outcome, System, Work
from envs.registry import EnvConfig
from protocol.security import key_files

OURS, PEER, PEER_LOGPS = "ours", "vllm serve", "vllm serve, log-probs"
SAMPLED = {PEER: {}, PEER_LOGPS: {"logprobs": True}}
"""Further fields of the requests of each arm of vLLM."""
Rounds = dict[str, list[Outcome]]


def measure(args: argparse.Namespace, folder: Path, rounds: Rounds) -> None:
    """Measure all arms in turns. Add their outcomes to ``rounds``.

    Args:
        folder: folder with the model; it gets the prompts, too.
    """
    config = GeneratorConfig(max_num_seqs=args.sessions)
    work = Work(args.episodes, args.sessions, args.prompt, args.answer)
    prompts = [PromptSuite(work.prompt).question(number)["content"] for number in range(work.requests)]
    rows = folder / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    params = {"run": "benchmarks.agent_cost.serving:run", "train": str(rows), "heldout": 0.0}
    key_files.make(folder / "keys")
    serve = Serve(folder / "model", config, folder)
    try:
        env = EnvConfig(name="agent", params=params)
        ours = System(folder / "model", config, work, folder / "run", folder / "keys", None, env)
        try:
            for repetition in range(args.repetitions + 1):
                found = one_round(ours, serve, prompts, args)
                # The first round is a warm-up.
                for name, outcome in found.items() if repetition else ():
                    rounds.setdefault(name, []).append(outcome)
        finally:
            ours.close()
    finally:
        serve.close()


def one_round(
    ours: System, serve: Serve, prompts: Sequence[str], args: argparse.Namespace
) -> dict[str, Outcome]:
    """Return the outcome of each arm."""
    found = {OURS: ours.round()}
    for name, more in SAMPLED.items():
        fields = {"max_tokens": args.answer, "temperature": 1.0, **more}
        found[name] = serve.round(prompts, args.sessions, fields)
    logging.info("%s", {name: round(rate(outcome)) for name, outcome in found.items()})
    return found


def summary(rounds: Rounds) -> dict[str, Any]:
    """Return median, minimum and maximum of each arm's rate and of our rate over it, and CPU time by process."""
    found: dict[str, Any] = {}
    for name, outcomes in rounds.items():
        tokens = sum(outcome.tokens for outcome in outcomes)
        found[name] = {
            "tokens_per_second": spread([rate(outcome) for outcome in outcomes]),
            "ours_over_it": spread([rate(a) / rate(b) for a, b in zip(rounds[OURS], outcomes, strict=True)]),
            "cpu_us_per_token": {
                process: 1e6 * sum(outcome.cpu.get(process, 0.0) for outcome in outcomes) / tokens
                for process in outcomes[-1].cpu
            },
        }
    return found


def table(results: dict[str, Any]) -> str:
    """Return the tokens per second as a Markdown table."""
    lines = ["| side | tokens/s | ours over it | CPU us per token |", "|---|---|---|---|"]
    for name, row in results.items():
        tokens, low, high = row["tokens_per_second"]
        ratio, least, most = row["ours_over_it"]
        cpu = ", ".join(f"{process} {us:.0f}" for process, us in row["cpu_us_per_token"].items())
        over = "" if name == OURS else f"{ratio:.2f} [{least:.2f}, {most:.2f}]"
        lines.append(f"| {name} | {tokens:,.0f} [{low:,.0f}, {high:,.0f}] | {over} | {cpu} |")
    return "\n".join(lines)
