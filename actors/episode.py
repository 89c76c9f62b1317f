"""One episode: an environment and a policy take turns until the environment or a limit ends it."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from actors.environments.results import (
    bounded,
    check_conversation,
    checked_hints,
    checked_limit,
    checked_marks,
    earlier_rewards,
    finite_rewards,
)
from actors.errors import ActorError, EnvironmentFailed, Infrastructure, ServiceDown
from actors.failures import FAILURES
from actors.generator_client import TurnRequest
from actors.sampled import Sampled
from actors.segments import Closing, SegmentCutter
from actors.start import check_repeated, check_room, repeated_turns, with_note
from actors.stop_strings import find_stop, stopped_at
from actors.turn_tree import TurnTree
from envs.base import (
    ChatMessage,
    CodeCaller,
    Env,
    HasGiveUp,
    HasRefusal,
    HasTools,
    HasTurnFacts,
    HasTurnLimit,
    StepResult,
    Suite,
    ToolSchema,
    TurnFacts,
)
from envs.blame import place_of_error
from envs.errors import ServiceFailed
from protocol.arrays import SegmentArrays
from protocol.failures import describe
from protocol.messages import LeaseTask, TrajectoryStatus

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0


class Policy(Protocol):
    """Source of action turns: a `GeneratorPool`, or a script in a test."""

    def turn(self, request: TurnRequest) -> AsyncGenerator[Sampled, None]: ...


class Text(Protocol):
    """Converter between text and tokens: a `Renderer`, or a toy in a test."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> list[int]: ...
    def observation(
        self, messages: Sequence[ChatMessage], sampled: Sequence[int], tools: Sequence[ToolSchema] = ()
    ) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str: ...
    def check_prefix(self, known: Sequence[int], prompt: Sequence[int]) -> None: ...


class Observation(NamedTuple):
    """Tokens that the environment adds to the trajectory."""

    token_ids: list[int]
    after: int
    """Index of the turn that they continue; -1: none."""
    tools: Sequence[ToolSchema] = ()
    """Schemas of the tools of their conversation."""


@dataclass(frozen=True)
class Bounds:
    """Limits of an episode that come from the actor's settings. The task sets further limits."""

    segment_tokens: int = 512
    max_turns: int = 32
    env_timeout_s: float = 30.0
    in_step: bool = False
    """Lockstep in windows: after each segment, a training task waits for a version newer than any in it."""


Emit = Callable[[Sequence[SegmentArrays]], Awaitable[None]]


