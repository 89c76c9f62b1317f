"""The tokens of a trajectory's turns, of which each continues an earlier one. Pure."""

from collections.abc import Sequence


class TurnTree:
    """Tokens by turn, and for each turn the one that it continues.

    Example:
        >>> tree = TurnTree()
        >>> tree.add(0, [1, 2], after=-1)
        >>> tree.add(1, [3], after=0, answer=True)
        >>> tree.add(2, [4], after=1)
        >>> tree.context(2)
        [1, 2, 3, 4]
        >>> tree.begun([1, 2, 3, 9])
        1
    """

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._tokens: dict[int, list[int]] = {}
        self._ends: dict[int, int] = {}
        self._routed: dict[int, int] = {}
        self.answers: list[int] = []
        """Indices of the action turns, in order."""

    def add(
        self, turn: int, token_ids: list[int], *, after: int, answer: bool = False, routed: int = 0
    ) -> None:
        """Note a turn.

        Args:
            turn: its index in the trajectory.
            token_ids: its tokens.
            after: index of the turn that it continues; -1: none.
            answer: whether the policy sampled it.
            routed: first token of its context whose experts are not known.
        """
        self._routed[turn] = max(routed, self.routed(after))
        self._after[turn], self._tokens[turn] = after, token_ids
        self._ends[turn] = self._ends.get(after, 0) + len(token_ids)
        if answer:
            self.answers.append(turn)

    def tokens(self, turn: int) -> list[int]:
        """Return the tokens of a turn."""
        return self._tokens[turn]

    def routed(self, turn: int) -> int:
        """Return the first token of a turn's context whose experts are not known; 0 for -1."""
        return self._routed.get(turn, 0)

    def length(self, turn: int) -> int:
        """Return the number of tokens of a turn and of all that it continues; 0 for -1."""
        return self._ends.get(turn, 0)

    def context(self, turn: int) -> list[int]:
        """Return the tokens of a turn and of all that it continues, in order; none for -1."""
        way = []
        while turn >= 0:
            way.append(turn)
            turn = self._after[turn]
        return [token for index in reversed(way) for token in self._tokens[index]]

    def begun(self, prompt: Sequence[int]) -> int:
        """Return the action turn whose context is the longest beginning of a prompt, and not all of it; -1: none.

        So a conversation that was written anew with the same tokens goes on where it was.
        """
        best, longest, sent = -1, 0, list(prompt)
        for turn in self.answers:
            end, own = self._ends[turn], self._tokens[turn]
            if not longest < end < len(sent) or sent[end - len(own) : end] != own:
                continue
            if sent[:end] == self.context(turn):
                best, longest = turn, end
        return best
