"""Chooses who reads the tool calls of a model, and writes them in a form that every environment knows.

Environments read the forms of `envs.tools.calls`. If these read what the chat template writes, an answer reaches the
environment as it was sampled. Otherwise a reader of the package renderers is tried, and its calls are written as
`<tool_call>` with JSON. Only texts change: the tokens stay what was sampled.
"""

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from actors.calls.library import LibraryReader
from actors.calls.written import ARGUMENTS, NAME, TOOL, WrittenCall
from envs.tools.calls import Call, find_calls

log = logging.getLogger(__name__)

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
        >>> reading.known("I look.<|call|>look_up_word(")
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
        self.mark, self.reader = "", self._choose(written, library)
        if written and self.reader in ("library", "nobody"):
            self.mark = written[0].mark

    def _choose(
        self, written: Sequence[WrittenCall], library: Callable[[], Iterable[LibraryReader]]
    ) -> Reader:
        if not written:
            return "none written"
        if any(_is_probe(find_calls(call.text, {NAME: TOOL})) for call in written):
            return "environments"
        for reader in library():
            if any(_is_probe(_read(reader, call.text.rpartition(_CLOSED)[2])[1]) for call in written):
                self._chosen = reader
                log.info("tool calls are read as those of %s", reader.family)
                return "library"
        return "nobody"

    def known(self, answer: str) -> str:
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
            blocks = [_block(call) for call in calls]
            return thought + "\n".join([content, *blocks] if content else blocks)
        if not self.mark or self.mark not in text:
            return answer
        before, _, behind = text.partition(self.mark)
        return f"{thought}{before}\n{_unreadable(self.mark + behind)}"

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


def _is_probe(calls: Sequence[Call]) -> bool:
    return [(call.name, call.arguments, call.error) for call in calls] == [(NAME, ARGUMENTS, "")]


def _block(call: Call) -> str:
    if call.error:
        return _unreadable(call.error)
    written = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False, default=str)
    # The arguments may have the marks themselves. JSON may write a slash with a backslash, so nothing of them is lost.
    return _between_marks(written.replace("</", r"<\/"))


def _unreadable(text: str) -> str:
    """Return a text as a call that nobody can read. A mark in it would end the call too early."""
    return _between_marks(text.replace("</tool_call>", "</tool call>"))


def _between_marks(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"
