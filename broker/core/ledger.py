"""The outcome of every segment and token that reached the broker."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from broker.core.records import Outcome, StoredSegment

OUTCOMES: dict[Outcome, str] = {
    "trained": "tokens that entered a gradient",
    "dropped": "tokens that the learner filtered out or evaluated",
    "stale": "tokens of units that were older than max_policy_lag when their delivery was due",
    "superseded": "tokens of attempts that were lost before their end, or of lineages that have ended",
    "late": "tokens of trajectories that were open when their group's deadline passed",
    "given_up": "tokens of groups of which too few members ended",
    "too_large": "tokens of units that do not fit into one message",
    "damaged": "tokens of units whose bytes in the journal cannot be read any more",
    "poison": "tokens of units that several learner processes in a row did not survive",
    "lost": "tokens of units that were trained or dropped in steps that a learner undid after their release",
}
"""Meaning of each outcome of a token."""


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

    def move(self, other: "Tally", *, segments: int, tokens: int, action_tokens: int) -> None:
        """Move segments and tokens to another tally."""
        for tally, sign in ((self, -1), (other, 1)):
            tally.segments += sign * segments
            tally.tokens += sign * tokens
            tally.action_tokens += sign * action_tokens

    def remove(self, stored: StoredSegment) -> None:
        self.segments -= 1
        self.tokens -= stored.tokens
        self.action_tokens -= stored.action_tokens


@dataclass
class Lengths:
    """Lengths of closed training trajectories, in action tokens: of all, and of those that were trained.

    Trajectories that are dropped as stale, filtered or given up are seldom a random sample. If mostly long
    answers are dropped, the policy learns to be short. Lengths from 1,000 on are rounded to three digits, so
    that there are never many different ones.

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
        """Count a trajectory that has ended."""
        _count(self.all, tokens, 1)

    def trained(self, tokens: int, times: int = 1) -> None:
        """Count a trajectory that entered a gradient with its last window; ``times`` = -1 undoes that."""
        _count(self.of_trained, tokens, times)

    @property
    def bias_tokens(self) -> float:
        """Mean length of trained trajectories minus mean of all, in tokens. Below 0: long ones are lost."""
        if not self.of_trained:
            return 0.0
        return _mean(self.of_trained) - _mean(self.all)

    @property
    def distance_tokens(self) -> float:
        """Wasserstein-1 distance between the two distributions of lengths, in tokens."""
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
    """Sums that must close: every stored segment is held or has exactly one outcome.

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
    """Segments whose commit was undone, because the learner's checkpoint was older; outside the sums."""
    outcomes: dict[Outcome, Tally] = field(default_factory=lambda: {name: Tally() for name in OUTCOMES})
    replayed_tokens: int = 0
    """Action tokens trained again after they were committed as trained; outside the sums."""
    lengths: Lengths = field(default_factory=Lengths)
    duplicate_segments: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)

    @property
    def held_tokens(self) -> int:
        """Tokens that should be held now, according to the sums."""
        return self.stored.tokens - sum(tally.tokens for tally in self.outcomes.values())

    @property
    def held_segments(self) -> int:
        """Segments that should be held now, according to the sums."""
        return self.stored.segments - sum(tally.segments for tally in self.outcomes.values())

    def note_outcome(self, outcome: Outcome, *segments: StoredSegment) -> None:
        """Count the outcome of these segments."""
        self.outcomes[outcome].add_all(segments)

    def undo_outcome(self, outcome: Outcome, stored: StoredSegment) -> None:
        """Undo the outcome of a segment, because the step that had it is not part of the lineage any more."""
        self.outcomes[outcome].remove(stored)
        self.rolled_back.add(stored)

    def difference(self, segments: Iterable[StoredSegment]) -> str:
        """Return how the tokens of the held segments differ from the sums, or ""."""
        tokens = sum(stored.tokens for stored in segments)
        if tokens == self.held_tokens:
            return ""
        outcomes = {name: tally.tokens for name, tally in self.outcomes.items() if tally.tokens}
        return (
            f"{tokens} tokens are held, but {self.stored.tokens} were stored and {outcomes} have an outcome, "
            f"which leaves {self.held_tokens}: {tokens - self.held_tokens:+d}"
        )

    def miscount(self, held: int) -> str:
        """Return how the number of held segments differs from the sums, or ""."""
        wanted = self.held_segments
        return "" if held == wanted else f"{held} segments are held, the sums leave {wanted}"

    def refuse(self, code: str) -> None:
        """Count a refusal by its code."""
        self.refused[code] = self.refused.get(code, 0) + 1

    def task(self, event: str, count: int = 1) -> None:
        """Count an event: a task was put, leased, lost, given_up, closed or cancelled, or a peer was lost."""
        self.tasks[event] = self.tasks.get(event, 0) + count
