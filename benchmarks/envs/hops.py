"""Questions that a paid tool answers hop by hop: a right answer takes as many calls as the task has hops.

The graphs are those of reasoning-gym's `path_star`: arms of nodes from a centre. The edges are the store of a tool. The
question "73" names a node and the number of hops to the end of its arm, and what stands behind them has no meaning.
The action "g7" gets the next node, which the tool answers with its label and the hops left, for example "42". The
action "=9" answers, and ends the episode. With 0 hops the answer stands in the question. More calls than hops do no
harm and bring nothing, so a policy that is paid for right answers alone has no reason to call less.

With modes, the first action begins with the letter of one. "i=9" answers at once (instant), and "r42=9" says what it
sees and answers (reasoning). "ag7" calls, and the episode goes on as above (agentic). No mode may do what another does.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.calculator import MODES, mode_of
from envs.errors import EnvError
from envs.reasoning_gym_suite import task_of
from envs.scoring.questions import Family
from envs.scoring.scorer import Question, Scorer
from envs.scoring.worker_process import Sandbox

NOISE = "stuvwxyz"
"""Letters without a meaning. They make prompts differ, so that the warm start cannot memorise a prompt."""
NOISE_LETTERS = 3
LABELS = 10
"""Labels of nodes, one digit each."""
_EDGES = re.compile(r"Solve the following task:\n\|(?P<edges>[\d |]+)/")
_CALL, _ANSWER = re.compile(r"g(\d)"), re.compile(r"=(\d)")


@dataclass(frozen=True)
class HopsTask:
    """One question: the edges of its graph, and the nodes from the start to the answer."""

    edges: dict[str, str]
    """Successor of each node but the centre."""
    way: tuple[str, ...]
    """Nodes from the start to the answer, both included."""
    noise: str

    @property
    def question(self) -> str:
        """Message of the user."""
        return self.seen(self.way[0]) + self.noise

    @property
    def answer(self) -> str:
        """Label of the node at the end of the way."""
        return self.way[-1]

    def seen(self, node: str) -> str:
        """Return what a question or a result shows of a node: its label, and the hops left or "-" off the way."""
        return node + (str(len(self.way) - 1 - self.way.index(node)) if node in self.way else "-")

    def get(self, node: str) -> str:
        """Return the tool's result for a node; "." if it has no successor.

        Example:
            >>> task = HopsTask({"1": "4", "4": "7", "5": "2"}, ("1", "4", "7"), "xyz")
            >>> task.question, task.get("1"), task.get("4"), task.get("5"), task.get("7")
            ('12xyz', '41', '70', '2-', '.')
        """
        return self.seen(self.edges[node]) if node in self.edges else "."


def task_from(question: Question, rng: np.random.Generator) -> HopsTask:
    """Return a task on a graph of the library. The generator draws the number of hops, 0 to the length of an arm.

    Raises:
        EnvError: the question is not in the form of the known library.
    """
    found = _EDGES.search(question.question)
    if found is None or question.answer is None:
        raise EnvError(
            f"not a path_star question: {question.question!r:.200}; is reasoning_gym another version?"
        )
    centre, *arm = question.answer.split()
    edges = dict(edge.split() for edge in found["edges"].split("|") if not edge.startswith(f"{centre} "))
    hops = int(rng.integers(len(arm)))
    return HopsTask(edges, tuple(arm[-1 - hops :]), "".join(rng.choice(list(NOISE), size=NOISE_LETTERS)))


class HopsSuite:
    """Suite of questions with a `get` tool. The reward is `answer`; marks are `calls` and `anchor`.

    Args:
        hops: largest number of hops, at most 3, because labels have one digit.
        max_turns: turns of an episode. The last one ends it.
        wasted: share of a demonstration's turns that call a node again.
        hasty: share of a demonstration's turns that answer too early, with the node seen last.
        modes: begin the first action with the letter of a mode, which the mark "mode" names. The demonstrations
            choose it by chance, whatever the question.
        eager: share of the demonstrations that are agentic. The other two modes share the rest.
        seed, heldout_share, sandbox: see `envs.reasoning_gym_suite.ReasoningGymSuite`.

    Raises:
        EnvError: a setting is wrong.
    """

    def __init__(
        self,
        hops: int = 3,
        max_turns: int = 8,
        wasted: float = 0.4,
        hasty: float = 0.15,
        modes: bool = False,
        eager: float = 1 / 3,
        seed: int = 0,
        heldout_share: float = 0.125,
        sandbox: Sandbox = "auto",
    ) -> None:
        if not 1 <= hops <= 3 or max_turns <= hops:
            raise EnvError(
                f"hops = {hops}, max_turns = {max_turns}: choose 1 to 3 hops, and more turns than hops"
            )
        arms = {"min_path_length": hops + 1, "max_path_length": hops + 1, "degree": 2, "node_range": LABELS}
        self.scorer = Scorer(Family("path_star", arms, seed, heldout_share), sandbox)
        self.modes, self._eager = modes, eager
        self.max_turns, self._wasted, self._hasty, self._seed = max_turns, wasted, hasty, seed

    def episode(self) -> Env:
        return HopsEpisode(self)

    def facts(self) -> SuiteFacts:
        """Return the names of the reward and of the marks."""
        marks = ("anchor", "calls", *(("mode",) if self.modes else ()))
        return SuiteFacts(reward_names=("answer",), mark_names=marks)

    def task(self, question: Question) -> HopsTask:
        """Return the task on a question's graph. It is the same in every call."""
        return task_from(question, np.random.default_rng([self._seed, question.position]))

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return an episode that wastes calls, answers too early, or does what is right, by chance. Blocks."""
        task = self.task(self.scorer.entry_now(index, split))
        rng = np.random.default_rng([self._seed, index, 1])
        talk: list[ChatMessage] = [{"role": "user", "content": task.question}]
        letter = ""
        if self.modes:
            rest = (1.0 - self._eager) / 2
            letter = str(rng.choice(list(MODES), p=[rest, rest, self._eager]))
        node, before = task.way[0], task.way[0]
        if letter in ("i", "r"):
            seen = task.seen(node) if letter == "r" else ""
            return [*talk, {"role": "assistant", "content": f"{letter}{seen}={node}"}]
        for _ in range(self.max_turns - 1):
            chance = rng.random()
            ready = (node == task.answer and chance >= self._wasted) or chance > 1.0 - self._hasty
            # The first action of the agentic mode is a call.
            if ready and not letter:
                break
            called = before if chance < self._wasted else node
            result = task.get(called)
            talk.append({"role": "assistant", "content": f"{letter}g{called}"})
            letter = ""
            talk.append({"role": "tool", "content": result})
            node, before = (result[0], called) if result != "." else (node, before)
        return [*talk, {"role": "assistant", "content": f"{letter}={node}"}]

    def gauges(self) -> dict[str, float]:
        return self.scorer.gauges()

    async def close(self) -> None:
        await self.scorer.close()


class HopsEpisode:
    """One question."""

    def __init__(self, suite: HopsSuite) -> None:
        self._suite = suite
        self._task: HopsTask | None = None
        self._turns, self._seen, self._mode = 0, "", ""

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        self._task = self._suite.task(await self._suite.scorer.entry(*task_of(data)))
        self._seen = self._task.seen(self._task.way[0])
        return [{"role": "user", "content": self._task.question}]

    async def step(self, action: str) -> StepResult:
        task = self._task
        assert task is not None, "step before reset"
        self._turns += 1
        if self._suite.modes and self._turns == 1:
            self._mode, action = mode_of(action)
        if self._mode == "reasoning":
            action = action.removeprefix(self._seen)
        called, answered = _CALL.fullmatch(action), _ANSWER.fullmatch(action)
        if self._mode:
            # A mode without calls that calls, one with calls that begins with an answer, and no mode are not paid.
            answering = ("agentic",) if self._turns > 1 else ("instant", "reasoning")
            called = called if self._mode == "agentic" else None
            answered = answered if self._mode in answering else None
        marks: dict[str, str | float] = {"anchor": self._seen, "calls": float(called is not None)}
        if self._mode:
            marks["mode"] = self._mode
        if called is not None and self._turns < self._suite.max_turns:
            self._seen = task.get(called[1])
            return StepResult({"role": "tool", "content": self._seen}, rewards={"answer": 0.0}, marks=marks)
        right = answered is not None and answered[1] == task.answer
        return StepResult(rewards={"answer": float(right)}, done=True, correct=right, marks=marks)

    async def close(self) -> None:
        return None
