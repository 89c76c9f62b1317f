"""Suite of sums that are solved turn by turn with a calculator tool.

The question comes from reasoning_gym's `chain_sum`. The environment answers an action such as ``12+7`` with a
tool message ``19``. The action ``=14`` ends the episode with an answer. Solved step by step, a sum of n terms
takes n turns.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.errors import EnvError
from envs.reasoning_gym_suite import opening, task_of
from envs.scoring.questions import Family
from envs.scoring.scorer import Scorer
from envs.scoring.worker_process import Sandbox

MOST_DIGITS = 12
_NUMBER = rf"-?[0-9]{{1,{MOST_DIGITS}}}"
_CALL = re.compile(rf"\s*({_NUMBER})\s*([+-])\s*({_NUMBER})\s*")
_ANSWER = re.compile(rf"\s*=\s*({_NUMBER})\s*")
MODES = {"i": "instant", "r": "reasoning", "a": "agentic"}
"""Modes by the letter with which a first answer begins, if the suite has modes."""
_WORKING = re.compile(rf"[0-9+=\s-]*=\s*({_NUMBER})\s*")
_QUESTION = re.compile(rf"problem: ({_NUMBER}(?: [+-] {_NUMBER})*) =")


@dataclass(frozen=True)
class Rules:
    """Rules by which actions are rewarded; see `CalculatorSuite`."""

    step_reward: float = 0.2
    answer_reward: float = 1.0
    max_turns: int = 8
    end_on_wrong_step: bool = False
    answer_needs_steps: bool = False
    modes: bool = False


class CalculatorSuite:
    """Suite of sums with a calculator tool.

    Args:
        min_terms, max_terms, min_digits, max_digits: bounds of a sum's terms, and of the digits of each term.
        seed, heldout_share, sandbox, instruction: see `envs.reasoning_gym_suite.ReasoningGymSuite`.
        step_reward: reward "step" for each next partial sum, computed in order from the left.
        answer_reward: reward "answer" for the right final answer.
        max_turns: actions that an episode may take. The last one ends it.
        end_on_wrong_step: end the episode at a call that is not the next partial sum.
        answer_needs_steps: reward an answer only after all partial sums.
        direct_share: share of the demonstrations that work out the last partial sum without a call, so that a model
            that learns from them knows two ways to an answer. 0 to 1.
        repeat_share: share of the demonstrations that make the last call twice, of those that have it. 0 to 1.
        modes: begin the first answer with the letter of a mode, which the mark "mode" names. "i" (instant): an answer
            and nothing else. "r" (reasoning): a working and an answer in one text, as in "r4+3=7-9=-2". "a" (agentic):
            calls of the tool, at least one, then an answer. The demonstrations have each mode equally often.

    Raises:
        EnvError: the settings contradict each other, e.g. fewer turns than a sum needs.
    """

    def __init__(
        self,
        min_terms: int = 3,
        max_terms: int = 3,
        min_digits: int = 1,
        max_digits: int = 2,
        seed: int = 0,
        heldout_share: float = 0.125,
        sandbox: Sandbox = "auto",
        instruction: str = "",
        step_reward: float = 0.2,
        answer_reward: float = 1.0,
        max_turns: int = 8,
        end_on_wrong_step: bool = False,
        answer_needs_steps: bool = False,
        direct_share: float = 0.0,
        repeat_share: float = 0.0,
        modes: bool = False,
    ) -> None:
        for name, share in (("direct_share", direct_share), ("repeat_share", repeat_share)):
            if not 0 <= share <= 1:
                raise EnvError(f"{name} = {share:g}: a share is from 0 to 1")
        if max_turns < max_terms:
            raise EnvError(
                f"max_turns = {max_turns}: a sum of max_terms = {max_terms} terms takes as many turns"
            )
        if max_terms * (10**max_digits - 1) >= 10**MOST_DIGITS:
            raise EnvError(
                f"max_digits = {max_digits}, max_terms = {max_terms}: a sum may have more than {MOST_DIGITS} digits, "
                "which actions may not; lower max_digits"
            )
        if modes and answer_needs_steps:
            raise EnvError(
                "modes = true and answer_needs_steps = true: an answer without calls would never be right; set "
                "answer_needs_steps = false"
            )
        sums = {
            "min_terms": min_terms,
            "max_terms": max_terms,
            "min_digits": min_digits,
            "max_digits": max_digits,
        }
        self.scorer = Scorer(Family("chain_sum", sums, seed, heldout_share), sandbox)
        self._rules = Rules(
            step_reward, answer_reward, max_turns, end_on_wrong_step, answer_needs_steps, modes
        )
        self._instruction = instruction
        self._direct_share, self._repeat_share = direct_share, repeat_share

    def episode(self) -> Env:
        return _CalculatorEpisode(self.scorer, self._rules, self._instruction)

    def facts(self) -> SuiteFacts:
        """Return the names of the rewards and of the marks."""
        marks = ("anchor", "calls", "call", *(("mode",) if self._rules.modes else ()))
        return SuiteFacts(reward_names=("step", "answer"), mark_names=marks, hints=False)

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return the sum solved from the left, with one tool call per turn. Blocks.

        The shares `direct_share` and `repeat_share` of the tasks are spread evenly over their numbers.
        """
        question = self.scorer.entry_now(index, split).question
        messages = opening(question, self._instruction)
        steps = partial_sums(question)
        done = index - int(index * self._direct_share)
        if falls_due(index, self._direct_share):
            steps = steps[:-1]
        elif falls_due(done, self._repeat_share):
            steps = [*steps, steps[-1]]
        letter = list(MODES)[index % len(MODES)] if self._rules.modes else ""
        answer = f"={solution(question)}"
        if letter in ("i", "r"):
            working = _working(steps) if letter == "r" else answer
            return [*messages, {"role": "assistant", "content": letter + working}]
        for call, result in steps:
            messages.append({"role": "assistant", "content": letter + call})
            messages.append({"role": "tool", "content": str(result)})
            letter = ""
        messages.append({"role": "assistant", "content": letter + answer})
        return messages

    def gauges(self) -> dict[str, float]:
        """Return the scorer's counters, for the actor's heartbeat."""
        return self.scorer.gauges()

    async def close(self) -> None:
        await self.scorer.close()


