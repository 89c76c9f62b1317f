"""One episode: an environment and a policy, until the environment or a limit ends it."""

import asyncio
from dataclasses import dataclass

from actors.conversation import Conversations, Text
from actors.episode_parts import (
    Emit,
    EnvCalls,
    EpisodeClock,
    EpisodeParts,
    Policy,
    SegmentStream,
    TurnSampler,
)
from actors.errors import ActorError, Infrastructure
from actors.failures import FAILURES
from actors.play_requests import RequestPlay
from actors.play_steps import StepPlay
from actors.segments import Closing
from envs.base import CodeCaller, Env, HasRequests, Suite
from protocol.failures import describe
from protocol.messages.episodes import LeaseTask


@dataclass(frozen=True)
class Bounds:
    """Limits of an episode that come from the actor's settings. The task sets further limits."""

    segment_tokens: int = 512
    max_turns: int = 32
    env_timeout_s: float = 30.0
    in_step: bool = False
    """Lockstep in windows: after each segment, a training task waits for a version newer than any in it."""


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
        self._task, self._suite = lease.task, suite
        self.trajectory_id = lease.trajectory_id
        self._clock = EpisodeClock()
        self._calls = EnvCalls(environments, self.trajectory_id, bounds.env_timeout_s)
        self._stream = SegmentStream(
            self._task,
            self.trajectory_id,
            segment_tokens=bounds.segment_tokens,
            in_step=bounds.in_step and self._task.purpose == "train",
            emit=emit,
            clock=self._clock,
        )
        self._parts = EpisodeParts(
            task=self._task,
            max_turns=bounds.max_turns,
            calls=self._calls,
            clock=self._clock,
            conversations=Conversations(text, self._task.sampling),
            sampler=TurnSampler(policy, text, self._task, self.trajectory_id, self._clock),
            stream=self._stream,
        )
        self._play: StepPlay | RequestPlay | None = None
        self.status = "unfinished"

    @property
    def tokens(self) -> int:
        """Number of tokens of the trajectory so far."""
        return self._stream.cutter.tokens

    @property
    def env_seconds(self) -> float:
        """Time in which the episode waited for its environment."""
        return self._calls.seconds

    async def run(self) -> None:
        """Run the episode to its end. Afterwards the trajectory is closed, unless this call was cancelled.

        Raises:
            Infrastructure: neither the environment nor the model is at fault; the trajectory is not closed.
            ProtocolError: the closing segment cannot be encoded.
        """
        env: Env | None = None
        try:
            async with asyncio.timeout(self._task.deadline_s) as deadline:
                self._clock.start(deadline)
                env = await self._calls.ask(self._suite.episode, on_loop=True)
                self._play = self._way_of(env)
                self.status = await self._play.play()
        except Infrastructure:
            raise
        except Exception as error:
            await self._fail(self._late() if self._clock.stop() else error)
        finally:
            if env is not None:
                await self._calls.close(env, given_up=self.status == "unfinished")

    def _way_of(self, env: Env) -> StepPlay | RequestPlay:
        """Return the way in which an environment is played."""
        plain = self._task.start is None and not self._task.note and not self._stream.in_step
        if plain and isinstance(env, HasRequests):
            return RequestPlay(env, self._parts)
        return StepPlay(env, self._parts)

    def _late(self) -> ActorError:
        return ActorError(
            f"the episode took longer than its deadline of {self._task.deadline_s:g} s "
            "(learner.sampling.max_trajectory_s)"
        )

    async def _fail(self, error: Exception) -> None:
        self.status = "failed"
        failure = FAILURES.record(error, self.trajectory_id)
        cutter = self._stream.cutter
        if not cutter.closed:
            closing = Closing("failed", error=describe(failure), failure=failure)
            rest = self._play.rest() if self._play is not None else []
            await self._stream.send([*rest, *cutter.abandon(closing)])
        elif not self._stream.closed:
            # The closing segment was cut but could not be sent, so nothing closes this trajectory.
            raise error