class Episode:
    """Runs one leased task and emits its segments as they are cut.

    An error of the environment or of the model's answer ends the trajectory with status "failed" and the
    error's text. It is recorded as data and does not end the actor. A cancellation and the errors that are
    nobody's fault here (`Infrastructure`) pass through: such a task runs again.
    """

    def __init__(
        self,
        lease: LeaseTask,
        suite: Suite,
        text: Text,
        policy: Policy,
        bounds: Bounds,
        emit: Emit,
        environments: CodeCaller,
    ) -> None:
        self._task, self._suite, self._text, self._policy = lease.task, suite, text, policy
        self._bounds, self._emit_cuts, self._environments = bounds, emit, environments
        self.trajectory_id = lease.trajectory_id
        self._cutter = SegmentCutter(lease.task, self.trajectory_id, bounds.segment_tokens)
        self._tokens: list[int] = []
        self._tree = TurnTree()
        self._tools_after: dict[int, Sequence[ToolSchema]] = {}
        self._keep_special = False
        """True if the environment parses tool calls, whose marks may be special tokens."""
        sampling = lease.task.sampling
        self._bound = "max_context_tokens" if sampling.max_context_tokens else "max_trajectory_tokens"
        self._longest = sampling.max_context_tokens or sampling.max_trajectory_tokens
        """Most tokens of a branch, and the setting that says so."""
        self._in_step = bounds.in_step and lease.task.purpose == "train"
        self._min_version = lease.task.min_policy_version
        self._generator = ""
        self._deadline: asyncio.Timeout | None = None
        self._closed = False
        """True once the closing segment was handed over."""
        self.env_seconds = 0.0
        self.status = "unfinished"

    @property
    def tokens(self) -> int:
        """Number of tokens of the trajectory so far."""
        return self._cutter.tokens

    async def run(self) -> None:
        """Run the episode to its end. Afterwards the trajectory is closed, unless this call was cancelled.

        Raises:
            Infrastructure: neither the environment nor the model is at fault; the trajectory is not closed.
            ProtocolError: the closing segment cannot be encoded.
        """
        env: Env | None = None
        try:
            async with asyncio.timeout(self._task.deadline_s) as self._deadline:
                env = await self._ask(self._suite.episode, on_loop=True)
                await self._play(env)
        except Infrastructure:
            raise
        except Exception as error:
            late = self._deadline is not None and self._deadline.expired()
            why = self._late() if late else error
            self._deadline = None
            await self._fail(why)
        finally:
            await self._close(env)

    async def _play(self, env: Env) -> None:
        opening = await self._opening(env)
        if (length := len(opening.token_ids)) >= self._longest:
            raise ActorError(
                f"first prompt of {length} tokens leaves no room for an answer; {self._bound} is {self._longest}"
            )
        await self._observe(opening)
        for turn in range(await self._repeat(env), self._bounds.max_turns):
            sampled, reason = await self._act(turn, await self._most(env))
            if isinstance(env, HasTurnFacts):
                facts = TurnFacts(len(self._tokens) - len(sampled), len(sampled), cut=reason == "length")
                await self._ask(env.turn_facts, facts, on_loop=True)
            result = await self._step(env, sampled)
            rewards, marks = finite_rewards(result), checked_marks(result.marks)
            result, observation = await self._rendered(env, result)
            if result.done:
                rewards |= finite_rewards(result)
            closing = self._end(result, turn, reason, observation)
            earlier = earlier_rewards(result, self._tree.answers) if closing is not None else []
            await self._emit(self._cutter.close_turn(rewards, reason, closing, marks, earlier))
            if closing is not None:
                self.status = closing.status
                return
            await self._observe(observation)

    async def _opening(self, env: Env) -> Observation:
        """Begin the episode. Return its first prompt."""
        messages = await self._ask(env.reset, dict(self._task.data))
        tools: Sequence[ToolSchema] = ()
        if isinstance(env, HasTools):
            tools = await self._ask(env.tool_schemas, on_loop=True)
        try:
            check_conversation(messages, "reset")
            return Observation(self._text.prompt(with_note(messages, self._task.note), tools), -1, tools)
        except ActorError as error:
            result, observation = await self._rendered(env, await self._refused(env, error))
            if result.done:
                raise EnvironmentFailed("environment: refuse ended an episode that has no answer") from None
            return observation

    async def _step(self, env: Env, sampled: list[int]) -> StepResult:
        """Give an answer to the environment."""
        result = await self._ask(env.step, self._answer(sampled))
        if not isinstance(result, StepResult):
            raise EnvironmentFailed(f"environment: step returned {result!r:.200}, not a StepResult")
        return result

    async def _repeat(self, env: Env) -> int:
        """Repeat the actions of the task's prefix behind the first prompt. Return their number.

        Raises:
            PrefixDiverged: the prompt or an observation has other tokens than in the prefix.
            ActorError: the prefix is not one, or leaves no room for an answer.
        """
        if self._task.start is None:
            return 0
        prompt, *rest = repeated_turns(self._task.start)
        check_room(self._task, most_turns=self._bounds.max_turns)
        check_repeated(0, prompt.token_ids, self._tokens)
        for action, observed in zip(rest[::2], rest[1::2], strict=True):
            before = self._cutter.turn
            self._tokens += action.token_ids
            cuts = self._cutter.observe(action.token_ids)
            self._tree.add(before + 1, action.token_ids, after=before, answer=True)
            self._tools_after[before + 1] = self._tools_after[before]
            await self._emit(cuts)
            if isinstance(env, HasTurnFacts):
                facts = TurnFacts(len(self._tokens) - len(action.token_ids), len(action.token_ids), cut=False)
                await self._ask(env.turn_facts, facts, on_loop=True)
            result = await self._step(env, action.token_ids)
            self._cutter.owe(finite_rewards(result))
            _, observation = await self._rendered(env, result)
            check_repeated(before + 2, observed.token_ids, observation.token_ids)
            await self._observe(observation)
        return len(rest) // 2

    async def _most(self, env: Env) -> int:
        """Return the most tokens that the next turn may have."""
        sampling = self._task.sampling
        most = min(
            sampling.max_turn_tokens,
            sampling.max_trajectory_tokens - self._cutter.tokens,
            self._longest - len(self._tokens),
        )
        if not isinstance(env, HasTurnLimit):
            return most
        limit = await self._ask(env.turn_limit, on_loop=True)
        return most if limit is None else min(most, checked_limit(limit))

    async def _act(self, turn: int, most: int) -> tuple[list[int], str]:
        """Sample one action turn of at most ``most`` tokens. Return its tokens and its finish reason."""
        start = len(self._tokens)
        end = start + most
        prompt, reason = tuple(self._tokens), ""
        while not reason:
            reason = await self._sample(turn, start, end)
        self._text.check_prefix(prompt, self._tokens)
        sampled, observed = self._tokens[start:], self._cutter.turn - 1
        self._tree.add(observed + 1, sampled, after=observed, answer=True)
        self._tools_after[observed + 1] = self._tools_after[observed]
        return sampled, reason

    async def _sample(self, turn: int, start: int, end: int) -> str:
        """Sample up to token ``end`` of the trajectory, or in lockstep to the end of the segment.

        Returns:
            The finish reason, or "" if the turn goes on in the next segment.
        """
        before, until = len(self._tokens), end
        if self._in_step:
            await self._emit(self._cutter.cut_full())
            until = min(end, before + self._cutter.room)
        request = TurnRequest(
            trajectory_id=self.trajectory_id,
            turn=turn,
            prompt=tuple(self._tokens),
            begun=before - start,
            max_tokens=until - before,
            sampling=self._task.sampling,
            min_policy_version=self._min_version,
            stop_token_ids=self._text.eos_ids,
            preferred=self._generator,
        )
        reason = ""
        # Until the first token it waits for a generator, a place in its engine, or a version (in lockstep), each
        # with a deadline of its own.
        left = self._pause_deadline()
        async with aclosing(self._policy.turn(request)) as stream:
            async for sampled in stream:
                self._go_on(left)
                left = None
                sampled = self._until_stop(sampled, start)
                reason = sampled.finish_reason
                self._generator = sampled.generator
                self._tokens += sampled.token_ids.tolist()
                await self._emit(self._cutter.act(sampled))
                if reason:
                    # After a stop string, the generator is asked to end the request.
                    break
        if len(self._tokens) == before:
            raise ActorError(f"generator {self._generator!r} ended a turn ({reason!r}) without a token")
        if reason != "length" or len(self._tokens) >= end:
            return reason
        await self._emit(self._cutter.cut_full())
        return ""

    def _until_stop(self, sampled: Sampled, start: int) -> Sampled:
        """Return the tokens up to the one that completes a stop string; all if none does."""
        stop, turn = self._task.sampling.stop, self._tokens[start:]
        if not stop:
            return sampled
        end = stopped_at([*turn, *sampled.token_ids.tolist()], len(turn), stop, self._decode)
        return sampled if end is None else sampled.first(end - len(turn))

    def _answer(self, sampled: list[int]) -> str:
        ended = bool(sampled) and sampled[-1] in self._text.eos_ids
        text, sampling = self._decode(sampled[:-1] if ended else sampled), self._task.sampling
        cut = None if sampling.include_stop else find_stop(text, sampling.stop)
        return text[:cut]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._text.decode(token_ids, keep_special=self._keep_special)

    async def _rendered(self, env: Env, result: StepResult) -> tuple[StepResult, Observation]:
        """Return a result with the tokens of its observation.

        An environment that can refuse messages sends others in place of those that cannot be rendered.
        """
        while True:
            try:
                observation = self._observation(result)
            except ActorError as error:
                result = await self._refused(env, error)
                continue
            # An agent that knows this error may go on in a shorter conversation, if there is room for it.
            if result.done or not self._too_long(observation) or not self._task.sampling.max_context_tokens:
                return result, observation
            if not isinstance(env, HasRefusal):
                return result, observation
            result = await self._refused(
                env, ActorError(f"a branch has at most {self._longest} tokens"), too_long=True
            )

    def _too_long(self, observation: Observation) -> bool:
        """Return whether a branch would have no room for an answer."""
        return self._tree.length(observation.after) + len(observation.token_ids) >= self._longest

    async def _refused(self, env: Env, error: ActorError, *, too_long: bool = False) -> StepResult:
        """Return what the environment sends in place of messages that cannot be rendered; raise why if it cannot."""
        if not isinstance(env, HasRefusal):
            raise error
        result = await self._ask(env.refuse, str(error), too_long)
        if not isinstance(result, StepResult):
            raise EnvironmentFailed(f"environment: refuse returned {result!r:.200}, not a StepResult")
        return result

    def _observation(self, result: StepResult) -> Observation:
        """Return the tokens of the environment's answer, and the turn that they continue."""
        answers = self._tree.answers
        if result.done:
            return Observation([], answers[-1])
        messages = result.messages()
        if not messages:
            raise EnvironmentFailed("environment: step returned neither an observation nor done")
        check_conversation(messages, "step")
        if result.after is not None and result.after < 0:
            return self._anew(messages, result.tools)
        if result.after is not None and result.after >= len(answers):
            raise EnvironmentFailed(
                f"environment: step returned after = {result.after} of {len(answers)} answers"
            )
        turn = answers[-1 if result.after is None else result.after]
        tools = self._tools_after[turn]
        return Observation(self._text.observation(messages, self._tree.tokens(turn), tools), turn, tools)

    def _anew(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] | None) -> Observation:
        """Return the prompt of a new conversation, or what is new of it if it goes on where an earlier one was."""
        tools = self._tools_after[0] if tools is None else tools
        prompt = self._text.prompt(messages, tools)
        turn = self._tree.begun(prompt)
        return Observation(prompt[len(self._tree.context(turn)) :], turn, tools)

    def _end(self, result: StepResult, turn: int, reason: str, observation: Observation) -> Closing | None:
        """Return how the trajectory ends after this turn, or None if it goes on."""
        if result.done:
            return self._closing("finished", reason, result)
        if turn + 1 >= self._bounds.max_turns:
            return self._closing("truncated", "max_turns", result)
        if self._cutter.tokens + len(observation.token_ids) >= self._task.sampling.max_trajectory_tokens:
            return self._closing("truncated", "max_trajectory_tokens", result)
        if self._too_long(observation):
            return self._closing("truncated", self._bound, result)
        return None

    def _closing(self, status: TrajectoryStatus, why: str, result: StepResult) -> Closing:
        extra: dict[str, Any] = {"correct": result.correct, "info": bounded(result.info)}
        if result.hints and self._task.purpose == "train":
            extra["hints"] = checked_hints(result.hints)
        answers = self._tree.answers
        auxiliary = tuple(
            answers[number] for number in sorted(set(result.auxiliary)) if 0 <= number < len(answers)
        )
        return Closing(status, why, extra=extra, auxiliary=auxiliary)

    async def _observe(self, observation: Observation) -> None:
        token_ids, after, tools = observation
        self._tokens = [*self._tree.context(after), *token_ids]
        self._keep_special = bool(tools)
        if not token_ids:
            return
        cuts = self._cutter.observe(token_ids, after)
        self._tree.add(self._cutter.turn, token_ids, after=after)
        self._tools_after[self._cutter.turn] = tools
        await self._emit(cuts)

    async def _emit(self, cuts: list[SegmentArrays]) -> None:
        if not cuts:
            return
        if self._in_step:
            self._min_version = max(self._min_version, *(cut.segment.version_max + 1 for cut in cuts))
        # The wait for room in the outbox is a wait for the broker, so it does not count for the deadline.
        left = self._pause_deadline()
        # Emit all cuts in one call, because a cancellation may end any wait, and a missing cut leaves a gap.
        await self._emit_cuts(cuts)
        self._closed = cuts[-1].segment.status != "unfinished"
        self._go_on(left)

    def _pause_deadline(self) -> float | None:
        """Stop the clock of the deadline. Return the seconds that are left; None if no clock runs."""
        deadline = self._deadline
        if deadline is None or deadline.expired() or (when := deadline.when()) is None:
            return None
        deadline.reschedule(None)
        return when - asyncio.get_running_loop().time()

    def _go_on(self, left: float | None) -> None:
        """Let the clock of the deadline run again."""
        if self._deadline is not None and left is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time() + left)

    async def _ask(self, function: Callable[..., Any], *arguments: Any, on_loop: bool = False) -> Any:
        """Call a function of the environment, and wait for its answer, at most ``env_timeout_s``.

        Raises:
            EnvironmentFailed: the function raised an error or took longer. The text names file and line.
            Infrastructure: code of a different task blocks the environments of this actor, or a service that
                the reward needs did not answer.
        """
        begun, name = time.monotonic(), getattr(function, "__name__", "function")
        try:
            return await self._environments.call(
                function,
                *arguments,
                what=f"{name} of {self.trajectory_id}",
                timeout_s=self._bounds.env_timeout_s,
                on_loop=on_loop,
            )
        except ActorError:
            raise
        except ServiceFailed as error:
            raise ServiceDown(f"environment: {name}: {error}") from error
        except Exception as error:
            place = place_of_error(error)
            raise EnvironmentFailed(
                f"environment: {name}: {type(error).__name__}: {error}" + (f" ({place})" if place else "")
            ) from error
        finally:
            self.env_seconds += time.monotonic() - begun

    def _late(self) -> ActorError:
        return ActorError(
            f"the episode took longer than its deadline of {self._task.deadline_s:g} s "
            "(learner.sampling.max_trajectory_s)"
        )

    async def _fail(self, error: Exception) -> None:
        self.status = "failed"
        failure = FAILURES.record(error, self.trajectory_id)
        if not self._cutter.closed:
            closing = Closing("failed", error=describe(failure), failure=failure)
            await self._emit(self._cutter.abandon(closing))
        elif not self._closed:
            # The closing segment was cut but could not be sent, so nothing closes this trajectory.
            raise error

    async def _close(self, env: Env | None) -> None:
        if env is None:
            return
        what = f"close of {self.trajectory_id}"
        try:
            if self.status == "unfinished" and isinstance(env, HasGiveUp):
                await self._environments.call(env.give_up, what=what, timeout_s=CLOSE_TIMEOUT_S, on_loop=True)
            await self._environments.call(env.close, what=what, timeout_s=CLOSE_TIMEOUT_S)
        except Exception as error:
            log.warning("environment of %s did not close: %r", self.trajectory_id, error)
