"""Plays an episode whose environment asks for several answers at a time, see `envs.base.HasRequests`.

A trajectory is one array of tokens, so turns that are sampled at the same time are put into one order:

    sampled     A  ###############        trajectory   prompt A ############### prompt B ###### prompt C ########
    over time   B      ######
                C            ########

The order is that of the first tokens. The first turn that has not ended is written while it is sampled, and those
behind it are kept until it ends. A turn begins only after the answer that it continues, so it stands behind it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from actors.conversation import Observation
from actors.env_results import (
    check_conversation,
    check_tools,
    checked_limit,
    closing_of,
    earlier_rewards,
    finite_rewards,
    no_room,
)
from actors.episode import Episode, Play, SampledTime
from actors.errors import ActorError, EnvironmentFailed
from actors.generator_client import routed
from actors.play_steps import PlayBySteps
from actors.sampled import Sampled
from actors.segments import Closing, SegmentCutter
from envs.base import Env, HasRequests, PolicyRequest, RequestNews, StepResult, TurnFacts, in_order
from protocol.arrays import SegmentArrays
from protocol.messages.episodes import Reward
from protocol.messages.fields import TrajectoryStatus


@dataclass
class _Turn:
    prompt: list[int]
    """Tokens in front of the answer that are in no earlier turn."""
    after: int
    pieces: list[Sampled] = field(default_factory=list)
    """Sampled tokens that are not written yet."""
    reason: str = ""
    ended: bool = False
    abandoned: bool = False
    """True if nobody gets the answer."""
    written: bool = False
    """True if its prompt is written."""
    index: int = -1
    """Index of the answer in the trajectory, once it is written."""
    spent: SampledTime = field(default_factory=SampledTime)
    """Seconds of the answer, which its last segment has."""
    tools: float = 0.0
    """Seconds of the agent behind the answer that no segment has yet."""


class TurnOrder:
    """The turns of one trajectory, by the numbers of their requests.

    Args:
        cutter: gets the turns in their order.

    Example:
        >>> import numpy as np
        >>> from protocol.messages.episodes import Task
        >>> def some(n): return Sampled(np.full(n, n, "i4"), np.zeros(n, "f4"), np.zeros(n, "i4"))
        >>> order = TurnOrder(SegmentCutter(Task(task_id="t", env="e", group_id="g", group_size=1), "t.0", 64))
        >>> order.add_request(0, [8], after=-1); order.add_request(1, [9, 9], after=-1)
        >>> [order.add_tokens(0, some(1)), order.add_tokens(1, some(2)), order.end_answer(1, "stop")]
        [[], [], []]
        >>> cuts = [*order.end_answer(0, "stop"), *order.close_trajectory({}, Closing("finished"))]
        >>> [cut.arrays["token_ids"].tolist() for cut in cuts]
        [[8, 1], [9, 9, 2, 2]]
    """

    def __init__(self, cutter: SegmentCutter) -> None:
        self._cutter = cutter
        self._turns: dict[int, _Turn] = {}
        self._order: list[int] = []
        self._at = 0
        """Place in the order of the turn that is being written."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of the requests with tokens, in the order of the trajectory."""
        return list(self._order)

    @property
    def indices(self) -> list[int]:
        """Indices of the answers that are written, in order."""
        return [self._turns[number].index for number in self._order if self._turns[number].written]

    @property
    def abandoned(self) -> list[int]:
        """Numbers of the requests whose answers nobody got."""
        return [number for number in self._order if self._turns[number].abandoned]

    @property
    def unended(self) -> list[int]:
        """Numbers of the requests with tokens whose answers have not ended."""
        return [number for number in self._order if not self._turns[number].ended]

    def add_request(self, number: int, prompt: list[int], *, after: int) -> None:
        """Note a request. It gets its place with its first token.

        Args:
            prompt: tokens in front of its answer that are in no earlier turn, at least one.
            after: number of the request whose answer they continue; -1: none.
        """
        assert prompt, "a turn without a prompt has no place of its own"
        self._turns[number] = _Turn(prompt, after)

    def add_tokens(self, number: int, sampled: Sampled) -> list[SegmentArrays]:
        """Append tokens to an answer. Return the segments that are full."""
        turn = self._turns[number]
        assert not turn.ended, f"the turn of request {number} has ended"
        if not len(sampled):
            return []
        if number not in self._order:
            self._order.append(number)
        turn.pieces.append(sampled)
        return self._write_turns()

    def end_answer(self, number: int, reason: str, spent: SampledTime | None = None) -> list[SegmentArrays]:
        """End an answer. Return the segments that are full.

        Args:
            spent: seconds that it took.
        """
        turn = self._turns[number]
        turn.reason, turn.ended, turn.spent = reason, True, spent or turn.spent
        return self._write_turns()

    def note_tools(self, number: int, seconds: float) -> None:
        """Note the seconds of the agent behind an answer. A later segment has them."""
        turn = self._turns.get(number)
        if turn is None or number not in self._order:
            return
        turn.tools += seconds
        if turn.written:
            self._note_time(turn)

    def abandon_answer(self, number: int) -> list[SegmentArrays]:
        """End an answer that nobody gets, wherever it stands. Return the segments that are full."""
        turn = self._turns.get(number)
        if turn is None:
            return []
        turn.abandoned = True
        return [] if turn.ended else self.end_answer(number, "left")

    def close_trajectory(
        self, rewards: Mapping[str, float], closing: Closing, earlier: Sequence[Reward] = ()
    ) -> list[SegmentArrays]:
        """Return the last segment. All turns have ended, and at least one has tokens."""
        assert all(self._turns[number].ended for number in self._order), "a turn has not ended"
        for number in self._order:
            self._note_time(self._turns[number])
        return self._cutter.close_turn(dict(rewards), self.last_reason, closing, earlier=earlier)

    @property
    def last_reason(self) -> str:
        """Why the last turn ended."""
        return self._turns[self._order[-1]].reason

    def _write_turns(self) -> list[SegmentArrays]:
        cuts: list[SegmentArrays] = []
        while self._at < len(self._order):
            turn = self._turns[self._order[self._at]]
            if not turn.written:
                cuts += self._write_prompt(turn)
            for piece in turn.pieces:
                cuts += self._cutter.act(piece)
            turn.pieces = []
            if not turn.ended or self._at + 1 == len(self._order):
                break
            self._at += 1
        return cuts

    def _note_time(self, turn: _Turn) -> None:
        """Have the next segment that ends a turn say what time an answer took, as far as no segment has it."""
        self._cutter.note_time(
            turn.index, waited=turn.spent.waited, sampled=turn.spent.sampled, tools=turn.tools
        )
        turn.spent, turn.tools = SampledTime(), 0.0

    def _write_prompt(self, turn: _Turn) -> list[SegmentArrays]:
        """Write a prompt, behind the end of the turn before it."""
        cuts: list[SegmentArrays] = []
        if self._at:
            self._note_time(self._turns[self._order[self._at - 1]])
            cuts += self._cutter.close_turn({}, self._turns[self._order[self._at - 1]].reason)
        cuts += self._cutter.observe(turn.prompt, self._turns[turn.after].index if turn.after >= 0 else -1)
        turn.written, turn.index = True, self._cutter.turn + 1
        turn.prompt = []
        return cuts


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
        """Number of its new messages among the turns of `actors.conversation`."""
        return 2 * self.number

    @property
    def answer_turn(self) -> int:
        return 2 * self.number + 1


