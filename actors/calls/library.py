"""Readers of tool calls of the package `renderers`, which is optional and needs neither torch nor transformers.

It has a hand-written parser for each of some thirty model families, which reads tokens.
"""

import importlib
import logging
from collections.abc import Iterator
from typing import Any

from envs.tools.calls import Call

log = logging.getLogger(__name__)

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
