"""Makes the first messages of a task from a row."""

import json
import math
from collections.abc import Mapping, Sequence
from string import Formatter
from typing import Any

from envs.base import ChatMessage
from envs.errors import EnvError
from envs.messages import message_of, text_of
from envs.rows.reading import DataRow
from envs.user_code import nearest

ROLES = ("system", "user", "assistant", "tool")
ANSWERS = ("answer", "completion")
"""Columns that hold a solution, in the order in which they are looked for."""
RawPrompt = str | list[ChatMessage]
"""Prompt as the row has it: a text, or messages."""


class PromptMaker:
    """Makes prompts from rows, by the name of a column or by a template.

    Args:
        prompt: name of the column that holds a text or a list of messages; or a template such as
            ``"What is {a} + {b}?"``, in which ``{{`` and ``}}`` stand for braces.
        system: text of a system message that is put first. Empty: none.
        columns: names of the columns that there are.
        name: name of the data set, for errors.

    Raises:
        EnvError: there is no such column, or the template is not valid.

    Example:
        >>> maker = PromptMaker("What is {a} + {b}?", "", ["a", "b"], "train.jsonl")
        >>> maker.messages(DataRow("train.jsonl:1", {"a": 1, "b": 2}))
        [{'role': 'user', 'content': 'What is 1 + 2?'}]
    """

    def __init__(self, prompt: str, system: str, columns: Sequence[str], name: str) -> None:
        self._prompt, self._system = prompt, system
        self._parts = _parsed(prompt) if "{" in prompt or "}" in prompt else None
        wanted = [prompt] if self._parts is None else [field for _, field in self._parts if field is not None]
        for column in wanted:
            if column not in columns:
                has = ", ".join(map(str, columns))
                raise EnvError(
                    f"params.prompt = {prompt!r}: {name} has no column {column!r}{nearest(column, list(columns))} "
                    f'(columns: {has}); name one, or write a template such as "{{{columns[0]}}}"'
                )

    def raw(self, row: DataRow) -> RawPrompt:
        """Return the prompt of a row as a text or as messages, without the system message of the settings.

        Raises:
            EnvError: a value is missing or empty, or is neither a text nor messages; the text has file and line.
        """
        if self._parts is not None:
            text = "".join(
                before + ("" if field is None else _text(row, field)) for before, field in self._parts
            )
            return _not_empty(row, text)
        value = row.values.get(self._prompt)
        if isinstance(value, str):
            return _not_empty(row, value)
        if isinstance(value, list):
            return _checked(row, self._prompt, value)
        if value is None:
            raise EnvError(f"{row.place}: no value for {self._prompt!r}; add it or delete the row")
        raise EnvError(
            f"{row.place}: {self._prompt!r} is {value!r:.60}; it has to be a text or a list of messages"
        )

    def messages(self, row: DataRow) -> list[ChatMessage]:
        """Return the first messages of a row's task; a system message of the row goes before the settings'."""
        raw = self.raw(row)
        first: list[ChatMessage] = [{"role": "user", "content": raw}] if isinstance(raw, str) else raw
        if not self._system or first[0]["role"] == "system":
            return first
        return [{"role": "system", "content": self._system}, *first]


def solution_of(row: DataRow) -> str:
    """Return the solution that a row holds: a text, a number, or messages of the assistant.

    Raises:
        LookupError: the row has no column of `ANSWERS` with a value.

    Example:
        >>> solution_of(DataRow("t.csv:2", {"prompt": "2+2", "answer": 4}))
        '4'
    """
    for column in ANSWERS:
        value = row.values.get(column)
        if isinstance(value, list) and value and isinstance(value[-1], Mapping):
            value = _last_text(value[-1])
        if isinstance(value, str | int | float) and str(value):
            return str(value)
    raise LookupError(f"{row.place} has no solution in a column {' or '.join(map(repr, ANSWERS))}")


def target_of(row: DataRow) -> str | None:
    """Return what `solution_of` does; None if the row holds no solution."""
    try:
        return solution_of(row)
    except LookupError:
        return None


