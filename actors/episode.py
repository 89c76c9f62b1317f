"""One episode: an environment and a policy, until the environment or a limit ends it.

`Episode` holds the state of one episode and runs it from its lease to its last segment. How environment and policy take
turns is a way of playing: `actors.play_steps` asks for one answer at a time, `actors.play_requests` for several.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from actors.conversation import Conversations, Text
from actors.errors import ActorError, EnvironmentFailed, Infrastructure, ServiceDown
from actors.failures import FAILURES
from actors.generator_client import TurnRequest
from actors.sampled import Sampled
from actors.segments import Closing, SegmentCutter
from envs.base import ChatMessage, CodeCaller, Env, HasGiveUp, StepResult, Suite, can_refuse
from envs.errors import ServiceFailed
from envs.user_code import place_of_error
from protocol.arrays import SegmentArrays
from protocol.failures import describe
from protocol.messages.episodes import LeaseTask, Task
from protocol.messages.fields import TrajectoryStatus

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Bounds:
    """Limits of an episode that come from the actor's settings. The task sets further limits."""

    segment_tokens: int = 512
    max_turns: int = 32
    env_timeout_s: float = 30.0
    in_step: bool = False
    """Lockstep in windows: after each segment, a training task waits for a version newer than any in it."""


class EpisodeClock:
    """Bounds the time of an episode, without the time in which it waits for a generator or for the broker.

    Several tasks of an episode may wait at a time. The clock stands if one of them waits, and none works. It runs while
    no task is known, because then the environment is at work.
    """

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None
        self._left: float | None = None
        self._waiting: set[asyncio.Task[Any] | None] = set()
        self._working: set[asyncio.Task[Any] | None] = set()

    def start(self, timeout: asyncio.Timeout) -> None:
        """Take over a timeout that has begun."""
        self._timeout = timeout

    def stop(self) -> bool:
        """Leave the timeout alone from now on. Return whether it has expired."""
        late = self._timeout is not None and self._timeout.expired()
        self._timeout = None
        return late

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that the present task waits for others."""
        with self._noted_among(self._waiting):
            yield

    @contextmanager
    def working(self) -> Iterator[None]:
        """Note that the present task works, unless it waits."""
        with self._noted_among(self._working):
            yield

    @contextmanager
    def _noted_among(self, tasks: set[asyncio.Task[Any] | None]) -> Iterator[None]:
        task = asyncio.current_task()
        if task in tasks:
            yield
            return
        tasks.add(task)
        self._stand_or_run()
        try:
            yield
        finally:
            tasks.discard(task)
            self._stand_or_run()

    def _stand_or_run(self) -> None:
        """Let the clock stand or run."""
        timeout, now = self._timeout, asyncio.get_running_loop().time()
        if timeout is None or timeout.expired():
            return
        stands = bool(self._waiting) and self._working <= self._waiting
        if stands and self._left is None and (when := timeout.when()) is not None:
            self._left = when - now
            timeout.reschedule(None)
        elif not stands and self._left is not None:
            timeout.reschedule(now + self._left)
            self._left = None


CLOSE_TIMEOUT_S = 5.0


class EnvCalls:
    """Calls functions of an environment.

    Args:
        environments: runs them.
        trajectory_id: names the episode in errors.
        timeout_s: longest time of a call, `actor.env_timeout_s` of the run file.
    """

    def __init__(self, environments: CodeCaller, trajectory_id: str, timeout_s: float) -> None:
        self._environments, self._trajectory_id, self.timeout_s = environments, trajectory_id, timeout_s
        self.seconds = 0.0
        """Time in which the episode waited for its environment."""

    async def ask(
        self, function: Callable[..., Any], *arguments: Any, on_loop: bool = False, timed: bool = True
    ) -> Any:
        """Call a function of the environment, and wait for its answer, at most ``timeout_s``.

        Args:
            on_loop: call a plain function in the environments' event loop.
            timed: count the time as the environment's.

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
                what=f"{name} of {self._trajectory_id}",
                timeout_s=self.timeout_s,
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
            if timed:
                self.seconds += time.monotonic() - begun

    async def result(self, function: Callable[..., Any], *arguments: Any) -> StepResult:
        """Call a function that returns a result.

        Raises:
            EnvironmentFailed: see `ask`; or it returned something else.
        """
        result = await self.ask(function, *arguments)
        if not isinstance(result, StepResult):
            name = getattr(function, "__name__", "function")
            raise EnvironmentFailed(f"environment: {name} returned {result!r:.200}, not a StepResult")
        return result

    async def refused(self, env: Env, error: ActorError, *, too_long: bool = False) -> StepResult:
        """Return what the environment sends in place of messages that cannot be rendered; raise why if it cannot."""
        if not can_refuse(env):
            raise error
        return await self.result(env.refuse, str(error), too_long)

    async def close(self, env: Env, *, given_up: bool) -> None:
        """Close the environment. What goes wrong is logged.

        Args:
            given_up: the episode ends by nobody's fault, and its task runs again.
        """
        what = f"close of {self._trajectory_id}"
        try:
            if given_up and isinstance(env, HasGiveUp):
                await self._environments.call(env.give_up, what=what, timeout_s=CLOSE_TIMEOUT_S, on_loop=True)
            await self._environments.call(env.close, what=what, timeout_s=CLOSE_TIMEOUT_S)
        except Exception as error:
            log.warning("environment of %s did not close: %r", self._trajectory_id, error)


