"""Run agents of other libraries on suite `agent`, and check every token that is recorded of them.

    python -m tests.campaigns.harnesses [--venvs FOLDER] [--only NAME ...] [--lose-first] [--json FILE.json]
        [--records FOLDER]

Each library is installed into a virtual environment of its own under FOLDER, if it is not there yet. The agents are
programs in these, which know nothing of Offbeat. The endpoint, the actor's episode and the learner's trajectory are the
real ones; the policy is a script that answers from the text of its prompt. An agent holds if every answer was recorded
once, token by token and version by version, behind the very prompt that the policy saw, and is trained once. With
`--lose-first` it runs once more, the connection of its first request is lost, and nothing may be sampled twice.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from actors.environments import EnvironmentRunner
from actors.episode import Bounds, Episode
from actors.play_requests import way_of_playing
from actors.render import Renderer
from benchmarks.report import ROOT, save_results
from envs.agent.episode import AgentEpisode
from envs.agent.suite import AgentSuite
from envs.base import ChatMessage, Env, PolicyRequest, RequestNews, Split, StepResult, TurnFacts
from envs.registry import make_suite
from learner.intake.trajectories import assemble
from learner.trajectory import Trajectory
from protocol.arrays import SegmentArrays
from protocol.messages.episodes import LeaseTask, Sampling, Task
from tests.campaigns.harnesses.wire import ScriptedPolicy, Wire

PACKAGES = {
    # litellm wants mcp as soon as a request has tools.
    "mini-swe-agent": ["mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp"],
    "inspect-ai": ["inspect-ai==0.3.285", "openai"],
    "verifiers": ["verifiers==0.4.0", "uv"],
    "langgraph": ["langgraph==1.2.22", "langchain", "langchain-openai==1.7.3"],
    "openai-agents": ["openai-agents==0.24.0"],
    "smolagents": ["smolagents[openai]==1.26.0"],
    # No agent, but servers of environments, which the end-to-end tests play.
    "openenv": ["openenv-core==0.3.0"],
    "strands": ["strands-agents[openai]==1.62.0"],
}
"""Requirements of Python by library, the first word of an agent's name."""
NPM_PACKAGES = {"codex": ["@openai/codex@0.169.0"], "opencode": ["opencode-ai@1.18.33"]}
"""Packages of npm by library."""
COMMAND_LINE_AGENTS = ("codex", "opencode", "mini-swe-agent")
PROGRAMS = Path(__file__).with_name("programs.py")
COMMAND_LINES = Path(__file__).with_name("command_lines.py")


def command_of(agent: str, folder: Path) -> list[str]:
    """Return the command that runs an agent. What it needs is installed under a folder, if it is not there."""
    library = agent.split(",")[0]
    programs = programs_of(library, folder)
    if library in COMMAND_LINE_AGENTS:
        return [sys.executable, str(COMMAND_LINES), agent, str(programs)]
    return [str(programs / "python"), str(PROGRAMS), agent]


def programs_of(library: str, folder: Path) -> Path:
    """Return the folder with the programs of a library, which is installed if it is not there."""
    home = (folder / library).absolute()
    made = home / "made"
    if not made.exists():
        install(library, home)
        made.touch()
    return home / ("node_modules/.bin" if library in NPM_PACKAGES else "bin")


def install(library: str, home: Path) -> None:
    """Install the packages of a library into a folder."""
    if library in NPM_PACKAGES:
        npm = "npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home)
        subprocess.run([*npm, *NPM_PACKAGES[library]], check=True)
        return
    venv.create(home, with_pip=True, clear=True)
    pip = home / "bin" / "python", "-m", "pip", "install", "--quiet"
    subprocess.run([*pip, *PACKAGES[library]], check=True)


SHOWN = 300
"""Characters of a message that are kept. Longer ones are instructions of the harness, equal in all requests."""
_FOLDER = re.compile(re.escape(tempfile.gettempdir()) + r"/[\w.-]+")


class RecordedSuite:
    """A suite of agents. ``records`` has a line for each request: its messages, its tools, and the answer."""

    def __init__(self, suite: AgentSuite) -> None:
        self._suite = suite
        self.records: list[dict[str, Any]] = []

    def episode(self) -> Env:
        return cast(Env, _RecordedEpisode(cast(AgentEpisode, self._suite.episode()), self.records))

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        return self._suite.demonstration(index, split)

    def gauges(self) -> Mapping[str, float]:
        return self._suite.gauges()

    async def close(self) -> None:
        await self._suite.close()


