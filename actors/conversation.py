"""The conversations of one episode as tokens: which turn continues which, and what new messages add. Pure."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from envs.base import ChatMessage, ToolSchema
from protocol.messages.episodes import Sampling


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


class Text(Protocol):
    """Converter between text and tokens: a `Renderer`, or a toy in a test."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> list[int]: ...
    def observation(
        self, messages: Sequence[ChatMessage], sampled: Sequence[int], tools: Sequence[ToolSchema] = ()
    ) -> list[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str: ...
    def with_known_calls(self, answer: str) -> str: ...
    def check_prefix(self, known: Sequence[int], prompt: Sequence[int]) -> None: ...


class Observation(NamedTuple):
    """Tokens that the environment adds to the trajectory."""

    token_ids: list[int]
    after: int
    """Turn that they continue; -1: none."""
    tools: Sequence[ToolSchema] = ()
    """Schemas of the tools of their conversation."""


class Conversations:
    """The turns of an episode, each with the tools of its conversation.

    Args:
        text: renders messages.
        sampling: has the bounds on tokens.
    """

    def __init__(self, text: Text, sampling: Sampling) -> None:
        self._text = text
        self._tree = TurnTree()
        self._tools_after: dict[int, Sequence[ToolSchema]] = {}
        self.bound = "max_context_tokens" if sampling.max_context_tokens else "max_trajectory_tokens"
        """Setting that bounds a branch."""
        self.longest = sampling.max_context_tokens or sampling.max_trajectory_tokens
        """Most tokens of a branch."""

    @property
    def answers(self) -> list[int]:
        """Turns that the policy sampled, in order."""
        return self._tree.answers

    def first(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> Observation:
        """Return the first prompt."""
        return Observation(self._text.prompt(messages, tools), -1, tools)

    def opening(self, text: str) -> list[int]:
        """Return the tokens with which an answer begins."""
        return self._text.encode(text)

    def anew(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] | None = None) -> Observation:
        """Return the prompt of a new conversation, or what is new of it if it goes on where an earlier one was.

        Args:
            tools: None: those of the first conversation.
        """
        tools = self._tools_after[0] if tools is None else tools
        prompt = self._text.prompt(messages, tools)
        turn = self._tree.begun(prompt)
        return Observation(prompt[len(self._tree.context(turn)) :], turn, tools)

    def behind(self, turn: int, messages: Sequence[ChatMessage]) -> Observation:
        """Return what messages add behind an answer."""
        tools = self._tools_after[turn]
        return Observation(self._text.observation(messages, self._tree.tokens(turn), tools), turn, tools)

    def length(self, observation: Observation) -> int:
        """Return the number of tokens of a branch that ends with an observation."""
        return self._tree.length(observation.after) + len(observation.token_ids)

    def too_long(self, observation: Observation) -> bool:
        """Return whether a branch would have no room for an answer."""
        return self.length(observation) >= self.longest

    def context(self, observation: Observation) -> list[int]:
        """Return the tokens of a branch that ends with an observation."""
        return [*self._tree.context(observation.after), *observation.token_ids]

    def check_prefix(self, known: Sequence[int], prompt: Sequence[int]) -> None:
        """Raise PrefixBroken, which names the first difference, unless ``prompt`` begins with ``known``."""
        self._text.check_prefix(known, prompt)

    def observed(self, turn: int, observation: Observation) -> None:
        """Note the turn of an observation."""
        self._tree.add(turn, observation.token_ids, after=observation.after)
        self._tools_after[turn] = observation.tools

    def routed(self, turn: int) -> int:
        """Return the first token of a turn's context whose experts are not known; 0 for -1."""
        return self._tree.routed(turn)

    def answered(self, turn: int, token_ids: list[int], *, after: int, routed: int = 0) -> None:
        """Note an answer behind the turn ``after``.

        Args:
            routed: first token of its context whose experts are not known.
        """
        self._tree.add(turn, token_ids, after=after, answer=True, routed=routed)
        self._tools_after[turn] = self._tools_after[after]