def _last_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message; "" if it has a part that is not text."""
    try:
        return text_of(message.get("content"))
    except EnvError:
        return ""


def hints_of(row: DataRow, column: str) -> tuple[str, ...]:
    """Return the hints of a row: the texts of a list, or one text; none if the row has no value.

    Raises:
        EnvError: the value is neither a text, a number nor a list of texts.

    Example:
        >>> hints_of(DataRow("t:1", {"hint": "carry the 1"}), "hint"), hints_of(DataRow("t:2", {}), "hint")
        (('carry the 1',), ())
    """
    value = row.values.get(column)
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return ()
    texts = [str(value)] if isinstance(value, str | int | float) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise EnvError(
            f"{row.place}: {column!r} is {value!r:.60}; it has to be a text, or a list of texts from the weakest hint "
            "to the strongest"
        )
    for text in texts:
        check_characters(row.place, text)
    return tuple(texts)


def check_hint(column: str, columns: Sequence[str], rows: Sequence[DataRow], name: str) -> None:
    """Check the hints of all rows; the column may be "" for none.

    Raises:
        EnvError: there is no such column, or a row's hints are not valid.
    """
    if not column:
        return
    if column not in columns:
        raise EnvError(
            f"params.hint = {column!r}: {name} has no column {column!r}{nearest(column, list(columns))} "
            f"(columns: {', '.join(map(str, columns))}); name one with a solution or with hints"
        )
    for row in rows:
        hints_of(row, column)


def _parsed(template: str) -> list[tuple[str, str | None]]:
    """Return the pieces of a template: a text, and the column whose value follows it."""
    cure = "write {column} for a value, and {{ or }} for a brace"
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise EnvError(f"params.prompt = {template!r}: {error}; {cure}") from None
    for _, field, form, conversion in parts:
        if field is not None and (form or conversion or not field):
            raise EnvError(f"params.prompt = {template!r}: {{{field}}} is no plain column; {cure}")
    return [(before, field) for before, field, _, _ in parts]


def _text(row: DataRow, column: str) -> str:
    value = row.values.get(column)
    # Tables write NaN where there is no value, and whole numbers with a point where a column has such a gap.
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise EnvError(
            f"{row.place}: no value for {column!r}, which the prompt needs; add it or delete the row"
        )
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _not_empty(row: DataRow, text: str) -> str:
    if not text.strip():
        raise EnvError(f"{row.place}: the prompt is empty; add a text or delete the row")
    check_characters(row.place, text)
    return text


def check_characters(place: str, text: str, what: str = "the prompt") -> None:
    """Refuse a lone surrogate, which is half of a character, and which no tokenizer takes.

    Raises:
        EnvError: the text has one; ``place`` and ``what`` say where.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvError(
            f"{place}: character {error.start + 1} of {what} is {text[error.start]!r}, half of a surrogate pair; "
            "correct it or delete the row"
        ) from None


def _checked(row: DataRow, column: str, messages: list[Any]) -> list[ChatMessage]:
    where = f"{row.place}: {column!r}"
    if not messages:
        raise EnvError(f"{row.place}: the prompt is empty; add a message or delete the row")
    made: list[ChatMessage] = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not (
            message.get("content") is not None or message.get("tool_calls")
        ):
            raise EnvError(
                f'{where}: message {number} is {message!r:.60}; write {{"role": "user", "content": TEXT}}'
            )
        try:
            read = message_of(message, whole=True)
        except EnvError as error:
            raise EnvError(f"{where}: message {number}: {error}") from None
        if read["role"] not in ROLES:
            raise EnvError(
                f"{where}: message {number} has the role {message.get('role')!r}; use one of {', '.join(ROLES)}"
            )
        check_characters(row.place, read["content"])
        check_characters(row.place, json.dumps(read, ensure_ascii=False, default=str))
        made.append(read)
    messages = made
    if messages[-1]["role"] == "assistant":
        raise EnvError(
            f"{where}: the last message is the assistant's, which is the answer; the prompt ends before it"
        )
    if not any(message["content"].strip() for message in messages):
        raise EnvError(f"{row.place}: the prompt is empty; add a text or delete the row")
    return made
