"""Says which answer of the policy a request of an agent follows, and which of its messages are new. Pure.

The requests of an episode form trees. A request mostly continues the last answer. It follows an earlier answer if the
agent went back to it, and none if the agent began anew: with a title, a sub-agent, a summary or a window of messages.
What the policy sampled keeps its tokens, however it was spelled on its way back (`envs.agent.history`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, Literal, TypeVar

from envs.agent.history import canonical, spelled

Trained = Literal["tools", "main", "all"]
"""Which answers of an episode are trained."""
Sent = TypeVar("Sent", bound=Mapping[str, Any])


@dataclass(frozen=True)
class Following(Generic[Sent]):
    """Where a request stands."""

    after: int
    """Number of the answer that it follows; -1: none."""
    new: list[Sent]
    """The messages behind this answer."""


@dataclass
class _Answer:
    tools: str
    """Tools of its request."""
    messages: int
    """Number of messages of its request."""
    continued: bool = False


class MessageTree:
    """The answers of one episode, each behind the messages of its request.

    Example:
        >>> tree = MessageTree()
        >>> ask = [{"role": "user", "content": "2 + 2?"}]
        >>> tree.place(ask, tools=[]).after
        -1
        >>> tree.answered({"role": "assistant", "content": "4"})
        >>> told = [*ask, {"role": "assistant", "content": " 4\\n"}, {"role": "user", "content": "Sure?"}]
        >>> tree.place(told, tools=[])
        Following(after=0, new=[{'role': 'user', 'content': 'Sure?'}])
        >>> tree.place([{"role": "user", "content": "Write a title."}], tools=[]).after
        -1
    """

    def __init__(self) -> None:
        self._answers: list[_Answer] = []
        self._behind: dict[bytes, list[int]] = {}
        """Answers by the hash of their tools and of all messages up to them."""
        self._request: tuple[list[Mapping[str, Any]], str] | None = None

    def __len__(self) -> int:
        return len(self._answers)

    def place(self, messages: Sequence[Sent], tools: Sequence[Any]) -> Following[Sent]:
        """Return where a request stands, and note it as the one that is answered next.

        It follows the answer with the longest conversation that its messages begin with, if its tools are the same.
        Of equal answers it follows one that nothing follows yet, the last of these. A request whose new messages
        contain one of the assistant begins anew, because chat templates write such a message as part of a prompt.
        """
        kind = spelled(tools)
        hashes = _hashes(messages, kind)
        after, begin = -1, 0
        for length in range(len(messages) - 1, 0, -1):
            if found := self._behind.get(hashes[length]):
                after, begin = max(found, key=lambda n: (not self._answers[n].continued, n)), length
                break
        new = list(messages[begin:])
        if after >= 0 and any(message["role"] == "assistant" for message in new):
            after, new = -1, list(messages)
        if after >= 0:
            self._answers[after].continued = True
        self._request = (list(messages), kind)
        return Following(after, new)

    def answered(self, message: Mapping[str, Any]) -> None:
        """Note the answer to the request that was placed last."""
        assert self._request is not None, "no request was placed"
        messages, kind = self._request
        self._request = None
        self._behind.setdefault(_hashes([*messages, message], kind)[-1], []).append(len(self._answers))
        self._answers.append(_Answer(kind, len(messages)))

    def auxiliary(self, trained: Trained) -> list[int]:
        """Return the answers that are not to be trained.

        Titles and probes are found by this: agents ask for them without tools.

        Args:
            trained: "tools": answers to requests with tools, if there are any, else all. "main": answers to requests
                with the tools of the longest conversation; of two of one length, the one that ended first. "all".

        Example:
            >>> tree = MessageTree()
            >>> for tools in ([], [{"name": "add"}]):
            ...     _ = tree.place([{"role": "user", "content": "2 + 2?"}], tools)
            ...     tree.answered({"role": "assistant", "content": "4"})
            >>> tree.auxiliary("tools"), tree.auxiliary("all")
            ([0], [])
        """
        if trained == "all" or not self._answers:
            return []
        none = spelled([])
        main = max(self._answers, key=lambda answer: (answer.tools != none, answer.messages)).tools
        if main == none:
            return []
        wanted = {main} if trained == "main" else {a.tools for a in self._answers} - {none}
        return [number for number, answer in enumerate(self._answers) if answer.tools not in wanted]


def _hashes(messages: Sequence[Mapping[str, Any]], kind: str) -> list[bytes]:
    """Return the hash of the tools and of each beginning of the messages, from none of them to all."""
    running = blake2b(kind.encode(errors="surrogatepass"), digest_size=16)
    hashes = [running.digest()]
    for message in messages:
        running.update(b"\0" + repr(canonical(message)).encode(errors="surrogatepass"))
        hashes.append(running.digest())
    return hashes
