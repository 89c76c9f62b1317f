"""Says which answer of the policy a request of an agent follows, and which of its messages are new. Pure.

Messages are compared in a form that does not change with the way in which an agent writes them again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Generic, Literal, TypeVar

from envs.messages import text_of

Canonical = tuple[str, str, tuple[tuple[str, str], ...]]
"""Role, text, and the name and arguments of each tool call."""


def canonical(message: Mapping[str, Any]) -> Canonical:
    """Return the form in which messages are compared.

    Example:
        >>> call = {"id": "1", "function": {"name": "add", "arguments": '{"b":7,  "a": 12}'}}
        >>> canonical({"role": "assistant", "content": None, "tool_calls": [call]})
        ('assistant', '', (('add', '{"a": 12, "b": 7}'),))
        >>> canonical({"role": "user", "content": [{"type": "text", "text": " Hi"}]})
        ('user', 'Hi', ())
    """
    calls = message.get("tool_calls") or ()
    functions = [call.get("function", {}) for call in calls]
    return (
        str(message["role"]),
        text_of(message.get("content")).strip(),
        tuple((str(f.get("name", "")), _arguments(f.get("arguments"))) for f in functions),
    )


def _arguments(arguments: Any) -> str:
    """Return arguments, which are JSON or a map, in one spelling; as they are if they are not JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            return str(arguments).strip()
    try:
        return spelled(_value(arguments or {}))
    except RecursionError:
        return repr(type(arguments))


