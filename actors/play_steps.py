"""Plays an episode in which the environment and the policy take turns, by `envs.base.Env.reset` and `step`.

It may begin with a note, with the turns of an earlier episode, or with the first words of the answer, as the learner
asked.
"""

from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple, cast

import numpy as np

from actors.conversation import Observation
from actors.env_results import (
    check_conversation,
    check_tools,
    checked_limit,
    checked_marks,
    closing_of,
    earlier_rewards,
    finite_rewards,
    no_room,
)
from actors.episode import Episode, SampledTime
from actors.errors import ActorError, EnvironmentFailed, PrefixDiverged, TeacherFailed
from actors.generator_client import routed
from actors.segments import Closing
from envs.base import (
    ChatMessage,
    Env,
    HasTools,
    HasTurnFacts,
    HasTurnLimit,
    StepResult,
    ToolSchema,
    TurnFacts,
    can_refuse,
)
from protocol.arrays import SegmentArrays
from protocol.messages.episodes import Task, TaskStart
from protocol.messages.fields import TrajectoryStatus


class RepeatedTurn(NamedTuple):
    """One turn of a prefix."""

    token_ids: list[int]
    action: bool
    """True if the policy sampled it in the trajectory that the prefix was cut from."""


def with_note(messages: Sequence[ChatMessage], note: str) -> list[ChatMessage]:
    """Return the first messages of an episode with a note behind the text of the last one, after an empty line.

    Args:
        messages: what the environment's ``reset`` returned.
        note: `Task.note`; "" leaves the messages as they are.

    Raises:
        ActorError: there is a note, and the last message is the assistant's, or there is no message.

    Example:
        >>> with_note([{"role": "user", "content": "What is 17 + 25?"}], "Begin with 7 + 5.")
        [{'role': 'user', 'content': 'What is 17 + 25?\\n\\nBegin with 7 + 5.'}]
    """
    if not note:
        return list(messages)
    if not messages or messages[-1]["role"] == "assistant":
        raise ActorError(
            "the task has a note, but the first prompt does not end with a message that it can follow"
        )
    last = cast(ChatMessage, {**messages[-1], "content": f"{messages[-1]['content']}\n\n{note}"})
    return [*messages[:-1], last]


def repeated_turns(start: TaskStart) -> list[RepeatedTurn]:
    """Return the turns of a prefix: a prompt, then actions and observations in turns, an observation last.

    Raises:
        ActorError: the prefix has a different form.

    Example:
        >>> from protocol.messages.episodes import Turn
        >>> turns = [Turn(0, 0, 1, False), Turn(1, 1, 2, True), Turn(2, 2, 3, False)]
        >>> ids = np.array([5, 6, 7], "<i4").tobytes()
        >>> [turn.token_ids for turn in repeated_turns(TaskStart(token_ids=ids, turns=turns, parent="1g17.0.0"))]
        [[5], [6], [7]]
    """
    if len(start.token_ids) % 4:
        raise ActorError(
            f"the prefix of {start.parent} has {len(start.token_ids)} bytes, which are no token ids"
        )
    token_ids = np.frombuffer(start.token_ids, "<i4").tolist()
    at = 0
    for number, turn in enumerate(start.turns):
        if (
            (turn.index, turn.start, turn.action) != (number, at, bool(number % 2))
            or turn.end <= at
            or turn.back != 1
        ):
            raise ActorError(
                f"the prefix of {start.parent} has no plain conversation: turn {number} is {turn}"
            )
        at = turn.end
    if at != len(token_ids) or len(start.turns) % 2 == 0:
        raise ActorError(
            f"the prefix of {start.parent} has {len(start.turns)} turns and {len(token_ids)} tokens; it must end with "
            "an observation"
        )
    return [RepeatedTurn(token_ids[turn.start : turn.end], turn.action) for turn in start.turns]


