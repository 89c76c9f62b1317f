"""The room that a trajectory has for the answers to requests of which several are sampled at a time."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field

from actors.environments.results import checked_limit
from actors.episodes.closing import no_room
from actors.episodes.conversation import Observation
from actors.episodes.parts import EpisodeParts
from envs.agent.requests import PolicyRequest


@dataclass(eq=False)
class WantedAnswer:
    """A request that waits, or whose answer is sampled."""

    request: PolicyRequest
    observation: Observation
    most: int = 0
    """Most tokens of its answer. They are kept free for it while it is sampled."""
    tokens: list[int] = field(default_factory=list)
    task: "asyncio.Task[None] | None" = None

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def prompt_turn(self) -> int:
        """Number of its new messages among the turns of `actors.episodes.conversation`."""
        return 2 * self.number

    @property
    def answer_turn(self) -> int:
        return 2 * self.number + 1


class RequestRoom:
    """Turns and tokens that are left to a trajectory. Those of answers that are sampled now are kept free for them.

    Args:
        parts: the episode's parts, of which its limits and its conversations are used.
    """

    def __init__(self, parts: EpisodeParts) -> None:
        self.begun = 0
        """Number of requests whose sampling has begun."""
        self._sampling, self._max_turns, self._talks = (
            parts.task.sampling,
            parts.max_turns,
            parts.conversations,
        )
        self._void = self._ended_tokens = 0

    def why_not(self, wanted: WantedAnswer, live: Collection[WantedAnswer]) -> str:
        """Return the limit that keeps a request from being answered, or "", and set the most tokens of its answer.

        Args:
            live: requests whose answers are sampled.

        Raises:
            ActorError: it is the first one, and leaves no room for an answer.
        """
        sampling, length = self._sampling, self._talks.length(wanted.observation)
        if not self.begun and length >= self._talks.longest:
            raise no_room(length, self._talks.bound, self._talks.longest)
        if self.begun - self._void >= self._max_turns:
            return "max_turns"
        kept = sum(len(other.observation.token_ids) + other.most for other in live)
        room = sampling.max_trajectory_tokens - self._ended_tokens - kept - len(wanted.observation.token_ids)
        if room <= 0:
            return "max_trajectory_tokens"
        if self._talks.too_long(wanted.observation):
            return self._talks.bound
        most = min(sampling.max_turn_tokens, self._talks.longest - length)
        if wanted.request.limit is not None:
            most = min(most, checked_limit(wanted.request.limit))
        wanted.most = 0 if live and room < most else min(room, most)
        return ""

    def count(self, wanted: WantedAnswer) -> None:
        """Count the tokens of an answer that is over. Without a token, it is not in the trajectory."""
        if wanted.tokens:
            self._ended_tokens += len(wanted.observation.token_ids) + len(wanted.tokens)
        else:
            self._void += 1
