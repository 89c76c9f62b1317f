"""Plays an episode in which the environment and the policy take turns, by `envs.base.Env.reset` and `step`."""

from contextlib import aclosing

from actors.environments.results import (
    check_conversation,
    checked_limit,
    checked_marks,
    earlier_rewards,
    finite_rewards,
)
from actors.episodes.closing import closing_of, no_room
from actors.episodes.conversation import Observation
from actors.episodes.parts import EpisodeParts
from actors.errors import ActorError, EnvironmentFailed
from actors.generator_client.turn_request import routed
from actors.segments import Closing
from actors.start import check_repeated, check_room, repeated_turns, with_note
from envs.base import Env, HasTools, HasTurnFacts, HasTurnLimit, StepResult, ToolSchema, TurnFacts, can_refuse
from protocol.arrays import SegmentArrays
from protocol.messages.fields import TrajectoryStatus


class StepPlay:
    """One answer at a time: each is given to the environment, whose result is the next observation."""

    def __init__(self, env: Env, parts: EpisodeParts) -> None:
        self._env, self._task, self._max_turns = env, parts.task, parts.max_turns
        self._calls, self._talks, self._sampler = parts.calls, parts.conversations, parts.sampler
        self._stream, self._cutter = parts.stream, parts.stream.cutter
        self._tokens: list[int] = []
        """Tokens of the present branch."""
        self._routed = 0
        """First of them whose experts are not known."""
        self._keep_special = False
        """True if the environment parses tool calls, whose marks may be special tokens."""
        self._generator = ""

    async def play(self) -> TrajectoryStatus:
        """Play to the end. Return the status with which the trajectory was closed.

        Raises:
            ActorError: the environment or the answer is at fault, or a prompt leaves no room.
            Infrastructure: neither is at fault.
        """
        opening = await self._opening()
        if (length := len(opening.token_ids)) >= self._talks.longest:
            raise no_room(length, self._talks.bound, self._talks.longest)
        await self._observe(opening)
        for turn in range(await self._repeat(), self._max_turns):
            sampled, reason = await self._act(turn, await self._most())
            await self._tell(sampled, cut=reason == "length")
            result = await self._step(sampled)
            rewards, marks = finite_rewards(result), checked_marks(result.marks)
            result, observation = await self._rendered(result)
            if result.done:
                rewards |= finite_rewards(result)
            closing = self._end(result, turn, reason, observation)
            earlier = earlier_rewards(result, self._talks.answers) if closing is not None else []
            await self._stream.send(self._cutter.close_turn(rewards, reason, closing, marks, earlier))
            if closing is not None:
                return closing.status
            await self._observe(observation)
        raise AssertionError("the last turn closes the trajectory")

    def rest(self) -> list[SegmentArrays]:
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
            opening = self._talks.first(with_note(messages, self._task.note), tools)
        except ActorError as error:
            refused = await self._calls.refused(self._env, error)
        else:
            if not self._declines(opening):
                return opening
            refused = await self._calls.refused(self._env, self._too_long(), too_long=True)
        result, observation = await self._rendered(refused)
        if result.done:
            raise EnvironmentFailed("environment: refuse ended an episode that has no answer")
        return observation

    async def _step(self, sampled: list[int]) -> StepResult:
        """Give an answer to the environment."""
        text = self._sampler.text_of(sampled, keep_special=self._keep_special)
        return await self._calls.result(self._env.step, text)

    async def _tell(self, sampled: list[int], *, cut: bool) -> None:
        """Tell the environment the facts of a turn, if it wants them."""
        if isinstance(self._env, HasTurnFacts):
            facts = TurnFacts(len(self._tokens) - len(sampled), len(sampled), cut=cut)
            await self._calls.ask(self._env.turn_facts, facts, on_loop=True)

    async def _repeat(self) -> int:
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
            await self._most()
            before = self._cutter.turn
            self._tokens += action.token_ids
            cuts = self._cutter.observe(action.token_ids)
            self._talks.answered(before + 1, action.token_ids, after=before)
            await self._stream.send(cuts)
            cut = self._sampler.was_cut(action.token_ids, keep_special=self._keep_special)
            await self._tell(action.token_ids, cut=cut)
            result = await self._step(action.token_ids)
            self._cutter.owe(finite_rewards(result))
            _, observation = await self._rendered(result)
            check_repeated(before + 2, observed.token_ids, observation.token_ids)
            await self._observe(observation)
        return len(rest) // 2

    async def _most(self) -> int:
        """Return the most tokens that the next turn may have."""
        sampling = self._task.sampling
        most = min(
            sampling.max_turn_tokens,
            sampling.max_trajectory_tokens - self._cutter.tokens,
            self._talks.longest - len(self._tokens),
        )
        if not isinstance(self._env, HasTurnLimit):
            return most
        limit = await self._calls.ask(self._env.turn_limit, on_loop=True)
        return most if limit is None else min(most, checked_limit(limit))

    async def _act(self, turn: int, most: int) -> tuple[list[int], str]:
        """Sample one action turn of at most ``most`` tokens. Return its tokens and its finish reason."""
        start = len(self._tokens)
        prompt, reason = tuple(self._tokens), ""
        while not reason:
            reason = await self._sample(turn, start, start + most)
        self._talks.check_prefix(prompt, self._tokens)
        sampled, observed = self._tokens[start:], self._cutter.turn - 1
        self._talks.answered(observed + 1, sampled, after=observed, routed=self._routed)
        return sampled, reason

    async def _sample(self, turn: int, start: int, end: int) -> str:
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
        )
        reason = ""
        pieces = self._sampler.pieces(request, self._tokens[start:], keep_special=self._keep_special)
        async with aclosing(pieces) as stream:
            async for sampled in stream:
                reason, self._generator = sampled.finish_reason, sampled.generator
                self._tokens += sampled.token_ids.tolist()
                self._routed = routed(self._routed, [sampled])
                await self._stream.send(self._cutter.act(sampled))
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
            if result.done or not self._declines(observation):
                return result, observation
            result = await self._calls.refused(self._env, self._too_long(), too_long=True)

    def _declines(self, observation: Observation) -> bool:
        """Return whether the environment hears that a branch would be too long.

        An agent that knows this error may go on in a shorter conversation, if there is room for it.
        """
        bounded = self._task.sampling.max_context_tokens and can_refuse(self._env)
        return bool(bounded) and self._talks.too_long(observation)

    def _too_long(self) -> ActorError:
        return ActorError(f"a branch has at most {self._talks.longest} tokens")

    def _observation(self, result: StepResult) -> Observation:
        """Return the tokens of the environment's answer, and the turn that they continue."""
        answers = self._talks.answers
        if result.done:
            return Observation([], answers[-1])
        messages = result.messages()
        if not messages:
            raise EnvironmentFailed("environment: step returned neither an observation nor done")
        check_conversation(messages, "step")
        if result.after is not None and result.after < 0:
            return self._talks.anew(messages, result.tools)
        if result.after is not None and result.after >= len(answers):
            raise EnvironmentFailed(
                f"environment: step returned after = {result.after} of {len(answers)} answers"
            )
        return self._talks.behind(answers[-1 if result.after is None else result.after], messages)

    def _end(self, result: StepResult, turn: int, reason: str, observation: Observation) -> Closing | None:
        """Return how the trajectory ends after this turn, or None if it goes on."""
        status: TrajectoryStatus = "truncated"
        if result.done:
            status, why = "finished", reason
        elif turn + 1 >= self._max_turns:
            why = "max_turns"
        elif self._cutter.tokens + len(observation.token_ids) >= self._task.sampling.max_trajectory_tokens:
            why = "max_trajectory_tokens"
        elif self._talks.too_long(observation):
            why = self._talks.bound
        else:
            return None
        return closing_of(status, why, result, self._task, self._talks.answers)

    async def _observe(self, observation: Observation) -> None:
        self._tokens = self._talks.context(observation)
        self._routed = self._talks.routed(observation.after)
        self._keep_special = bool(observation.tools)
        if not observation.token_ids:
            return
        cuts = self._cutter.observe(observation.token_ids, observation.after)
        self._talks.observed(self._cutter.turn, observation)
        await self._stream.send(cuts)
