"""Reads the tool calls in a model's answers, and writes them in a form that every environment knows.

Environments read the forms of `envs.calls`. If these read what the chat template writes, an answer reaches the
environment as it was sampled. Otherwise a reader of the package renderers (optional; it needs neither torch nor
transformers) is tried, and its calls are written as `<tool_call>` with JSON. Readers are tried by a call as the
template writes it. Only texts change: the tokens stay what was sampled.
"""

import importlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Literal, cast

from actors.chat_template import ChatTemplate
from actors.errors import TemplateUnusable
from envs.base import ChatMessage, ToolSchema
from envs.calls import CALL_BEGINS, Call, find_calls

log = logging.getLogger(__name__)

NAME = "look_up_word"
ARGUMENTS: Mapping[str, Any] = {"word": "two words", "count": 7}
OTHER_ARGUMENTS: Mapping[str, Any] = {"word": "one </b> more", "count": 17}
"""Arguments of the second of two calls; they quote a mark."""
TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Looks up words.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "what to look up"},
                "count": {"type": "integer", "description": "number of results"},
            },
            "required": ["word", "count"],
        },
    },
}
_QUESTION: ChatMessage = {"role": "user", "content": "Question"}
_IDS = ("call00000", f"functions.{NAME}:0")
"""Ids of the call. Kimi K2 writes the id in place of the name."""
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_]{4,}\]")
"""A word of markup."""


@dataclass(frozen=True)
class WrittenCall:
    """A call of `NAME` with `ARGUMENTS`, as the template writes it."""

    text: str
    """Text of the answer."""
    twice: str = ""
    """Text of an answer with this call and one with `OTHER_ARGUMENTS`; "" if the template writes one call only."""

    @property
    def mark(self) -> str:
        """Markup with which a call begins; "" if it begins without.

        Example:
            >>> WrittenCall(f"<think></think><|calls|><|call|>{NAME}").mark, WrittenCall(f'{{"name": "{NAME}"}}').mark
            ('<|calls|>', '')
        """
        begin = self.text.partition(NAME)[0].rpartition("</think>")[2]
        found = _MARK.search(begin)
        return found[0] if found else ""

    @property
    def marks(self) -> frozenset[str]:
        """All markup of the answer. Any of it in an answer says that a call was meant, even if the first is left out.

        Example:
            >>> sorted(WrittenCall(f"<think></think><|call|>{NAME}<|end_call|>").marks)
            ['<|call|>', '<|end_call|>']
        """
        return frozenset(_MARK.findall(self.text.rpartition("</think>")[2]))


def written_calls(template: ChatTemplate) -> list[WrittenCall]:
    """Return the call in the forms that a template takes: arguments as a map or as JSON, ids of both kinds.

    Returns:
        An empty list if the template writes no calls.
    """
    found = dict[str, WrittenCall]()
    for name_in_id in _IDS:
        for as_text in (False, True):
            text = _answer_text(template, [_listed(name_in_id, ARGUMENTS, as_text)])
            if NAME in text:
                other = _listed(name_in_id.replace("0", "1"), OTHER_ARGUMENTS, as_text)
                twice = _answer_text(template, [_listed(name_in_id, ARGUMENTS, as_text), other])
                found.setdefault(
                    text, WrittenCall(text, twice if twice.count(NAME) > text.count(NAME) else "")
                )
    return list(found.values())