class RequestRoom:
    """Turns and tokens that are left to a trajectory. Those of answers that are sampled now are kept free for them.

    Args:
        episode: its limits and its conversations are used.
    """

    def __init__(self, episode: Episode) -> None:
        self.begun = 0
        """Number of requests whose sampling has begun."""
        self._sampling, self._max_turns, self._conversations = (
            episode.task.sampling,
            episode.max_turns,
            episode.conversations,
        )
        self._void = self._ended_tokens = 0

    def why_not(self, wanted: WantedAnswer, live: Collection[WantedAnswer]) -> str:
        """Return the limit that keeps a request from being answered, or "", and set the most tokens of its answer.

        Args:
            live: requests whose answers are sampled.

        Raises:
            ActorError: it is the first one, and leaves no room for an answer.
        """
        sampling, length = self._sampling, self._conversations.length(wanted.observation)
        if not self.begun and length >= self._conversations.longest:
            raise no_room(length, self._conversations.bound, self._conversations.longest)
        if self.begun - self._void >= self._max_turns:
            return "max_turns"
        kept = sum(len(other.observation.token_ids) + other.most for other in live)
        room = sampling.max_trajectory_tokens - self._ended_tokens - kept - len(wanted.observation.token_ids)
        if room <= 0:
            return "max_trajectory_tokens"
        if self._conversations.too_long(wanted.observation):
            return self._conversations.bound
        most = min(sampling.max_turn_tokens, self._conversations.longest - length)
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


