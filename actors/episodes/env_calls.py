"""Calls the environment of one episode: each call has a deadline, and its errors say whose fault they are."""

import logging
import time
from collections.abc import Callable
from typing import Any

from actors.errors import ActorError, EnvironmentFailed, ServiceDown
from envs.base import CodeCaller, Env, HasGiveUp, StepResult, can_refuse
from envs.blame import place_of_error
from envs.errors import ServiceFailed

log = logging.getLogger(__name__)

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
