"""Cuts a growing trajectory into segments, with the experts of its tokens. Pure: no clock, no socket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from actors.sampled import Routes, Sampled, together
from protocol.arrays import MAX_ROUTE_BYTES, TOKEN_ARRAYS, Arrays, SegmentArrays
from protocol.messages.episodes import Failure, Reward, Segment, Task, Turn, TurnMark, TurnTime
from protocol.messages.fields import MAX_ITEMS, KvPolicy, TrajectoryStatus


class RouteBook:
    """Rows of experts, which come by position in the context of a turn and leave by token of the trajectory.

    The context of a turn is its tokens behind those of the turns that it continues.

    Example:
        >>> book = RouteBook()
        >>> for turn, first, end, before in ((0, 0, 2, -1), (1, 2, 4, 0), (2, 4, 5, 0)):
        ...     book.note_tokens(turn, first, end, before=before)
        >>> book.add_routes(2, Routes(np.array([0, 1, 2], "i4"), np.array([[0, 1], [2, 3], [4, 5]], "u1")))
        >>> {name: array.tolist() for name, array in book.take_routes(5).items()}
        {'routed_token': [0, 1, 4], 'routed_experts': [0, 1, 2, 3, 4, 5]}
        >>> book.take_routes(5)
        {}
    """

    def __init__(self) -> None:
        self._spans: dict[int, tuple[int, int]] = {}
        self._before: dict[int, int] = {}
        self._rows: Routes | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens whose rows fit into one message."""
        return MAX_ROUTE_BYTES if self._rows is None else max(1, MAX_ROUTE_BYTES // self._rows.row_bytes)

    def note_tokens(self, turn: int, start: int, end: int, *, before: int) -> None:
        """Note the tokens of a turn, or that it has grown.

        Args:
            before: turn that it continues; -1: none.
        """
        first, _ = self._spans.get(turn, (start, end))
        self._spans[turn], self._before[turn] = (first, end), before

    def add_routes(self, turn: int, routes: Routes) -> None:
        """Add rows by position in the context of a turn. All of them are of tokens that the turn has."""
        way = []
        while turn >= 0:
            way.append(self._spans[turn])
            turn = self._before[turn]
        context = np.concatenate([np.arange(*span, dtype=np.int32) for span in reversed(way)])
        moved = Routes(context[routes.tokens], routes.experts)
        self._rows = together([moved] if self._rows is None else [self._rows, moved])

    def waits(self, end: int) -> bool:
        """Return whether tokens before ``end`` have more rows than fit into one message."""
        return self._rows is not None and int((self._rows.tokens < end).sum()) > self.most_tokens

    def take_routes(self, end: int) -> Arrays:
        """Return and remove rows of tokens before ``end``, as many as fit into one message."""
        if self._rows is None:
            return {}
        (places,) = np.nonzero(self._rows.tokens < end)
        places = places[: self.most_tokens]
        if not len(places):
            return {}
        taken = self._rows.rows(places)
        rest = np.delete(np.arange(len(self._rows)), places)
        self._rows = self._rows.rows(rest) if len(rest) else None
        return taken.arrays


@dataclass(frozen=True)
class Closing:
    """End of a trajectory: its status and the reason."""

    status: TrajectoryStatus
    stop_reason: str = ""
    error: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    auxiliary: tuple[int, ...] = ()
    """Indices of the action turns that are not to be trained."""


class SegmentCutter:
    """Holds the tokens of one trajectory that are not in a segment yet.

    Call `observe` and `act` as tokens come. Call `close_turn` after each action turn, with the trajectory's
    end if it was the last turn. Call `abandon` when the episode fails at any other place.

    Example:
        >>> task = Task(task_id="t", env="e", group_id="g", group_size=1)
        >>> cutter = SegmentCutter(task, "t.0", segment_tokens=4)
        >>> [cut.segment.tokens for cut in cutter.observe([1, 2, 3])]
        []
        >>> one = np.ones(3, "i4")
        >>> [cut.segment.tokens for cut in cutter.act(Sampled(one, one.astype("f4"), one))]
        [4]
        >>> [(c.segment.tokens, c.segment.rewards) for c in cutter.close_turn({"score": 1.0})]
        [(2, [Reward(name='score', turn=1, value=1.0)])]
    """

    def __init__(self, task: Task, trajectory_id: str, segment_tokens: int) -> None:
        self._task, self._trajectory_id, self._limit = task, trajectory_id, segment_tokens
        self._index = 0
        self._turn = -1
        self._turn_is_action = False
        self._back = 1
        self._turns: list[Turn] = []
        self._owed: list[Reward] = []
        """Rewards of repeated turns, which are not in a segment yet."""
        self._times: dict[int, list[float]] = {}
        """Seconds waited, sampled and in tools by turn, which are not in a segment yet."""
        self._routes = RouteBook()
        self._pending: list[Arrays] = []
        self._pending_tokens = 0
        self._kv: KvPolicy = "recomputed"
        self._generator = ""
        # Position of the first pending token in the trajectory.
        self.offset = 0
        self.closed = False

    @property
    def tokens(self) -> int:
        """Number of tokens of the trajectory so far."""
        return self.offset + self._pending_tokens

    @property
    def turn(self) -> int:
        """Index of the present turn; -1 before the first."""
        return self._turn

    @property
    def room(self) -> int:
        """Number of tokens that still fit into the current segment."""
        return self._limit - self._pending_tokens

    def cut_full(self) -> list[SegmentArrays]:
        """End the segment if it is full. More tokens have to follow, in this turn or in a new one."""
        return [] if self.room else [self._cut_segment(self._limit, [], Closing("unfinished"))]

    def observe(self, token_ids: list[int], after: int | None = None) -> list[SegmentArrays]:
        """Append an observation turn.

        Args:
            token_ids: its tokens.
            after: index of the turn that it continues, if a branch begins with it; -1: none, a conversation begins.
                None: it continues the turn before it.
        """
        if after is None or after == self._turn:
            self._back = 1
        else:
            self._back = self._turn + 1 - after if after >= 0 else 0
        n = len(token_ids)
        return self._append(
            {
                "token_ids": np.asarray(token_ids, np.int32),
                "action_mask": np.zeros(n, np.uint8),
                "logp_behaviour": np.zeros(n, np.float32),
                "policy_version": np.full(n, -1, np.int32),
            },
            action=False,
        )

    def owe(self, rewards: Mapping[str, float]) -> None:
        """Note the rewards of the present turn, which is repeated. The next `close_turn` returns them."""
        self._owed += [Reward(name, self._turn, value) for name, value in rewards.items()]

    def note_time(self, turn: int, *, waited: float = 0.0, sampled: float = 0.0, tools: float = 0.0) -> None:
        """Add seconds to those of a turn, see `TurnTime`. The next segment that ends a turn has them."""
        known = self._times.setdefault(turn, [0.0, 0.0, 0.0])
        # A clock that goes wrong must not make a segment that no broker takes.
        self._times[turn] = [
            before + max(0.0, more) for before, more in zip(known, (waited, sampled, tools), strict=True)
        ]

    def act(self, sampled: Sampled) -> list[SegmentArrays]:
        """Append tokens to the current action turn, or begin one with them."""
        self._generator = sampled.generator or self._generator
        self._kv = "kept" if sampled.kv == "kept" else self._kv
        arrays = {**sampled.arrays, "action_mask": np.ones(len(sampled), np.uint8)}
        return self._append(arrays, action=True, routes=sampled.routes)

    def close_turn(
        self,
        rewards: dict[str, float],
        stop_reason: str = "",
        closing: Closing | None = None,
        marks: Mapping[str, str | float] | None = None,
        earlier: Sequence[Reward] = (),
    ) -> list[SegmentArrays]:
        """End the action turn. Return its last piece, with its rewards, marks, and the trajectory's end if any.

        Args:
            earlier: rewards of turns before.
        """
        assert self._turn_is_action, "only an action turn is closed"
        own = [Reward(name, self._turn, value) for name, value in rewards.items()]
        named, self._owed = [*self._owed, *earlier, *own], []
        marked = [TurnMark(name, self._turn, value) for name, value in (marks or {}).items()]
        end = closing or Closing("unfinished", stop_reason)
        times = self._take_times()
        cuts = [*self._cut_rows(), self._cut_segment(self._pending_tokens, named, end, marked, times)]
        self._turn_is_action = False
        return cuts

    def abandon(self, closing: Closing) -> list[SegmentArrays]:
        """End the trajectory at its last token. The segment returned may be empty."""
        times = self._take_times()
        return [*self._cut_rows(), self._cut_segment(self._pending_tokens, [], closing, times=times)]

    def _take_times(self) -> list[TurnTime]:
        """Return and remove the seconds that no segment has yet, in the order of the turns, to the microsecond."""
        taken = [
            TurnTime(turn, *(round(value, 6) for value in seconds))
            for turn, seconds in sorted(self._times.items())[:MAX_ITEMS]
            if any(seconds)
        ]
        self._times = {}
        return taken

    def _cut_rows(self) -> list[SegmentArrays]:
        """Return segments without tokens, with the rows of experts for which the next segment has no room."""
        cuts = []
        while self._routes.waits(self.tokens):
            cuts.append(self._cut_segment(0, [], Closing("unfinished")))
        return cuts

    def _append(self, arrays: Arrays, *, action: bool, routes: Routes | None = None) -> list[SegmentArrays]:
        assert not self.closed, f"trajectory {self._trajectory_id} is closed"
        n = len(arrays["token_ids"])
        if n == 0:
            return []
        if self._turn < 0 or action != self._turn_is_action or not action:
            self._turn += 1
            self._turn_is_action = action
        self._note_turn(self.tokens, self.tokens + n, action)
        self._pending.append(arrays)
        self._pending_tokens += n
        if routes is not None:
            self._routes.add_routes(self._turn, routes)
            self._limit = min(self._limit, self._routes.most_tokens)
        cuts = []
        # A full segment waits until more tokens come, so that the last piece of a turn is never empty.
        while self._pending_tokens > self._limit:
            cuts.append(self._cut_segment(self._limit, [], Closing("unfinished")))
        return cuts

    def _note_turn(self, start: int, end: int, action: bool) -> None:
        back = 1 if action else self._back
        self._routes.note_tokens(self._turn, start, end, before=self._turn - back if back else -1)
        last = self._turns[-1] if self._turns else None
        if last is not None and last.index == self._turn:
            self._turns[-1] = replace(last, end=end)
        else:
            self._turns.append(Turn(self._turn, start, end, action, back))

    def _cut_segment(
        self,
        n: int,
        rewards: list[Reward],
        closing: Closing,
        marks: Sequence[TurnMark] = (),
        times: Sequence[TurnTime] = (),
    ) -> SegmentArrays:
        assert not self.closed, f"trajectory {self._trajectory_id} is closed"
        arrays = self._take_pending(n)
        versions = arrays["policy_version"][arrays["action_mask"] == 1]
        segment = Segment(
            trajectory_id=self._trajectory_id,
            task_id=self._task.task_id,
            group_id=self._task.group_id,
            group_size=self._task.group_size,
            index=self._index,
            offset=self.offset,
            tokens=n,
            action_tokens=len(versions),
            status=closing.status,
            stop_reason=closing.stop_reason,
            env=self._task.env,
            purpose=self._task.purpose,
            version_min=int(versions.min()) if len(versions) else -1,
            version_max=int(versions.max()) if len(versions) else -1,
            turns=self._take_turns(self.offset + n),
            rewards=rewards,
            temperature=self._task.sampling.temperature,
            kv=self._kv,
            generator=self._generator,
            error=closing.error,
            extra=closing.extra,
            failure=closing.failure,
            auxiliary=list(closing.auxiliary),
            marks=list(marks),
            times=list(times),
            policy=self._task.policy,
        )
        arrays |= self._routes.take_routes(self.offset + n)
        self._index += 1
        self.offset += n
        self.closed = closing.status != "unfinished"
        return SegmentArrays(segment, arrays)

    def _take_pending(self, n: int) -> Arrays:
        whole: Arrays = {
            name: np.concatenate([np.empty(0, dtype), *(arrays[name] for arrays in self._pending)])
            for name, dtype in TOKEN_ARRAYS.items()
        }
        assert n <= len(whole["token_ids"]) == self._pending_tokens
        self._pending_tokens -= n
        self._pending = [{name: array[n:] for name, array in whole.items()}] if self._pending_tokens else []
        return {name: array[:n] for name, array in whole.items()}

    def _take_turns(self, end: int) -> list[Turn]:
        """Remove and return the turns before token ``end``. A turn that goes on is split there."""
        taken = [replace(t, end=min(t.end, end)) for t in self._turns if t.start < end]
        self._turns = [replace(t, start=max(t.start, end)) for t in self._turns if t.end > end]
        return taken