class _RecordedEpisode:
    def __init__(self, episode: AgentEpisode, records: list[dict[str, Any]]) -> None:
        self._episode, self._records = episode, records

    async def begin(self, data: dict[str, Any]) -> None:
        await self._episode.begin(data)

    async def next_requests(self, wait_s: float | None) -> RequestNews:
        news = await self._episode.next_requests(wait_s)
        for request in news.new:
            self._note(request)
        return news

    def answer(self, number: int, action: str, facts: TurnFacts) -> None:
        self._episode.answer(number, action, facts)
        self._records[number]["answer"] = action

    def decline(self, number: int, why: str, too_long: bool) -> None:
        self._episode.decline(number, why, too_long)

    async def outcome(self, cut: bool) -> StepResult:
        return await self._episode.outcome(cut)

    async def close(self) -> None:
        await self._episode.close()

    def _note(self, placed: PolicyRequest) -> None:
        request = self._episode.open_request(placed.number)
        messages = [{**m, "content": _FOLDER.sub("/folder", m["content"])[:SHOWN]} for m in request.messages]
        tools = [tool["function"]["name"] for tool in request.tools]
        self._records.append(
            {"messages": messages, "tools": tools, "stop": list(request.stop), "after": placed.after}
        )


TEMPLATE = ROOT / "tests" / "chat_templates" / "qwen3.jinja"
EXPECTED = {
    "langgraph": (3, 1),
    "langgraph, streamed": (3, 1),
    "langgraph, responses": (3, 1),
    "openai-agents": (3, 1),
    "openai-agents, streamed": (3, 1),
    "openai-agents, chat": (3, 1),
    "openai-agents, sub-agents": (12, 4),
    "smolagents, tool calls": (3, 3),
    "smolagents, code": (4, 4),
    "strands": (3, 1),
    "strands, window": (9, 3),
    "codex": (3, 1),
    "opencode": (4, 2),
    "mini-swe-agent": (3, 1),
    "verifiers": (3, 1),
    "inspect-ai": (3, 1),
    "inspect-ai, responses": (4, 2),
}
"""Number of requests and of branches of each agent."""
LIMIT_S = 240.0