def check_room(task: Task, *, prompt: int, most_turns: int) -> None:
    """Check that an episode may go on behind the prefix of its task.

    Args:
        task: a task with a prefix.
        prompt: tokens of the first prompt, which is longer than the prefix's if the task has a note, too.
        most_turns: most actions of an episode.

    Raises:
        ActorError: the prefix has as many tokens or actions as an episode may have.
    """
    assert task.start is not None, "the caller has looked"
    bound = "max_context_tokens" if task.sampling.max_context_tokens else "max_trajectory_tokens"
    limit = task.sampling.max_context_tokens or task.sampling.max_trajectory_tokens
    tokens = prompt + len(task.start.token_ids) // 4 - task.start.turns[0].end
    if tokens >= limit:
        raise ActorError(f"prefix of {tokens} tokens leaves no room for an answer; {bound} is {limit}")
    if (actions := len(task.start.turns) // 2) >= most_turns:
        raise ActorError(
            f"prefix of {actions} actions leaves none to this episode; actor.max_turns is {most_turns}"
        )


def check_repeated(number: int, expected: Sequence[int], found: Sequence[int]) -> None:
    """Compare an observation with that of the prefix, token by token.

    Raises:
        PrefixDiverged: they differ; the text names the turn and the first token.

    Example:
        >>> check_repeated(2, [5, 6, 7], [5, 9, 7])
        Traceback (most recent call last):
        ...
        actors.errors.PrefixDiverged: prefix diverged at turn 2: token 1 of its observation is 9, it was 6; ...
    """
    if list(expected) == list(found):
        return
    at = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
    if at is None:
        what = f"its observation has {len(found)} tokens, it had {len(expected)}"
    else:
        what = f"token {at} of its observation is {found[at]}, it was {expected[at]}"
    raise PrefixDiverged(
        f"prefix diverged at turn {number}: {what}; the environment must answer the same actions of a task alike"
    )


class PlayBySteps:
    """One answer at a time: each is given to the environment, whose result is the next observation."""

    def __init__(self, env: Env, episode: Episode) -> None:
        self._env, self._task, self._max_turns = env, episode.task, episode.max_turns
        self._calls, self._conversations, self._sampler = (
            episode.calls,
            episode.conversations,
            episode.sampler,
        )
        self._stream, self._cutter = episode.stream, episode.stream.cutter
        self._tokens: list[int] = []
        """Tokens of the present branch."""
        self._routed = 0
        """First of them whose experts are not known."""
        self._keep_special = False
        """True if the environment parses tool calls, whose marks may be special tokens."""
        self._generator = ""
        self._said: list[ChatMessage] = []
        """The conversation so far, for a teacher. Kept only if the task names one."""
        self._opened: list[int] = []
        """Tokens of the task's opening, until the first answer has been given."""
        self._tools_noted = 0.0
        """Seconds of the environment that are in `TurnTime`s."""

    async def play(self) -> TrajectoryStatus:
        """Play to the end. Return the status with which the trajectory was closed.

        Raises:
            ActorError: the environment or the answer is at fault, or a prompt leaves no room.
            Infrastructure: neither is at fault.
        """
        opening = await self._opening()
        if (length := len(opening.token_ids)) >= self._conversations.longest:
            raise no_room(length, self._conversations.bound, self._conversations.longest)
        await self._add_observation(opening)
        self._note_tools(0)
        for turn in range(await self._repeat_prefix(), self._max_turns):
            sampled, reason = await self._sample_turn(turn, await self._longest_turn())
            await self._tell_turn_facts(sampled, cut=reason == "length")
            result = await self._give_answer(sampled)
            rewards, marks = finite_rewards(result), checked_marks(result.marks)
            result, observation = await self._rendered(result)
            if result.done:
                rewards |= finite_rewards(result)
            self._note_said(result)
            closing = self._closing_after(result, turn, reason, observation)
            earlier = earlier_rewards(result, self._conversations.answers) if closing is not None else []
            self._note_tools(self._cutter.turn)
            await self._stream.send(self._cutter.close_turn(rewards, reason, closing, marks, earlier))
            if closing is not None:
                return closing.status
            await self._add_observation(observation)
        raise AssertionError("the last turn closes the trajectory")

    def _note_said(self, result: StepResult) -> None:
        """Note the messages behind an answer for a teacher, which knows no tools and no second conversation.

        Raises:
            TeacherFailed: the environment began a further conversation, or went back to an earlier answer.
        """
        if not self._task.policy or result.done:
            return
        if result.after is not None and result.after != len(self._conversations.answers) - 1:
            raise TeacherFailed(
                "a teacher is asked for one growing conversation, but the environment left it"
            )
        self._said += result.messages()

    def _note_tools(self, turn: int) -> None:
        """Note the time in the environment since the last call for a turn."""
        seconds, self._tools_noted = self._calls.seconds - self._tools_noted, self._calls.seconds
        self._cutter.note_time(turn, tools=seconds)

    def unsent_segments(self) -> list[SegmentArrays]:
        """Return segments of what was sampled and was not sent: none, as each is sent when it is cut."""
        return []

    async def _opening(self) -> Observation:
        """Begin the episode. Return its first prompt."""
        messages = await self._calls.ask(self._env.reset, dict(self._task.data))
        tools: list[ToolSchema] = []
        if isinstance(self._env, HasTools):
            tools = await self._calls.ask(self._env.tool_schemas, on_loop=True)
        try:
            check_conversation(messages, "reset")
            check_tools(tools, "tool_schemas")
            noted = with_note(messages, self._task.note)
            opening = self._opened_by_task(self._conversations.first(noted, tools))
            if self._task.policy:
                if tools:
                    raise TeacherFailed("a teacher is asked in words, and the environment has tools")
                self._said = noted
        except TeacherFailed:
            raise
        except ActorError as error:
            refused = await self._calls.refused(self._env, error)
        else:
            if not self._is_declined(opening):
                return opening
            refused = await self._calls.refused(self._env, self._too_long_error(), too_long=True)
        self._opened = []
        result, observation = await self._rendered(refused)
        if result.done:
            raise EnvironmentFailed("environment: refuse ended an episode that has no answer")
        return observation

    def _opened_by_task(self, prompt: Observation) -> Observation:
        """Return the first prompt with the tokens of the task's opening behind it.

        Raises:
            ActorError: a teacher or an earlier episode begins the answer.
        """
        task = self._task
        if not task.opening:
            return prompt
        if task.policy or task.start is not None:
            raise ActorError("the task has an opening beside a teacher or a prefix; it may have one of them")
        self._opened = self._conversations.opening(task.opening)
        return prompt._replace(token_ids=[*prompt.token_ids, *self._opened])

    async def _give_answer(self, sampled: list[int]) -> StepResult:
        """Give an answer to the environment, the first one behind the task's opening."""
        text = self._sampler.text_of([*self._opened, *sampled], keep_special=self._keep_special)
        self._opened = []
        if self._task.policy:
            self._said.append({"role": "assistant", "content": text})
        return await self._calls.result(self._env.step, text)

    async def _tell_turn_facts(self, sampled: list[int], *, cut: bool) -> None:
        """Tell the environment the facts of a turn, if it wants them."""
        if isinstance(self._env, HasTurnFacts):
            facts = TurnFacts(len(self._tokens) - len(sampled), len(sampled), cut=cut)
            await self._calls.ask(self._env.turn_facts, facts, on_loop=True)

    async def _repeat_prefix(self) -> int:
        """Repeat the actions of the task's prefix behind the first prompt. Return their number.

        A task that has a note as well has another prompt than its prefix, so that prompt is not compared.

        Raises:
            PrefixDiverged: the prompt or an observation has other tokens than in the prefix.
            ActorError: the prefix is not one, or leaves no room for an answer.
        """
        if self._task.start is None:
            return 0
        prompt, *rest = repeated_turns(self._task.start)
        check_room(self._task, prompt=len(self._tokens), most_turns=self._max_turns)
        if not self._task.note:
            check_repeated(0, prompt.token_ids, self._tokens)
        for action, observed in zip(rest[::2], rest[1::2], strict=True):
            # The environment hears of a repeated turn what it heard of the sampled one.
            await self._longest_turn()
            before = self._cutter.turn
            self._tokens += action.token_ids
            cuts = self._cutter.observe(action.token_ids)
            self._conversations.answered(before + 1, action.token_ids, after=before)
            await self._stream.send(cuts)
            cut = self._sampler.was_cut(action.token_ids, keep_special=self._keep_special)
            await self._tell_turn_facts(action.token_ids, cut=cut)
            result = await self._give_answer(action.token_ids)
            self._cutter.owe(finite_rewards(result))
            _, observation = await self._rendered(result)
            check_repeated(before + 2, observed.token_ids, observation.token_ids)
            await self._add_observation(observation)
        return len(rest) // 2

    async def _longest_turn(self) -> int:
        """Return the most tokens that the next turn may have."""
        sampling = self._task.sampling
        most = min(
            sampling.max_turn_tokens,
            sampling.max_trajectory_tokens - self._cutter.tokens,
            self._conversations.longest - len(self._tokens),
        )
        if not isinstance(self._env, HasTurnLimit):
            return most
        limit = await self._calls.ask(self._env.turn_limit, on_loop=True)
        return most if limit is None else min(most, checked_limit(limit))

    async def _sample_turn(self, turn: int, most: int) -> tuple[list[int], str]:
        """Sample one action turn of at most ``most`` tokens. Return its tokens and its finish reason."""
        start = len(self._tokens)
        prompt, reason = tuple(self._tokens), ""
        while not reason:
            reason = await self._sample_up_to(turn, start, start + most)
        self._conversations.check_prefix(prompt, self._tokens)
        sampled, observed = self._tokens[start:], self._cutter.turn - 1
        self._conversations.answered(observed + 1, sampled, after=observed, routed=self._routed)
        return sampled, reason

    async def _sample_up_to(self, turn: int, start: int, end: int) -> str:
        """Sample up to token ``end`` of the branch, or in lockstep to the end of the segment.

        Returns:
            The finish reason, or "" if the turn goes on in the next segment.
        """
        before, until = len(self._tokens), end
        if self._stream.in_step:
            await self._stream.send(self._cutter.cut_full())
            until = min(end, before + self._cutter.room)
        request = self._sampler.request(
            turn,
            self._tokens,
            until - before,
            begun=before - start,
            min_version=self._stream.min_version,
            preferred=self._generator,
            routed=self._routed,
            messages=tuple(self._said),
        )
        reason = ""
        spent, answer = SampledTime(), self._cutter.turn + (before == start)
        pieces = self._sampler.pieces(
            request, self._tokens[start:], keep_special=self._keep_special, spent=spent
        )
        try:
            async with aclosing(pieces) as stream:
                async for sampled in stream:
                    reason, self._generator = sampled.finish_reason, sampled.generator
                    self._tokens += sampled.token_ids.tolist()
                    self._routed = routed(self._routed, [sampled])
                    await self._stream.send(self._cutter.act(sampled))
        finally:
            # An episode that ends here has spent the time, too.
            self._cutter.note_time(answer, waited=spent.waited, sampled=spent.sampled)
        if reason != "length" or len(self._tokens) >= end:
            return reason
        await self._stream.send(self._cutter.cut_full())
        return ""

    async def _rendered(self, result: StepResult) -> tuple[StepResult, Observation]:
        """Return a result with the tokens of its observation.

        An environment that can refuse messages sends others in place of those that cannot be rendered.
        """
        while True:
            try:
                observation = self._observation(result)
            except ActorError as error:
                result = await self._calls.refused(self._env, error)
                continue
            if result.done or not self._is_declined(observation):
                return result, observation
            result = await self._calls.refused(self._env, self._too_long_error(), too_long=True)

    def _is_declined(self, observation: Observation) -> bool:
        """Return whether the environment hears that a branch would be too long.

        An agent that knows this error may go on in a shorter conversation, if there is room for it.
        """
        bounded = self._task.sampling.max_context_tokens and can_refuse(self._env)
        return bool(bounded) and self._conversations.too_long(observation)

    def _too_long_error(self) -> ActorError:
        return ActorError(f"a branch has at most {self._conversations.longest} tokens")

    def _observation(self, result: StepResult) -> Observation:
        """Return the tokens of the environment's answer, and the turn that they continue."""
        answers = self._conversations.answers
        if result.done:
            return Observation([], answers[-1])
        messages = result.messages()
        if not messages:
            raise EnvironmentFailed("environment: step returned neither an observation nor done")
        check_conversation(messages, "step")
        check_tools(result.tools or (), "step")
        if result.after is not None and result.after < 0:
            return self._conversations.anew(messages, result.tools)
        if result.after is not None and result.after >= len(answers):
            raise EnvironmentFailed(
                f"environment: step returned after = {result.after} of {len(answers)} answers"
            )
        return self._conversations.behind(answers[-1 if result.after is None else result.after], messages)

    def _closing_after(
        self, result: StepResult, turn: int, reason: str, observation: Observation
    ) -> Closing | None:
        """Return how the trajectory ends after this turn, or None if it goes on."""
        status: TrajectoryStatus = "truncated"
        if result.done:
            status, why = "finished", reason
        elif turn + 1 >= self._max_turns:
            why = "max_turns"
        elif self._cutter.tokens + len(observation.token_ids) >= self._task.sampling.max_trajectory_tokens:
            why = "max_trajectory_tokens"
        elif self._conversations.too_long(observation):
            why = self._conversations.bound
        else:
            return None
        return closing_of(status, why, result, self._task, self._conversations.answers)

    async def _add_observation(self, observation: Observation) -> None:
        self._tokens = self._conversations.context(observation)
        self._routed = self._conversations.routed(observation.after)
        self._keep_special = bool(observation.tools)
        if not observation.token_ids:
            return
        cuts = self._cutter.observe(observation.token_ids, observation.after)
        self._conversations.observed(self._cutter.turn, observation)
        await self._stream.send(cuts)