def mode_of(action: str) -> tuple[str, str]:
    """Return the mode that the letter in front of a first answer names, and the answer behind it.

    Example:
        >>> mode_of("i=7"), mode_of("=7")
        (('instant', '=7'), ('none', '=7'))
    """
    mode = MODES.get(action[:1], "none")
    return mode, action[1:] if mode != "none" else action


def _working(steps: list[tuple[str, int]]) -> str:
    """Return partial sums in one line.

    Example:
        >>> _working([("4+3", 7), ("7-9", -2)])
        '4+3=7-9=-2'
    """
    first, *rest = steps
    line = f"{first[0]}={first[1]}"
    for (call, result), (_, before) in zip(rest, steps, strict=False):
        line += f"{call.removeprefix(str(before))}={result}"
    return line


def falls_due(index: int, share: float) -> bool:
    """Return whether the one with this number is among a share of all that is spread evenly.

    Example:
        >>> [falls_due(index, 0.5) for index in range(4)]
        [False, True, False, True]
    """
    return int((index + 1) * share) > int(index * share)


class _CalculatorEpisode:
    def __init__(self, scorer: Scorer, rules: Rules, instruction: str) -> None:
        self._scorer, self._rules, self._instruction = scorer, rules, instruction
        self._game: Game | None = None

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        entry = await self._scorer.entry(*task_of(data))
        self._game = Game(entry.question, self._rules)
        return opening(entry.question, self._instruction)

    async def step(self, action: str) -> StepResult:
        assert self._game is not None, "step before reset"
        return self._game.step(action)

    async def close(self) -> None:
        return None