def _value(value: Any) -> Any:
    """Return a JSON value in which equal numbers are equal: other languages have one type for all of them.

    Example:
        >>> _value({"x": [1.0, True, 2**60]}) == _value({"x": [1, True, float(2**60)]})
        True
    """
    if isinstance(value, dict):
        return {key: _value(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_value(part) for part in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except OverflowError:
        return value
    return int(number) if number.is_integer() else number


def spelled(value: Any) -> str:
    """Return a JSON value as text; equal values have equal texts."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


Trained = Literal["tools", "main", "all"]
"""Choice of the answers of an episode that are trained."""
Sent = TypeVar("Sent", bound=Mapping[str, Any])


@dataclass(frozen=True)
class Following(Generic[Sent]):
    """Where a request stands."""

    after: int
    """Number of the request whose answer it follows; -1: none."""
    new: list[Sent]
    """The messages behind this answer."""
    number: int
    """Its own number."""


@dataclass
class _Request:
    tools: str
    messages: list[Mapping[str, Any]]
    """Its messages; none once it is answered."""
    length: int
    """Number of its messages."""
    after: int
    continued: bool = False
    """True if a request follows its answer."""


class MessageTree:
    """The requests of one episode, numbered from 0 in the order in which they come, and the answers to them.

    Several requests may wait for their answers at a time. Those that are refused never get one.

    Example:
        >>> tree = MessageTree()
        >>> ask = [{"role": "user", "content": "2 + 2?"}]
        >>> tree.place(ask, tools=[]).after
        -1
        >>> tree.answered(0, {"role": "assistant", "content": "4"})
        >>> told = [*ask, {"role": "assistant", "content": " 4\\n"}, {"role": "user", "content": "Sure?"}]
        >>> tree.place(told, tools=[])
        Following(after=0, new=[{'role': 'user', 'content': 'Sure?'}], number=1)
        >>> tree.place([{"role": "user", "content": "Write a title."}], tools=[]).after
        -1
    """

    def __init__(self) -> None:
        self._requests: list[_Request] = []
        self._behind: dict[bytes, list[int]] = {}
        """Answered requests by the hash of their tools and of all messages up to the answer."""
        self.answers: list[int] = []
        """Numbers of the requests that were answered, in the order of the answers."""

    @property
    def placed(self) -> int:
        """Number of requests."""
        return len(self._requests)

    @property
    def unanswered(self) -> list[int]:
        """Numbers of the requests without an answer. What was sampled for them reached nobody."""
        return sorted(set(range(self.placed)) - set(self.answers))

    def place(self, messages: Sequence[Sent], tools: Sequence[Any]) -> Following[Sent]:
        """Note a request. Return where it stands.

        It follows the answer with the longest conversation that its messages begin with, if its tools are the same.
        Of equal answers it follows one that nothing follows yet, the last of these. A request whose new messages
        contain one of the assistant begins anew, because chat templates write such a message as part of a prompt.
        """
        kind = spelled(tools)
        hashes = _hashes(messages, kind)
        after, begin = -1, 0
        for length in range(len(messages) - 1, 0, -1):
            if found := self._behind.get(hashes[length]):
                after, begin = max(found, key=lambda n: (not self._requests[n].continued, n)), length
                break
        new = list(messages[begin:])
        if after >= 0 and any(message["role"] == "assistant" for message in new):
            after, new = -1, list(messages)
        if after >= 0:
            self._requests[after].continued = True
        self._requests.append(_Request(kind, list(messages), len(messages), after))
        return Following(after, new, len(self._requests) - 1)

    def resumes(self, number: int, declined: int) -> bool:
        """Return whether a new request asks again in the place of one that was declined.

        It follows the same answer, or begins anew with the same first message, as a shorter conversation does.

        Example:
            >>> tree = MessageTree()
            >>> for text in ("Be brief.", "Be brief.", "Write a title."):
            ...     _ = tree.place([{"role": "system", "content": text}], tools=[])
            >>> tree.resumes(1, 0), tree.resumes(2, 0)
            (True, False)
        """
        new, old = self._requests[number], self._requests[declined]
        if new.after >= 0:
            return new.after == old.after
        first, before = [list(map(canonical, request.messages[:1])) for request in (new, old)]
        return new.tools == old.tools and first == before

    def messages(self, number: int) -> list[Mapping[str, Any]]:
        """Return the messages of a request that waits for its answer."""
        return list(self._requests[number].messages)

    def answered(
        self, number: int, message: Mapping[str, Any], seen: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Note the answer to a request.

        Args:
            seen: the messages that the agent knows of, behind which it will send this answer; None: the request's.
        """
        request = self._requests[number]
        behind = _hashes([*(request.messages if seen is None else seen), message], request.tools)[-1]
        self._behind.setdefault(behind, []).append(number)
        self.answers.append(number)
        request.messages = []

    def auxiliary(self, trained: Trained) -> list[int]:
        """Return the numbers of the requests whose answers are not to be trained.

        Titles and probes are found by this: agents ask for them without tools.

        Args:
            trained: "tools": answers to requests with tools, if there are any, else all. "main": answers to requests
                with the tools of the longest conversation; of two of one length, the one that ended first. "all".

        Example:
            >>> tree = MessageTree()
            >>> for number, tools in enumerate(([], [{"name": "add"}])):
            ...     _ = tree.place([{"role": "user", "content": "2 + 2?"}], tools)
            ...     tree.answered(number, {"role": "assistant", "content": "4"})
            >>> tree.auxiliary("tools"), tree.auxiliary("all")
            ([0], [])
        """
        if trained == "all" or not self.answers:
            return []
        none, answered = spelled([]), [self._requests[number] for number in self.answers]
        main = max(answered, key=lambda request: (request.tools != none, request.length)).tools
        if main == none:
            return []
        wanted = {main} if trained == "main" else {request.tools for request in answered} - {none}
        return [number for number in self.answers if self._requests[number].tools not in wanted]


def _hashes(messages: Sequence[Mapping[str, Any]], kind: str) -> list[bytes]:
    """Return the hash of the tools and of each beginning of the messages, from none of them to all."""
    running = blake2b(kind.encode(errors="surrogatepass"), digest_size=16)
    hashes = [running.digest()]
    for message in messages:
        running.update(b"\0" + repr(canonical(message)).encode(errors="surrogatepass"))
        hashes.append(running.digest())
    return hashes
