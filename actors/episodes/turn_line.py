"""Puts turns that are sampled at the same time into one order, as a trajectory is one array of tokens. Pure.

    sampled     A  ###############        trajectory   prompt A ############### prompt B ###### prompt C ########
    over time   B      ######
                C            ########

The order is that of the first tokens. The first turn that has not ended is written while it is sampled, and those
behind it are kept until it ends. A turn begins only after the answer that it continues, so it stands behind it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actors.sampled import Sampled
from actors.segments import Closing, SegmentCutter
from protocol.arrays import SegmentArrays
from protocol.messages.segments import Reward


@dataclass
class _Turn:
    prompt: list[int]
    """Tokens in front of the answer that are in no earlier turn."""
    after: int
    pieces: list[Sampled] = field(default_factory=list)
    """What was sampled, and is not written yet."""
    reason: str = ""
    ended: bool = False
    left: bool = False
    written: bool = False
    """Whether its prompt is written."""
    index: int = -1
    """Index of the answer in the trajectory, once it is written."""


class TurnLine:
    """The turns of one trajectory, by the numbers of their requests.

    Args:
        cutter: gets the turns in their order.

    Example:
        >>> import numpy as np
        >>> from protocol.messages.tasks import Task
        >>> def some(n): return Sampled(np.full(n, n, "i4"), np.zeros(n, "f4"), np.zeros(n, "i4"))
        >>> line = TurnLine(SegmentCutter(Task(task_id="t", env="e", group_id="g", group_size=1), "t.0", 64))
        >>> line.add(0, [8], after=-1); line.add(1, [9, 9], after=-1)
        >>> [line.act(0, some(1)), line.act(1, some(2)), line.end(1, "stop")]
        [[], [], []]
        >>> [cut.arrays["token_ids"].tolist() for cut in [*line.end(0, "stop"), *line.close({}, Closing("finished"))]]
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
    def left(self) -> list[int]:
        """Numbers of the requests whose answers nobody got."""
        return [number for number in self._order if self._turns[number].left]

    @property
    def unended(self) -> list[int]:
        """Numbers of the requests with tokens whose answers have not ended."""
        return [number for number in self._order if not self._turns[number].ended]

    def add(self, number: int, prompt: list[int], *, after: int) -> None:
        """Note a request. It gets its place with its first token.

        Args:
            prompt: tokens in front of its answer that are in no earlier turn, at least one.
            after: number of the request whose answer they continue; -1: none.
        """
        assert prompt, "a turn without a prompt has no place of its own"
        self._turns[number] = _Turn(prompt, after)

    def act(self, number: int, sampled: Sampled) -> list[SegmentArrays]:
        """Append tokens to an answer. Return the segments that are full."""
        turn = self._turns[number]
        assert not turn.ended, f"the turn of request {number} has ended"
        if not len(sampled):
            return []
        if number not in self._order:
            self._order.append(number)
        turn.pieces.append(sampled)
        return self._write()

    def end(self, number: int, reason: str) -> list[SegmentArrays]:
        """End an answer. Return the segments that are full."""
        turn = self._turns[number]
        turn.reason, turn.ended = reason, True
        return self._write()

    def leave(self, number: int) -> list[SegmentArrays]:
        """End an answer that nobody gets, wherever it stands. Return the segments that are full."""
        turn = self._turns.get(number)
        if turn is None:
            return []
        turn.left = True
        return [] if turn.ended else self.end(number, "left")

    def close(
        self, rewards: Mapping[str, float], closing: Closing, earlier: Sequence[Reward] = ()
    ) -> list[SegmentArrays]:
        """Return the last segment. All turns have ended, and at least one has tokens."""
        assert all(self._turns[number].ended for number in self._order), "a turn has not ended"
        return self._cutter.close_turn(dict(rewards), self.last_reason, closing, earlier=earlier)

    @property
    def last_reason(self) -> str:
        """Why the last turn ended."""
        return self._turns[self._order[-1]].reason

    def _write(self) -> list[SegmentArrays]:
        cuts: list[SegmentArrays] = []
        while self._at < len(self._order):
            turn = self._turns[self._order[self._at]]
            if not turn.written:
                cuts += self._begin(turn)
            for piece in turn.pieces:
                cuts += self._cutter.act(piece)
            turn.pieces = []
            if not turn.ended or self._at + 1 == len(self._order):
                break
            self._at += 1
        return cuts

    def _begin(self, turn: _Turn) -> list[SegmentArrays]:
        """Write a prompt, behind the end of the turn before it."""
        cuts: list[SegmentArrays] = []
        if self._at:
            cuts += self._cutter.close_turn({}, self._turns[self._order[self._at - 1]].reason)
        cuts += self._cutter.observe(turn.prompt, self._turns[turn.after].index if turn.after >= 0 else -1)
        turn.written, turn.index = True, self._cutter.turn + 1
        turn.prompt = []
        return cuts
