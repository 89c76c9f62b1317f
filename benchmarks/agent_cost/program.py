"""Compare the endpoint of suite `agent` with a bare aiohttp server and with vLLM's own server.

    python -m benchmarks.agent_cost [--repetitions 5] [--json build/agent_cost.json]

Both comparisons have one agent: a loop of three requests with two tools on a bare HTTP client, in a process of its own.
Servers stay up and take turns, and the first round of each is a warm-up.

- "requests": CPU time of the server's process per request, so that other work on the machine matters little. Nothing is
  sampled: our side has its answers already, and the bare server sends the same bytes.
- "tokens": tokens per second with 64 sessions at a time. Our side is broker, generator and actor, encrypted, up to the
  last segment at the learner. The other side is `vllm serve` with the engine settings of our generator.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.agent_cost import tokens
from benchmarks.agent_cost.client import TURNS
from benchmarks.agent_cost.servers import SERVERS, Server
from benchmarks.agent_cost.serving import CLIENT, converse
from benchmarks.agent_process import AgentProcess
from benchmarks.generation.program import SIZES, make_model, spread
from benchmarks.generation.system import Meter
from benchmarks.report import save_results

NAMES = {
    "bare": "bare aiohttp, the same bytes",
    "endpoint": "endpoint with its episodes",
    "actor": "endpoint with an actor's episodes: tokens, segments",
}
PROMPT = "12 + 7?"
Figures = dict[str, list[float]]


def measure(args: argparse.Namespace, folder: Path, found: Figures) -> None:
    """Add the CPU milliseconds per request of each server, round by round, to ``found``."""
    agents = AgentProcess(CLIENT)
    servers = {"actor": Server("actor", folder, [])}
    try:
        first = job(servers["actor"].begin(1)[0], keep=True)
        bodies = asyncio.run(agents.ask(first))["bodies"]
        servers["actor"].end()
        servers |= {name: Server(name, folder, bodies) for name in SERVERS if name != "actor"}
        for repetition in range(args.repetitions + 1):
            spent = {name: one_round(server, agents, args) for name, server in servers.items()}
            per_request = {name: 1e3 * s / (args.conversations * TURNS) for name, s in spent.items()}
            logging.info("%s", {name: round(ms, 3) for name, ms in per_request.items()})
            for name, milliseconds in per_request.items() if repetition else ():
                found.setdefault(name, []).append(milliseconds)
    finally:
        agents.close()
        for server in servers.values():
            server.close()


def job(access: Sequence[str], *, keep: bool = False) -> dict[str, Any]:
    """Return the job of a conversation."""
    return {"prompt": PROMPT, "base_url": access[0], "api_key": access[1], "keep": keep}


def one_round(server: Server, agents: AgentProcess, args: argparse.Namespace) -> float:
    """Return the CPU seconds of the server in a round of conversations."""
    jobs = [job(access) for access in server.begin(args.conversations)]
    meter = Meter({"server": [server.pid]})
    asyncio.run(converse(agents, jobs, args.at_once))
    used = meter.used()["server"]
    server.end()
    return used


def table(found: Figures) -> str:
    """Return the CPU time per request as a Markdown table.

    Example:
        >>> print(table({"bare": [1.0, 1.0], "endpoint": [4.0, 3.0]}).splitlines()[-1])
        | endpoint with its episodes | 3.50 [3.00, 4.00] | 3.5 [3.0, 4.0] |
    """
    lines = ["| server | CPU ms per request | over bare aiohttp |", "|---|---|---|"]
    for name, label in NAMES.items():
        if name in found:
            middle, low, high = spread(found[name])
            ratio, least, most = spread([a / b for a, b in zip(found[name], found["bare"], strict=True)])
            lines.append(
                f"| {label} | {middle:.2f} [{low:.2f}, {high:.2f}] | {ratio:.1f} [{least:.1f}, {most:.1f}] |"
            )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), default="1M")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=128, help="of a round of requests")
    parser.add_argument(
        "--at-once", type=int, default=16, help="conversations at a time, in a round of requests"
    )
    parser.add_argument("--sessions", type=int, default=64, help="at a time, in a round of tokens")
    parser.add_argument("--episodes", type=int, default=192, help="of a round of tokens")
    parser.add_argument("--prompt", type=int, default=30, help="characters")
    parser.add_argument("--answer", type=int, default=64, help="tokens at most")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    # Exit through Python on SIGTERM, so that the processes of the benchmark end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    requests: Figures = {}
    rounds: tokens.Rounds = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(args.size, folder / "model")
        rows = [json.dumps({"prompt": f"{PROMPT} {number}"}) for number in range(args.conversations)]
        (folder / "train.jsonl").write_text("\n".join(rows))
        measure(args, folder, requests)
        tokens.measure(args, folder, rounds)
    report(args, requests, tokens.summary(rounds))


def report(args: argparse.Namespace, requests: Figures, found: dict[str, Any]) -> None:
    """Log the tables, and keep them if the arguments name a file."""
    tables = {"requests": table(requests), "tokens": tokens.table(found)}
    logging.info("%s\n\n%s", tables["requests"], tables["tokens"])
    if args.json is not None:
        ratio, least, most = found[tokens.PEER]["ours_over_it"]
        headline = (
            f"tokens/s of {args.sessions} agents at a time through the endpoint, {args.size} parameters",
            "`vllm serve`",
            f"{ratio:.2f} [{least:.2f}, {most:.2f}]",
        )
        results = {"load_average": os.getloadavg(), "cpu_ms_per_request": requests, "tokens": found}
        save_results(args.json, tables, results, [headline])