LOOK_S = 2.0
"""Time after which the environment is asked anew for news while answers are sampled."""
LEAVE_S = 10.0
"""Longest time that the sampling of an answer may take to end once nobody wants it."""


class PlayByRequests:
    """Samples all requests of an environment that wait, at the same time.

    A request waits only if the tokens that are left to the trajectory may not suffice for it and for those that are
    sampled. So it gets the same room as if they were answered one after the other.
    """

    def __init__(self, env: HasRequests, episode: Episode) -> None:
        self._env, self._episode, self._task = env, episode, episode.task
        self._calls, self._conversations, self._stream = episode.calls, episode.conversations, episode.stream
        self._turn_order = TurnOrder(episode.stream.cutter)
        self._waiting_requests: deque[PolicyRequest] = deque()
        self._next_wanted: WantedAnswer | None = None
        """First of those that wait, with its messages as tokens."""
        self._being_sampled: dict[int, WantedAnswer] = {}
        """Requests whose answers are sampled, by number."""
        self._news_task: asyncio.Task[RequestNews] | None = None
        self._request_room = RequestRoom(episode)
        self._unsent_segments: list[SegmentArrays] = []
        """Segments of answers that nobody gets, which are not sent yet."""
        self._generators: dict[int, str] = {}
        """Generator of each answer: the next turn of its conversation goes there, where its context is cached."""
        self._answers_given: set[int] = set()
        """Numbers of the answers that the environment has."""
        self._begun_at: float | None = None
        """When the environment began, by the monotonic clock, until its first request."""
        self._given_at: dict[int, float] = {}
        """When each of them was given, by the monotonic clock, until the agent goes on behind it."""

    async def play(self) -> TrajectoryStatus:
        """Play to the end. Return the status with which the trajectory was closed.

        Raises:
            ActorError: the environment or the answer is at fault, or the first prompt leaves no room.
            Infrastructure: neither is at fault.
        """
        self._begun_at = time.monotonic()
        await self._calls.ask(self._env.begin, dict(self._task.data))
        limit, over = "", False
        try:
            while not over:
                limit = await self._begin_sampling()
                if limit and not self._being_sampled:
                    break
                over = await self._wait_for_news()
        finally:
            await self._abandon_all_answers()
        await self._stream.send(self.unsent_segments())
        return (
            await self._close_trajectory("finished", "")
            if over
            else await self._close_trajectory("truncated", limit)
        )

    def unsent_segments(self) -> list[SegmentArrays]:
        """Return segments of what was sampled and was not sent."""
        unsent, self._unsent_segments = self._unsent_segments, []
        return unsent

    # --- requests that wait -------------------------------------------------------------------------------

    async def _begin_sampling(self) -> str:
        """Begin all requests for which there is room. Return why the first of the others has none, or ""."""
        while self._next_wanted is not None or self._waiting_requests:
            if (
                self._next_wanted is None
                and (wanted := await self._rendered(self._waiting_requests.popleft())) is not None
            ):
                self._next_wanted = wanted
            if self._next_wanted is None:
                continue
            if why := self._request_room.why_not(self._next_wanted, self._being_sampled.values()):
                return why
            if not self._next_wanted.most:
                # It waits for those that are sampled now.
                return "max_trajectory_tokens"
            self._begin_answer(self._next_wanted)
            self._next_wanted = None
        return ""

    async def _rendered(self, request: PolicyRequest) -> WantedAnswer | None:
        """Return a request with its messages as tokens; None if it is declined."""
        if request.after >= 0 and 2 * request.after + 1 not in self._conversations.answers:
            raise EnvironmentFailed(
                f"environment: request {request.number} follows {request.after}, which has no answer"
            )
        try:
            observation = self._observation(request)
        except ActorError as error:
            await self._calls.ask(self._env.decline, request.number, str(error), False, on_loop=True)
            return None
        # An agent that knows this error may go on in a shorter conversation, if there is room for it.
        if self._task.sampling.max_context_tokens and self._conversations.too_long(observation):
            why = f"a branch has at most {self._conversations.longest} tokens"
            await self._calls.ask(self._env.decline, request.number, why, True, on_loop=True)
            return None
        return WantedAnswer(request, observation)

    def _observation(self, request: PolicyRequest) -> Observation:
        check_conversation(request.messages, "next_requests")
        check_tools(request.tools, "next_requests")
        if request.after < 0:
            observation = self._conversations.anew(request.messages, request.tools)
        else:
            observation = self._conversations.behind(2 * request.after + 1, request.messages)
        if not observation.token_ids:
            raise ActorError("the chat template adds nothing for these messages")
        return observation

    def _begin_answer(self, wanted: WantedAnswer) -> None:
        """Have a request sampled."""
        self._conversations.observed(wanted.prompt_turn, wanted.observation)
        after = wanted.observation.after
        self._turn_order.add_request(
            wanted.number, wanted.observation.token_ids, after=after // 2 if after >= 0 else -1
        )
        self._being_sampled[wanted.number] = wanted
        wanted.task = asyncio.create_task(self._sample_answer(wanted, self._request_room.begun))
        self._request_room.begun += 1

    # --- answers ------------------------------------------------------------------------------------------

    async def _sample_answer(self, wanted: WantedAnswer, turn: int) -> None:
        """Sample an answer, and give it to the environment."""
        prompt, observation = self._conversations.context(wanted.observation), wanted.observation
        sampler, keep_special = self._episode.sampler, bool(observation.tools)
        request = sampler.request(
            turn,
            prompt,
            wanted.most,
            min_version=self._stream.min_version,
            preferred=self._generators.get(observation.after, ""),
            routed=self._conversations.routed(observation.after),
        )
        reason, known, spent = "", self._conversations.routed(observation.after), SampledTime()
        with self._episode.clock.working():
            async with aclosing(sampler.pieces(request, keep_special=keep_special, spent=spent)) as pieces:
                async for sampled in pieces:
                    reason = sampled.finish_reason
                    self._generators[wanted.answer_turn] = sampled.generator
                    wanted.tokens += sampled.token_ids.tolist()
                    known = routed(known, [sampled])
                    await self._stream.send(self._turn_order.add_tokens(wanted.number, sampled))
            self._conversations.answered(
                wanted.answer_turn, wanted.tokens, after=wanted.prompt_turn, routed=known
            )
            await self._stream.send(self._turn_order.end_answer(wanted.number, reason, spent))
            facts = TurnFacts(len(prompt), len(wanted.tokens), cut=reason == "length")
            text = sampler.text_of(wanted.tokens, keep_special=keep_special)

            def answer() -> None:
                # What the environment has counts, whatever ends this call.
                self._env.answer(wanted.number, text, facts)
                self._answers_given.add(wanted.number)
                self._given_at[wanted.number] = time.monotonic()

            await self._calls.ask(answer, on_loop=True, timed=False)

    async def _wait_for_news(self) -> bool:
        """Wait until something has happened, and note it. Return whether the environment has ended."""
        if self._news_task is None:
            self._news_task = asyncio.create_task(self._ask_news())
        answering = {wanted.task for wanted in self._being_sampled.values() if wanted.task is not None}
        # Each call of the environment has a deadline of its own, and so has each wait for a generator.
        await asyncio.wait(
            {self._news_task, *answering}, timeout=self._calls.timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for wanted in [w for w in self._being_sampled.values() if w.task is not None and w.task.done()]:
            self._finish_answer(wanted)
        if not self._news_task.done():
            return False
        news, self._news_task = self._news_task.result(), None
        for request in news.new:
            self._note_tools(request.after)
        if news.new and self._begun_at is not None:
            self._stream.cutter.note_time(0, tools=time.monotonic() - self._begun_at)
            self._begun_at = None
        self._waiting_requests.extend(news.new)
        for number in news.withdrawn:
            await self._withdraw_request(number)
        return news.ended

    def _note_tools(self, number: int) -> None:
        """Note the time of the agent behind an answer, when the agent goes on."""
        given = self._given_at.pop(number, None)
        if given is not None:
            self._turn_order.note_tools(number, time.monotonic() - given)

    async def _ask_news(self) -> RequestNews:
        """Ask the environment for news: while answers are sampled, it may be silent for as long as that takes."""
        wait_s = min(LOOK_S, self._calls.timeout_s / 2) if self._being_sampled else None
        news = await self._calls.ask(self._env.next_requests, wait_s, timed=not self._being_sampled)
        if not isinstance(news, RequestNews):
            raise EnvironmentFailed(f"environment: next_requests returned {news!r:.200}, not RequestNews")
        return news

    def _finish_answer(self, wanted: WantedAnswer) -> None:
        """Take over the end of an answer's task. Raise its error, if it has failed."""
        assert wanted.task is not None
        del self._being_sampled[wanted.number]
        self._request_room.count(wanted)
        wanted.task.result()

    # --- ends ---------------------------------------------------------------------------------------------

    async def _withdraw_request(self, number: int) -> None:
        """Forget a request that nobody wants an answer to. What was sampled is recorded, and not trained."""
        if self._next_wanted is not None and self._next_wanted.number == number:
            self._next_wanted = None
            return
        if waiting := [request for request in self._waiting_requests if request.number == number]:
            self._waiting_requests.remove(waiting[0])
            return
        await self._end_answer_tasks([self._being_sampled[number]] if number in self._being_sampled else [])
        await self._stream.send(self._turn_order.abandon_answer(number))

    async def _abandon_all_answers(self) -> None:
        """End the sampling of all answers, which nobody gets any more."""
        try:
            if self._news_task is not None:
                self._news_task.cancel()
                await _wait_until_over({self._news_task})
                self._news_task = None
            await self._end_answer_tasks(list(self._being_sampled.values()))
        finally:
            # The deadline may end these waits.
            for number in self._turn_order.unended:
                self._unsent_segments += self._turn_order.abandon_answer(number)

    async def _end_answer_tasks(self, wanted: list[WantedAnswer]) -> None:
        tasks = {one.task for one in wanted if one.task is not None}
        for task in tasks:
            task.cancel()
        await _wait_until_over(tasks)
        for one in wanted:
            del self._being_sampled[one.number]
            self._request_room.count(one)

    async def _close_trajectory(self, status: TrajectoryStatus, why: str) -> TrajectoryStatus:
        """Close the trajectory.

        Args:
            why: the limit at which it ends; "": it ends as its last turn did.
        """
        result: StepResult = await self._calls.result(self._env.outcome, status != "finished")
        # Behind the last answer, the agent may still have worked for long.
        if self._given_at:
            self._note_tools(max(self._given_at, key=lambda number: self._given_at[number]))
        numbers = self._turn_order.numbers
        if not numbers:
            raise EnvironmentFailed("environment: the episode ended, and no answer was sampled")
        nobodys = set(numbers) - self._answers_given | set(self._turn_order.abandoned)
        result = in_order(replace(result, auxiliary=[*result.auxiliary, *nobodys]), numbers)
        indices = self._turn_order.indices
        closing = closing_of(status, why or self._turn_order.last_reason, result, self._task, indices)
        earlier = earlier_rewards(result, indices)
        await self._stream.send(self._turn_order.close_trajectory(finite_rewards(result), closing, earlier))
        return status


async def _wait_until_over(tasks: "set[asyncio.Task[Any]]") -> None:
    """Wait until tasks that were cancelled are over. Their errors, if they have any, came of the end."""
    if tasks:
        await asyncio.wait(tasks, timeout=LEAVE_S)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


def way_of_playing(episode: Episode, env: Env) -> Play:
    """Return how an environment is played: by its requests if it has some, else by steps.

    A task with a note, a prefix or an opening, and windows in lockstep, go step by step.
    """
    begun = episode.task.start is not None or episode.task.note or episode.task.opening
    plain = not begun and not episode.stream.in_step
    if plain and isinstance(env, HasRequests):
        return PlayByRequests(env, episode)
    return PlayBySteps(env, episode)