@dataclass
class Outcome:
    """Findings about one agent. ``faults`` is empty if everything held that must hold."""

    agent: str
    requests: int = 0
    branches: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    prompt_tokens: int = 0
    """Tokens that were rendered."""
    seen_tokens: int = 0
    """Tokens of all prompts that the policy saw."""
    dialects: str = ""
    """Dialect that the agent spoke."""
    repeated: str = ""
    """How it sent its first request again when the connection was lost; "" if it was not lost."""
    calls: int = 0
    """Tool calls that agents got."""
    unreadable_calls: int = 0
    """Tool calls that the policy began, and that could not be read."""
    output: str = ""
    faults: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    names = args.only or list(EXPECTED)
    outcomes = []
    for name in names:
        command = command_of(name, args.venvs)
        outcomes.append(run_agent(name, command, args.records))
        if args.lose_first:
            lost = run_agent(name, command, lose_first=True)
            outcomes[-1].repeated = lost.repeated
            outcomes[-1].faults += [f"after a lost connection: {fault}" for fault in lost.faults]
        sys.stderr.write(table(outcomes[-1:]).splitlines()[-1] + "\n")
    sys.stdout.write(table(outcomes) + "\n")
    if args.json is not None:
        save_results(args.json, {"harnesses": table(outcomes)}, [asdict(outcome) for outcome in outcomes])
    sys.exit(any(outcome.faults for outcome in outcomes))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venvs", type=Path, default=Path("build/harnesses"))
    parser.add_argument("--only", nargs="+", default=[], choices=list(EXPECTED), metavar="NAME")
    parser.add_argument("--records", type=Path, help="folder for the requests as JSON, for tests")
    parser.add_argument(
        "--lose-first", action="store_true", help="run each once more, and lose its first connection"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with one line per agent.

    Example:
        >>> print(table([Outcome("strands", 3, 1, 90, 90, 300, 700, "responses", calls=3)]).splitlines()[-1])
        | strands | yes | responses | 3 | 1 | - | 90 | 90 | 300 of 700 | 3 / 0 |
    """
    lines = [
        "| agent | holds | speaks | requests | branches | a lost request comes again as | tokens sampled | trained "
        "| rendered, of all that the policy read | calls read / not |",
        "|---" * 10 + "|",
    ]
    for o in outcomes:
        holds = f"**no: {'; '.join(o.faults)}**".replace("|", "/").replace("\n", " ") if o.faults else "yes"
        asked = f"{o.dialects} | {o.requests} | {o.branches} | {o.repeated or '-'}"
        tokens = f"{o.sampled_tokens:,} | {o.trained_tokens:,} | {o.prompt_tokens:,} of {o.seen_tokens:,}"
        lines.append(f"| {o.agent} | {holds} | {asked} | {tokens} | {o.calls} / {o.unreadable_calls} |")
    return "\n".join(lines)


def run_agent(
    name: str, command: list[str], records: Path | None = None, *, lose_first: bool = False
) -> Outcome:
    """Run one agent, and check what is recorded of it."""
    outcome, wire = Outcome(name), Wire(lose_first=lose_first)
    with tempfile.TemporaryDirectory() as folder:
        renderer = make_renderer(Path(folder))
        policy = ScriptedPolicy(renderer.encode, lambda ids: renderer.decode(ids, keep_special=True))
        suite = suite_of(command, Path(folder))
        cuts = asyncio.run(asyncio.wait_for(play(suite, renderer, policy, wire), LIMIT_S))
    gauges = suite.gauges()
    outcome.calls = round(gauges["agent_calls_total"])
    outcome.unreadable_calls = round(gauges["agent_calls_unreadable_total"])
    last = cuts[-1].segment
    outcome.output = str(last.extra.get("info"))
    if last.status != "finished":
        outcome.faults.append(f"{last.status}: {last.error or last.stop_reason}")
    check(outcome, assemble(cuts), policy)
    outcome.dialects = wire.dialects
    if lose_first:
        outcome.repeated = wire.repeated
        if not wire.repeated:
            outcome.faults.append("the lost request was not sent again")
    if (outcome.requests, outcome.branches) != EXPECTED[name]:
        outcome.faults.append(f"expected {EXPECTED[name]} requests and branches")
    if records is not None and not outcome.faults:
        records.mkdir(parents=True, exist_ok=True)
        text = json.dumps(suite.records, indent=1, ensure_ascii=False)
        (records / f"{name.replace(', ', '-').replace(' ', '-')}.json").write_text(text + "\n")
    return outcome


def check(outcome: Outcome, trajectory: Trajectory, policy: ScriptedPolicy) -> None:
    """Compare a trajectory with what the policy was asked and what it sampled."""
    turns = {turn.index: turn for turn in trajectory.turns}
    answers = [turn for turn in trajectory.turns if turn.action]
    outcome.requests = len(policy.prompts)
    branches = trajectory.branches()
    outcome.branches = len(branches)
    outcome.sampled_tokens = sum(map(len, policy.sampled))
    outcome.prompt_tokens = len(trajectory) - trajectory.action_tokens
    outcome.seen_tokens = sum(map(len, policy.prompts))
    owned = np.concatenate([branch.places[branch.own] for branch in branches])
    outcome.trained_tokens = int(trajectory.learned_mask[owned].sum())
    if sorted(owned.tolist()) != list(range(len(trajectory))):
        outcome.faults.append("a token is in no branch of its own, or in two")
    if len(answers) != len(policy.prompts):
        outcome.faults.append(f"{len(answers)} answers of {len(policy.prompts)} are recorded")
    asked = zip(answers, policy.prompts, policy.sampled, policy.versions, strict=False)
    for number, (turn, prompt, sampled, versions) in enumerate(asked):
        here = slice(turn.start, turn.end)
        context: list[int] = []
        at = turn
        while at.back and at.index:
            at = turns[at.index - at.back]
            context = [*trajectory.token_ids[at.start : at.end].tolist(), *context]
        for what, found, meant in (
            ("prompt", context, prompt),
            ("tokens", trajectory.token_ids[here].tolist(), sampled),
            ("versions", trajectory.policy_version[here].tolist(), versions),
        ):
            if found != meant:
                outcome.faults.append(f"the {what} of answer {number} are others")


def make_renderer(folder: Path) -> Renderer:
    """Return a renderer with a token for each byte, and the template of Qwen3."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return Renderer(folder)


def suite_of(command: list[str], folder: Path) -> RecordedSuite:
    """Return the suite of one agent on one row."""
    (folder / "train.jsonl").write_text(json.dumps({"question": "12 + 7?"}) + "\n")
    (folder / "score.py").write_text("def score(row, output):\n    return float('19' in output)\n")
    params: dict[str, Any] = {
        "run": command,
        "train": str(folder / "train.jsonl"),
        "score": f"{folder}/score.py:score",
        "heldout": 0.0,
    }
    return RecordedSuite(cast(AgentSuite, make_suite("agent", params)))


async def play(
    suite: RecordedSuite, renderer: Renderer, policy: ScriptedPolicy, wire: Wire
) -> list[SegmentArrays]:
    """Play one episode as an actor does. Return its segments."""
    cuts: list[SegmentArrays] = []

    async def emit(new: Sequence[SegmentArrays]) -> None:
        cuts.extend(new)

    task = Task(
        task_id="t",
        env="agent",
        group_id="g",
        group_size=1,
        data={"index": 0, "split": "train"},
        deadline_s=LIMIT_S,
        sampling=Sampling(max_turn_tokens=2**14, max_trajectory_tokens=2**18),
    )
    runner = EnvironmentRunner(calls=2)
    server = await wire.start()
    try:
        bounds = Bounds(env_timeout_s=LIMIT_S)
        lease = LeaseTask(lease_id="l", attempt=0, task=task)
        with wire.installed():
            await Episode(lease, suite, renderer, policy, bounds, emit, runner, way_of_playing).run()
    finally:
        await server.cleanup()
        await runner.call(suite.close, what="close", timeout_s=10.0)
        runner.close()
    return cuts