class Game:
    """State of one sum: the number of partial sums done and of turns taken. Pure.

    Example:
        >>> game = Game("State the final answer to the following arithmetic problem: 4 + 3 - 9 =", Rules())
        >>> game.step("4+3").observation["content"], game.step("7-9").rewards
        ('7', {'step': 0.2})
        >>> game.step("=-2").correct
        True
    """

    def __init__(self, question: str, rules: Rules) -> None:
        self._steps = partial_sums(question)
        self._solution = solution(question)
        self._rules = rules
        self._done = 0
        self._turns = 0
        self._seen, self._mode = "", ""
        self._calls: set[str] = set()

    def step(self, action: str) -> StepResult:
        """Answer and reward one action. Anything but a call or an answer ends the episode with reward 0.

        The mark "anchor" is the number of partial sums done and the result that the action saw; "calls" is 1 for a
        call and 0 for an answer; "call" is "exploration" for a call, "redundant_query" for a call that was made before,
        and "none" for an answer. With modes, "mode" is the mode of the episode, "none" without its letter.

        Example:
            >>> rules = Rules(modes=True)
            >>> question = "State the final answer to the following arithmetic problem: 4 + 3 ="
            >>> [Game(question, rules).step(text).correct for text in ("i=7", "r4+3=7", "=7", "i4+3", "a=7")]
            [True, True, False, False, False]
            >>> Game(question, rules).step("a4+3").marks["mode"]
            'agentic'
        """
        if self._rules.modes and not self._turns:
            self._mode, action = mode_of(action)
            if self._mode != "agentic" or _ANSWER.fullmatch(action):
                return self._in_one_answer(action)
        anchor, called = f"{self._done} {self._seen}", calculate(action)
        self._seen = "" if called is None else str(called)
        label = (
            "none"
            if called is None
            else "redundant_query"
            if _normal(action) in self._calls
            else "exploration"
        )
        self._calls.add(_normal(action))
        marks: dict[str, str | float] = {"anchor": anchor, "calls": float(called is not None), "call": label}
        if self._mode:
            marks["mode"] = self._mode
        return replace(self._answer(action), marks=marks)

    def _in_one_answer(self, text: str) -> StepResult:
        """Value an answer in one text: one of a mode without calls, or one that no mode allows."""
        self._turns += 1
        form = {"instant": _ANSWER, "reasoning": _WORKING}.get(self._mode)
        found = form.fullmatch(text) if form is not None else None
        marks: dict[str, str | float] = {"anchor": "0 ", "calls": 0.0, "call": "none", "mode": self._mode}
        result = self._answered(int(found[1])) if found is not None else self._end("malformed")
        return replace(result, marks=marks)

    def _answer(self, action: str) -> StepResult:
        self._turns += 1
        if answered := _ANSWER.fullmatch(action):
            return self._answered(int(answered[1]))
        result = calculate(action)
        if result is None:
            return self._end("malformed")
        reward = self._reward_step(action)
        if self._rules.end_on_wrong_step and reward is None:
            return self._end("wrong step")
        rewards = {"step": reward or 0.0}
        if self._turns >= self._rules.max_turns:
            return StepResult(
                rewards=rewards,
                done=True,
                correct=False,
                info=self._info("no turns left"),
                target=str(self._solution),
            )
        return StepResult(observation={"role": "tool", "content": str(result)}, rewards=rewards)

    def _reward_step(self, action: str) -> float | None:
        """Return the step's reward if the action is the next partial sum, else None."""
        if self._done == len(self._steps):
            return None
        call, _ = self._steps[self._done]
        if _normal(action) != _normal(call):
            return None
        self._done += 1
        return self._rules.step_reward

    def _answered(self, value: int) -> StepResult:
        correct = value == self._solution
        earned = correct and (self._done == len(self._steps) or not self._rules.answer_needs_steps)
        rewards = {"answer": self._rules.answer_reward * earned}
        return StepResult(
            rewards=rewards,
            done=True,
            correct=correct,
            info=self._info("answered"),
            answer=str(value),
            target=str(self._solution),
        )

    def _end(self, why: str) -> StepResult:
        return StepResult(
            rewards={"answer": 0.0},
            done=True,
            correct=False,
            info=self._info(why),
            target=str(self._solution),
        )

    def _info(self, end: str) -> dict[str, Any]:
        return {"end": end, "steps": self._done, "turns": self._turns}


def calculate(action: str) -> int | None:
    """Return the result of a tool call, the sum or difference of two integers; None for any other text.

    Example:
        >>> calculate("12+7"), calculate("3--4"), calculate("2**9"), calculate("1+2+3")
        (19, 7, None, None)
    """
    call = _CALL.fullmatch(action)
    if call is None:
        return None
    left, sign, right = int(call[1]), call[2], int(call[3])
    return left + right if sign == "+" else left - right


def partial_sums(question: str) -> list[tuple[str, int]]:
    """Return the tool calls that solve a sum from the left, with their results.

    Example:
        >>> partial_sums("State the final answer to the following arithmetic problem: 4 + 3 - 9 =")
        [('4+3', 7), ('7-9', -2)]
    """
    first, *rest = _terms(question)
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        call = f"{total}{sign}{term}"
        total = total + int(term) if sign == "+" else total - int(term)
        steps.append((call, total))
    return steps


def solution(question: str) -> int:
    """Return the value of the sum."""
    steps = partial_sums(question)
    return steps[-1][1] if steps else int(_terms(question)[0])


def _terms(question: str) -> list[str]:
    found = _QUESTION.search(question)
    if found is None:
        raise EnvError(
            f"not a chain_sum question: {question!r}; is another version of reasoning_gym installed?"
        )
    return found[1].split(" ")


def _normal(action: str) -> str:
    return re.sub(r"\s", "", action)