def _listed(name: str, arguments: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    given = json.dumps(arguments) if as_text else dict(arguments)
    return {"id": name, "type": "function", "function": {"name": NAME, "arguments": given}}


def opens_thought(template: ChatTemplate) -> bool:
    """Return whether a template opens a thought in the prompt, so that an answer begins inside it."""
    try:
        prompt = template.text([_QUESTION], [TOOL], add_generation_prompt=True)
    except TemplateUnusable:
        return False
    return "</think>" not in prompt.rpartition("<think>")[2] and "<think>" in prompt


def _answer_text(template: ChatTemplate, calls: Sequence[Mapping[str, Any]]) -> str:
    """Return what a template writes for an answer with calls, without its end token; "" if it refuses them."""
    answer = cast(ChatMessage, {"role": "assistant", "content": "", "tool_calls": list(calls)})
    try:
        whole = template.text([_QUESTION, answer], [TOOL])
        text = _text_behind_prompt(whole, template.text([_QUESTION], [TOOL], add_generation_prompt=True))
    except TemplateUnusable:
        return ""
    last = max(text.rfind("7"), 0)
    ends = [at for end in template.ends if (at := text.find(end, last)) >= 0]
    return text[: min(ends, default=len(text))]


def _text_behind_prompt(whole: str, prompt: str) -> str:
    """Return what follows a prompt in a whole conversation.

    A template may open a thought in the prompt that it does not write for an earlier answer.

    Example:
        >>> _text_behind_prompt("Q<|assistant|><|call|>", "Q<|assistant|><think>")
        '<|call|>'
    """
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, prompt, strict=False)))
    begin = whole.rfind("<", 0, same)
    # They may part inside a word of markup.
    return whole[begin if begin >= 0 and ">" not in whole[begin:same] else same :]


PACKAGE = "renderers"
_SUFFIX = "RendererConfig"
_NO_FAMILY = ("Auto", "Base", "Custom", "Default", "")
"""Names that stand for no model family. The first one would ask the hub."""


class LibraryReader:
    """Reads calls as one model family writes them.

    Args:
        family: its name in the package.
        parser: the package's object for it.
        tokenizer: encodes an answer.
    """

    def __init__(self, family: str, parser: Any, tokenizer: "_Tokenizer") -> None:
        self.family, self._parser, self._tokenizer = family, parser, tokenizer

    def read(self, answer: str) -> tuple[str, list[Call]]:
        """Return the text of an answer without its calls, and the calls. Those that cannot be read have an error.

        Args:
            answer: without its thought, with its special tokens.

        Raises:
            Exception: whatever the package raises.
        """
        found = self._parser.parse_response(self._tokenizer.encode(answer))
        return str(found.content or ""), [_call(call) for call in found.tool_calls]


def library_readers(tokenizer: Any, eos_ids: tuple[int, ...]) -> Iterator[LibraryReader]:
    """Yield the readers whose family could be that of a tokenizer; none if the package is not installed.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        eos_ids: its end tokens.
    """
    try:
        package = importlib.import_module(PACKAGE)
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError):
            log.warning("the package %s cannot be imported, so it reads no tool calls: %r", PACKAGE, error)
        return
    own = _Tokenizer(tokenizer, eos_ids)
    for name in sorted(vars(package)):
        family = name.removesuffix(_SUFFIX)
        if not name.endswith(_SUFFIX) or family in _NO_FAMILY:
            continue
        try:
            parser = package.create_renderer(own, getattr(package, name)())
        except Exception:
            # Its tokens are not those of this tokenizer, which it says by an assertion or by other errors.
            continue
        yield LibraryReader(family, parser, own)


def _call(call: Any) -> Call:
    name = str(call.name or "")
    if str(getattr(call.status, "value", call.status)) != "ok" or not isinstance(call.arguments, dict):
        return Call(name, error=f"the call cannot be read: {call.raw!s:.200}")
    return Call(name, call.arguments)