MARGIN_TOKENS = 8
"""Tokens that are decoded in front of a stop string's own: the first of them may lack a part of a character."""


def stopped_at(
    tokens: Sequence[int], checked: int, stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Return how many tokens the turn has when its text first completes a stop string; None if it does not.

    Args:
        tokens: action tokens of the turn so far.
        checked: number of tokens at the beginning that completed none.
        stop: stop strings.
        decode: returns the text of tokens.

    Example:
        >>> stopped_at([1, 2, 3, 4], 1, ["23"], lambda ids: "".join(map(str, ids)))
        3
    """
    if not stop or len(tokens) <= checked:
        return None
    # A token with text has at least one byte, so a string of n bytes lies in the text of n tokens.
    longest = max(len(string.encode()) for string in stop)
    first = max(0, checked - longest - MARGIN_TOKENS)
    if find_stop(decode(tokens[first:]), stop) is None:
        return None
    ends = range(checked + 1, len(tokens) + 1)
    return next(end for end in ends if find_stop(decode(tokens[first:end]), stop) is not None)


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return the place of the first stop string in a text, or None.

    Example:
        >>> find_stop("Action: add(1, 2)\\nObservation: 3", ["\\nObservation:", "\\n\\n"])
        17
        >>> find_stop("3", ["\\n"]) is None
        True
    """
    places = [place for string in stop if (place := text.find(string)) >= 0]
    return min(places, default=None)


class Policy(Protocol):
    """Source of action turns: a `GeneratorPool`, or a script in a test."""

    def turn(self, request: TurnRequest) -> AsyncGenerator[Sampled, None]: ...


@dataclass
class SampledTime:
    """Seconds of one answer: until its first token, and from there on. See `protocol.messages.episodes.TurnTime`."""

    waited: float = 0.0
    sampled: float = 0.0


class TurnSampler:
    """Asks the policy for turns of one episode."""

    def __init__(
        self, policy: Policy, text: Text, task: Task, trajectory_id: str, clock: EpisodeClock
    ) -> None:
        self._policy, self._text, self._task = policy, text, task
        self._trajectory_id, self._clock = trajectory_id, clock

    def request(
        self,
        turn: int,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        min_version: int,
        begun: int = 0,
        preferred: str = "",
        routed: int = 0,
        messages: Sequence[ChatMessage] = (),
    ) -> TurnRequest:
        """Return the request for a turn, see `TurnRequest`.

        Args:
            messages: what the prompt says, for a teacher.
            routed: first token of the prompt whose experts are not known.
        """
        return TurnRequest(
            trajectory_id=self._trajectory_id,
            turn=turn,
            prompt=tuple(prompt),
            begun=begun,
            max_tokens=max_tokens,
            sampling=self._task.sampling,
            min_policy_version=min_version,
            stop_token_ids=self._text.eos_ids,
            preferred=preferred,
            evaluates=self._task.purpose == "eval",
            routes_from=routed if self._task.sampling.routes else None,
            messages=messages,
        )

    async def pieces(
        self,
        request: TurnRequest,
        turn: Sequence[int] = (),
        *,
        keep_special: bool,
        spent: SampledTime,
    ) -> AsyncGenerator[Sampled, None]:
        """Yield a turn as it is sampled. The last piece has the finish reason.

        Args:
            turn: tokens of the turn that were sampled before.
            keep_special: look for stop strings in a text with its special tokens.
            spent: gets the seconds that this takes, those of the caller between the pieces left out.

        Raises:
            ActorError: the generator ended the turn without a token.
        """
        tokens, reason, generator = list(turn), "", ""
        # Until the first token it waits for a generator, a place in its engine, or a version (in lockstep), each
        # with a deadline of its own.
        since, waits = time.monotonic(), True
        with ExitStack() as waiting:
            waiting.enter_context(self._clock.waiting())
            async with aclosing(self._policy.turn(request)) as stream:
                async for sampled in stream:
                    if waits:
                        spent.waited += time.monotonic() - since
                    else:
                        spent.sampled += time.monotonic() - since
                    waits = False
                    waiting.close()
                    sampled = self._until_stop(sampled, tokens, keep_special)
                    tokens += sampled.token_ids.tolist()
                    # The generator may be ahead: it computed tokens behind a stop string, too.
                    sampled = sampled.routed_before(len(request.prompt) + len(tokens) - len(turn))
                    reason, generator = sampled.finish_reason, sampled.generator
                    yield sampled
                    since = time.monotonic()
                    if reason:
                        # After a stop string, the generator is asked to end the request.
                        break
        if len(tokens) == len(turn):
            raise ActorError(f"generator {generator!r} ended a turn ({reason!r}) without a token")

    def text_of(self, sampled: Sequence[int], *, keep_special: bool) -> str:
        """Return the text of a turn as the environment gets it."""
        ended = bool(sampled) and sampled[-1] in self._text.eos_ids
        text = self._text.decode(sampled[:-1] if ended else sampled, keep_special=keep_special)
        sampling = self._task.sampling
        cut = None if sampling.include_stop else find_stop(text, sampling.stop)
        # Special tokens are kept where there are tools.
        return self._text.with_known_calls(text[:cut]) if keep_special else text[:cut]

    def was_cut(self, sampled: Sequence[int], *, keep_special: bool) -> bool:
        """Return whether a turn ended at a bound: it has neither an end token nor a stop string."""
        if sampled[-1] in self._text.eos_ids:
            return False
        text = self._text.decode(sampled, keep_special=keep_special)
        return find_stop(text, self._task.sampling.stop) is None

    def _until_stop(self, sampled: Sampled, turn: Sequence[int], keep_special: bool) -> Sampled:
        """Return the tokens up to the one that completes a stop string; all if none does."""
        stop = self._task.sampling.stop
        if not stop:
            return sampled

        def decode(token_ids: Sequence[int]) -> str:
            return self._text.decode(token_ids, keep_special=keep_special)

        end = stopped_at([*turn, *sampled.token_ids.tolist()], len(turn), stop, decode)
        return sampled if end is None else sampled.first(end - len(turn))


Emit = Callable[[Sequence[SegmentArrays]], Awaitable[None]]


class SegmentStream:
    """Cuts and sends the segments of a trajectory.

    Args:
        in_step: lockstep in windows, see `Bounds`.
        emit: takes segments. It takes all of one call before its first wait.
    """

    def __init__(
        self,
        task: Task,
        trajectory_id: str,
        *,
        segment_tokens: int,
        in_step: bool,
        emit: Emit,
        clock: EpisodeClock,
    ) -> None:
        self.cutter = SegmentCutter(task, trajectory_id, segment_tokens)
        self._emit, self._clock, self.in_step = emit, clock, in_step
        self.min_version = task.min_policy_version
        """Oldest version that may sample the next tokens."""
        self.closed = False
        """True once the closing segment was handed over."""
        self._cuts: list[SegmentArrays] = []
        self._sending = asyncio.Lock()

    async def send(self, cuts: Sequence[SegmentArrays]) -> None:
        """Hand over segments, behind those of earlier calls."""
        if not cuts:
            return
        if self.in_step:
            self.min_version = max(self.min_version, *(cut.segment.version_max + 1 for cut in cuts))
        self._cuts += cuts
        # The wait for room in the outbox is a wait for the broker, so it does not count for the deadline.
        with self._clock.waiting():
            async with self._sending:
                # A cancellation may end any wait, and a missing segment leaves a gap. So what a cancelled call has left
                # goes first, and all of them go in one call.
                cuts, self._cuts = self._cuts, []
                if not cuts:
                    return
                await self._emit(cuts)
                self.closed = cuts[-1].segment.status != "unfinished"


class Play(Protocol):
    """One way of playing an episode: `PlayBySteps` or `PlayByRequests`."""

    async def play(self) -> TrajectoryStatus:
        """Play to the end. Return the status with which the trajectory was closed."""
        ...

    def unsent_segments(self) -> list[SegmentArrays]:
        """Return segments of what was sampled and was not sent, when `play` was cut short."""
        ...


class Episode:
    """State and life of one leased task. It emits the segments of its trajectory as they are cut.

    An error of the environment or of the model's answer ends the trajectory with status "failed" and the
    error's text. It is recorded as data and does not end the actor. A cancellation and the errors that are
    nobody's fault here (`Infrastructure`) pass through: such a task runs again.

    Args:
        text: renders messages, and reads answers.
        policy: samples the answers.
        emit: takes segments, see `SegmentStream`.
        environments: runs the environment's code.
        way_of_playing: chooses how an environment is played, `actors.play_requests.way_of_playing`.
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
        way_of_playing: Callable[["Episode", Env], Play],
    ) -> None:
        self.task, self.trajectory_id, self.max_turns = lease.task, lease.trajectory_id, bounds.max_turns
        self._suite, self._way_of_playing = suite, way_of_playing
        self.clock = EpisodeClock()
        self.calls = EnvCalls(environments, self.trajectory_id, bounds.env_timeout_s)
        self.conversations = Conversations(text, self.task.sampling)
        self.sampler = TurnSampler(policy, text, self.task, self.trajectory_id, self.clock)
        self.stream = SegmentStream(
            self.task,
            self.trajectory_id,
            segment_tokens=bounds.segment_tokens,
            in_step=bounds.in_step and self.task.purpose == "train",
            emit=emit,
            clock=self.clock,
        )
        self._play: Play | None = None
        self.status = "unfinished"

    @property
    def tokens(self) -> int:
        """Number of tokens of the trajectory so far."""
        return self.stream.cutter.tokens

    @property
    def env_seconds(self) -> float:
        """Time in which the episode waited for its environment."""
        return self.calls.seconds

    async def run(self) -> None:
        """Run the episode to its end. Afterwards the trajectory is closed, unless this call was cancelled.

        Raises:
            Infrastructure: neither the environment nor the model is at fault; the trajectory is not closed.
            ProtocolError: the closing segment cannot be encoded.
        """
        env: Env | None = None
        try:
            async with asyncio.timeout(self.task.deadline_s) as deadline:
                self.clock.start(deadline)
                env = await self.calls.ask(self._suite.episode, on_loop=True)
                self._play = self._way_of_playing(self, env)
                self.status = await self._play.play()
        except Infrastructure:
            raise
        except Exception as error:
            await self._fail(self._too_late() if self.clock.stop() else error)
        finally:
            if env is not None:
                await self.calls.close(env, given_up=self.status == "unfinished")

    def _too_late(self) -> ActorError:
        return ActorError(
            f"the episode took longer than its deadline of {self.task.deadline_s:g} s "
            "(learner.sampling.max_trajectory_s)"
        )

    async def _fail(self, error: Exception) -> None:
        self.status = "failed"
        failure = FAILURES.record(error, self.trajectory_id)
        cutter = self.stream.cutter
        if not cutter.closed:
            closing = Closing("failed", error=describe(failure), failure=failure)
            unsent = self._play.unsent_segments() if self._play is not None else []
            await self.stream.send([*unsent, *cutter.abandon(closing)])
        elif not self.stream.closed:
            # The closing segment was cut but could not be sent, so nothing closes this trajectory.
            raise error
