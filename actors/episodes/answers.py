"""Samples one turn of the policy, up to its end token, a stop string or a bound."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from typing import Protocol

from actors.episodes.clock import EpisodeClock
from actors.episodes.conversation import Text
from actors.errors import ActorError
from actors.generator_client.turn_request import TurnRequest
from actors.sampled import Sampled
from actors.stop_strings import find_stop, stopped_at
from protocol.messages.tasks import Task


class Policy(Protocol):
    """Source of action turns: a `GeneratorPool`, or a script in a test."""

    def turn(self, request: TurnRequest) -> AsyncGenerator[Sampled, None]: ...


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
    ) -> TurnRequest:
        """Return the request for a turn, see `TurnRequest`.

        Args:
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
            routes_from=routed if self._task.sampling.routes else None,
        )

    async def pieces(
        self, request: TurnRequest, turn: Sequence[int] = (), *, keep_special: bool
    ) -> AsyncGenerator[Sampled, None]:
        """Yield a turn as it is sampled. The last piece has the finish reason.

        Args:
            turn: tokens of the turn that were sampled before.
            keep_special: look for stop strings in a text with its special tokens.

        Raises:
            ActorError: the generator ended the turn without a token.
        """
        tokens, reason, generator = list(turn), "", ""
        # Until the first token it waits for a generator, a place in its engine, or a version (in lockstep), each
        # with a deadline of its own.
        with ExitStack() as waiting:
            waiting.enter_context(self._clock.waiting())
            async with aclosing(self._policy.turn(request)) as stream:
                async for sampled in stream:
                    waiting.close()
                    sampled = self._until_stop(sampled, tokens, keep_special)
                    tokens += sampled.token_ids.tolist()
                    # The generator may be ahead: it computed tokens behind a stop string, too.
                    sampled = sampled.routed_before(len(request.prompt) + len(tokens) - len(turn))
                    reason, generator = sampled.finish_reason, sampled.generator
                    yield sampled
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