class _Tokenizer:
    """A tokenizer as the package wants it."""

    name_or_path = ""
    unk_token_id: int | None = None

    def __init__(self, tokenizer: Any, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer, self.eos_token_id = tokenizer, eos_ids[0]

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


Reader = Literal["none written", "environments", "library", "nobody"]
_OPENED, _CLOSED = "<think>", "</think>"


class CallReading:
    """How the calls of one model are read.

    Args:
        written: a call in the forms that the template takes.
        library: returns the readers of the library, if one is needed.
        thinks: whether the template opens a thought in front of every answer.

    Example:
        >>> reading = CallReading([WrittenCall(f"<|call|>{NAME}(word='two words', count=7)<|end_call|>")], lambda: [])
        >>> reading.reader, reading.mark
        ('nobody', '<|call|>')
        >>> reading.with_known_calls("I look.<|call|>look_up_word(")
        'I look.\\n<tool_call>\\n<|call|>look_up_word(\\n</tool_call>'
    """

    def __init__(
        self,
        written: Sequence[WrittenCall],
        library: Callable[[], Iterable[LibraryReader]],
        *,
        thinks: bool = False,
    ) -> None:
        self._chosen: LibraryReader | None = None
        self._thinks = thinks
        self._marks: frozenset[str] = frozenset()
        self.mark, self.reader = "", self._choose(written, library)
        if written and self.reader in ("library", "nobody"):
            self.mark, self._marks = written[0].mark, written[0].marks

    def _choose(
        self, written: Sequence[WrittenCall], library: Callable[[], Iterable[LibraryReader]]
    ) -> Reader:
        if not written:
            return "none written"
        if any(_reads(lambda text: find_calls(text, {NAME: TOOL}), call) for call in written):
            return "environments"
        for reader in library():
            if any(_reads(partial(_calls_behind_thought, reader), call) for call in written):
                self._chosen = reader
                log.info("tool calls are read as those of %s", reader.family)
                return "library"
        return "nobody"

    def with_known_calls(self, answer: str) -> str:
        """Return an answer with its calls in a form that environments know.

        What begins like a call and cannot be read stands between the marks of a call, so that environments count it.

        Args:
            answer: text of a turn, special tokens included.
        """
        if self.reader not in ("library", "nobody"):
            return answer
        thought, text = self._behind_thought(answer)
        if _OPENED in text:
            return answer
        content, calls = _read(self._chosen, text) if self._chosen is not None else ("", [])
        if calls:
            blocks = [_call_block(call) for call in calls]
            return thought + "\n".join([content, *blocks] if content else blocks)
        begin = min((at for mark in self._marks if (at := text.find(mark)) >= 0), default=-1)
        if not self.mark or begin < 0:
            return answer
        return f"{thought}{text[:begin]}\n{_unreadable(text[begin:])}"

    def _behind_thought(self, answer: str) -> tuple[str, str]:
        """Return the thought of an answer with its end, and the text behind it. A thought may have been cut."""
        if not self._thinks and not answer.lstrip().startswith(_OPENED):
            return "", answer
        thought, end, text = answer.partition(_CLOSED)
        return thought + end, text


def _read(reader: LibraryReader, text: str) -> tuple[str, list[Call]]:
    """Return the text and the calls of an answer. A reader that fails has found none."""
    try:
        return reader.read(text)
    except Exception as error:
        log.debug("the reader for %s failed: %r", reader.family, error)
        return "", []


def _calls_behind_thought(reader: LibraryReader, text: str) -> list[Call]:
    return _read(reader, text.rpartition(_CLOSED)[2])[1]


def _reads(read: Callable[[str], list[Call]], call: WrittenCall) -> bool:
    """Return whether a reader finds one call, and two, with their names and arguments."""
    one, two = (Call(NAME, dict(given)) for given in (ARGUMENTS, OTHER_ARGUMENTS))
    return read(call.text) == [one] and (not call.twice or read(call.twice) == [one, two])


def _call_block(call: Call) -> str:
    if call.error:
        return _unreadable(call.error)
    written = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False, default=str)
    # The arguments may have the marks themselves. JSON may write a slash with a backslash, so nothing of them is lost.
    return _between_marks(written.replace("</", r"<\/"))


def _unreadable(text: str) -> str:
    """Return a text as a call that nobody can read. A mark in it would end the call, or begin one that it quotes."""
    text = text.replace("</tool_call>", "</tool call>")
    for mark in CALL_BEGINS:
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return _between_marks(text)


def _between_marks(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"
