"""What became of every segment and token that reached the broker."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from broker.core.records import Outcome, StoredSegment

OUTCOMES: dict[Outcome, str] = {
    "trained": "committed by the learner: entered a gradient",
    "dropped": "committed by the learner: filtered out or evaluated",
    "stale": "all tokens older than max_policy_lag when delivery was due",
    "superseded": "of an attempt whose actor was lost before the trajectory was closed, or of a lineage that has ended",
    "late": "of a trajectory that was open when its group's deadline passed",
    "given_up": "of a group too few of whose members were ever closed",
    "too_large": "of a unit that does not fit into one message",
    "damaged": "of a unit whose bytes in the journal cannot be read any more",
    "poison": "of a unit that several learner processes in a row were given and did not survive",
}


@dataclass
class Tally:
    """Segments and their tokens, counted together."""

    segments: int = 0
    tokens: int = 0
    action_tokens: int = 0

    def add(self, stored: StoredSegment) -> None:
        self.segments += 1
        self.tokens += stored.tokens
        self.action_tokens += stored.action_tokens

    def add_all(self, segments: Sequence[StoredSegment]) -> None:
        for stored in segments:
            self.tokens += stored.tokens
            self.action_tokens += stored.action_tokens
        self.segments += len(segments)

    def remove(self, stored: StoredSegment) -> None:
        self.segments -= 1
        self.tokens -= stored.tokens
        self.action_tokens -= stored.action_tokens


@dataclass
class Lengths:
    """Lengths of closed training trajectories, in action tokens: of all, and of those that were trained.

    What is dropped as stale, filtered or given up is seldom dropped blindly: when it is the long answers, the policy
    learns to be short. Lengths from 1,000 on are kept to three digits, so that there are never many.

    Example:
        >>> lengths = Lengths()
        >>> for tokens in (10, 10, 20, 40): lengths.closed(tokens)
        >>> for tokens in (10, 10): lengths.trained(tokens)
        >>> lengths.bias_tokens, lengths.distance_tokens
        (-10.0, 10.0)
        >>> lengths.trained(10, -1); lengths.trained(20); lengths.trained(40); lengths.trained(10)
        >>> lengths.bias_tokens, lengths.distance_tokens
        (0.0, 0.0)
    """

    all: dict[int, int] = field(default_factory=dict)
    of_trained: dict[int, int] = field(default_factory=dict)

    def closed(self, tokens: int) -> None:
        """A trajectory has ended."""
        _count(self.all, tokens, 1)

    def trained(self, tokens: int, times: int = 1) -> None:
        """A trajectory, or its last window, entered a gradient; -1: it did not, after all."""
        _count(self.of_trained, tokens, times)

    @property
    def bias_tokens(self) -> float:
        """Mean length of what was trained minus that of all, in tokens; below 0: long ones are lost."""
        if not self.of_trained:
            return 0.0
        return _mean(self.of_trained) - _mean(self.all)

    @property
    def distance_tokens(self) -> float:
        """Wasserstein-1 distance of the two distributions, in tokens."""
        if not self.of_trained:
            return 0.0
        total, trained = sum(self.all.values()), sum(self.of_trained.values())
        distance, gap, before = 0.0, 0.0, 0
        for tokens in sorted(self.all.keys() | self.of_trained.keys()):
            distance += abs(gap) * (tokens - before)
            gap += self.all.get(tokens, 0) / total - self.of_trained.get(tokens, 0) / trained
            before = tokens
        return distance


def _count(counts: dict[int, int], tokens: int, times: int) -> None:
    key = tokens if tokens < 1000 else _three_digits(tokens)
    counts[key] = counts.get(key, 0) + times
    if times < 0 and not counts[key]:
        del counts[key]


@lru_cache(maxsize=4_096)
def _three_digits(tokens: int) -> int:
    return int(float(f"{tokens:.3g}"))


def _mean(counts: dict[int, int]) -> float:
    return sum(tokens * count for tokens, count in counts.items()) / sum(counts.values())


@dataclass
class Ledger:
    """Sums that must close: what was stored is held or has exactly one outcome.

    Example:
        >>> ledger = Ledger()
        >>> ledger.stored.add(StoredSegment(("t.0", 0), 5, 2, 1, 100))
        >>> ledger.held_tokens
        5
        >>> ledger.note_outcome("trained", StoredSegment(("t.0", 0), 5, 2, 1, 100)); ledger.held_tokens
        0
    """

    stored: Tally = field(default_factory=Tally)
    delivered: Tally = field(default_factory=Tally)
    redelivered: Tally = field(default_factory=Tally)
    rolled_back: Tally = field(default_factory=Tally)
    """Committed, and given back to a learner whose checkpoint was older; outside the sums."""
    outcomes: dict[Outcome, Tally] = field(default_factory=lambda: {name: Tally() for name in OUTCOMES})
    replayed_tokens: int = 0
    """Action tokens trained once more, after they were settled as trained; outside the sums."""
    lengths: Lengths = field(default_factory=Lengths)
    duplicate_segments: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)

    @property
    def held_tokens(self) -> int:
        """Tokens that should be in the store now."""
        return self.stored.tokens - sum(tally.tokens for tally in self.outcomes.values())

    @property
    def held_segments(self) -> int:
        """Segments that should be in the store now."""
        return self.stored.segments - sum(tally.segments for tally in self.outcomes.values())

    def note_outcome(self, outcome: Outcome, *segments: StoredSegment) -> None:
        """These pieces have left the broker for good."""
        self.outcomes[outcome].add_all(segments)

    def undo_outcome(self, outcome: Outcome, stored: StoredSegment) -> None:
        """It comes back: the step that had it is no part of the lineage any more."""
        self.outcomes[outcome].remove(stored)
        self.rolled_back.add(stored)

    def difference(self, segments: Iterable[StoredSegment]) -> str:
        """What is wrong, if what is held are not the tokens that the sums say; "" if they are."""
        tokens = sum(stored.tokens for stored in segments)
        if tokens == self.held_tokens:
            return ""
        outcomes = {name: tally.tokens for name, tally in self.outcomes.items() if tally.tokens}
        return (
            f"{tokens} tokens are held, but {self.stored.tokens} were stored and {outcomes} settled, which leaves "
            f"{self.held_tokens}: {tokens - self.held_tokens:+d}"
        )

    def miscount(self, held: int) -> str:
        """What is wrong, if so many segments are not what the sums say; "" if they are."""
        wanted = self.held_segments
        return "" if held == wanted else f"{held} segments are held, the sums leave {wanted}"

    def refuse(self, code: str) -> None:
        """Count a refusal by its code."""
        self.refused[code] = self.refused.get(code, 0) + 1

    def task(self, event: str, count: int = 1) -> None:
        """Count what happened to tasks: put, leased, lost, given_up, closed, cancelled."""
        self.tasks[event] = self.tasks.get(event, 0) + count
