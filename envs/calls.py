"""Reads the answers of a model: its thought, its tool calls, and what else it says. Pure, and linear in time.

There is one reader for rows, tools and agents. The forms are those that models are trained on: ``<tool_call>`` with
JSON (Qwen, Hermes), with ``<function=...>`` (Qwen3.5, Nemotron) or with ``<arg_key>`` (GLM); a bare JSON object (Llama
3); ``[TOOL_CALLS]`` (Mistral); DeepSeek's and gpt-oss's special tokens. What a model writes is hostile text:

- A call is read as its family means it, or it is a call with an error. What begins or ends like a call is never text.
- Nothing is left out of a call. What is not closed, given twice or cannot be placed makes it a call with an error.
- Structure goes first, so a mark that is quoted in an argument ends nothing.
- The scan goes forward only. Each part of a text is looked at a bounded number of times, whatever stands in it.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from envs.base import ToolSchema

MOST_LEVELS = 64
"""Levels of lists and objects that the arguments of a call may have."""
SKIPPED_LEVELS = 256
"""Levels that are passed at once where the decoder of JSON reaches its own limit, which is some hundred higher."""
MOST_DIGITS = 308
"""Digits of a whole number."""
WINDOW = 4096
"""Characters that the decoder of JSON gets at first."""
LONGEST_WORD = 16
"""Characters of JSON at the end of a window that may look wrong because it ends there."""
SHOWN = 60
"""Characters of an answer that an error shows."""
THINK, THOUGHT_END = "<think>", "</think>"
_OPENED, _CLOSED = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_MISTRAL, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_PYTHON = "<|python_tag|>"
_RECIPIENT, _MESSAGE, _START, _CHANNEL = "to=functions.", "<|message|>", "<|start|>", "<|channel|>"
_CALLED, _END, _RETURN = "<|call|>", "<|end|>", "<|return|>"
_FINAL = "<|channel|>final<|message|>"
_DEEPSEEK, _DEEPSEEK_END, _DEEPSEEK_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_WRAPPERS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_STRAYS = (_CLOSED, _PARAMETER, _KEY, _VALUE_END, _DEEPSEEK_END, _DEEPSEEK_SEP, _CALLED)
"""Marks that only stand inside a call or at its end."""
CALL_BEGINS = (_OPENED, _FUNCTION, _MISTRAL, _PYTHON, _RECIPIENT, _DEEPSEEK)
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.-]+")
_TOOL_NAME = re.compile(r"[^\s<>\[\]{}()\"']{1,256}")
_CALL_LIKE = r'\{\s*"(?:name|function|type|id|arguments|parameters)"\s*:'
_MARKS = (THINK, THOUGHT_END, *CALL_BEGINS, *_WRAPPERS, *_STRAYS, _MESSAGE, _START, _CHANNEL, _END)
_MARK = re.compile("|".join((*map(re.escape, _MARKS), _CALL_LIKE)))
_BRACKET_OR_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_BEHIND_BARE = re.compile(r"(?:[\s;,\]]|```|<\|eom_id\|>|<\|eot_id\|>)*")
_KEYS = frozenset(("name", "arguments", "parameters", "type", "id"))


@dataclass(frozen=True)
class Call:
    """A call that the model wrote. With ``error`` it could not be read; ``name`` may then be empty."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class ReadAnswer:
    """An answer without its thought.

    Attributes:
        text: what it says, without its calls.
        calls: its calls, in its order.
    """

    text: str
    calls: list[Call]


def read_answer(answer: str, tools: Mapping[str, ToolSchema]) -> ReadAnswer:
    """Read an answer. Calls inside a thought do not count.

    Args:
        answer: text of the turn, special tokens included.
        tools: schemas of the tools, by name. Without tools, no bare JSON object is a call.

    Example:
        >>> read_answer('I add.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', {})
        ReadAnswer(text='I add.', calls=[Call(name='add', arguments={'a': 1}, error='')])
    """
    return _Reader(answer, tools).read()


def find_calls(answer: str, tools: Mapping[str, ToolSchema]) -> list[Call]:
    """Return the tool calls of an answer, in its order; see `read_answer`.

    Example:
        >>> find_calls('<tool_call>\\n{"name": "add", "arguments": {"a": 1}}\\n</tool_call>', {})
        [Call(name='add', arguments={'a': 1}, error='')]
        >>> find_calls("The answer is 7.", {})
        []
    """
    return read_answer(answer, tools).calls


def without_thought(answer: str, tools: Mapping[str, ToolSchema] | None = None) -> str:
    """Return an answer without its thought. A thought that is not closed goes to the end.

    Args:
        tools: schemas of the tools, by name: a call of one without marks may quote the end of a thought.

    Example:
        >>> without_thought("<think>hm</think>yes"), without_thought("hm</think>yes"), without_thought("<think>hm")
        ('yes', 'yes', '')
    """
    return answer[_Reader(answer, tools or {}).behind_thought() :].partition(THINK)[0]


def thought_of(answer: str, tools: Mapping[str, ToolSchema] | None = None) -> str:
    """Return the thought of an answer, without its marks; "" if it has none that is closed.

    Example:
        >>> thought_of("<think>hm</think>yes"), thought_of("hm</think>yes"), thought_of("yes")
        ('hm', 'hm', '')
    """
    end = _Reader(answer, tools or {}).behind_thought()
    return answer[:end].removesuffix(THOUGHT_END).strip().removeprefix(THINK).strip()


def final_text(text: str) -> str:
    """Return what a text says to the user: in gpt-oss' form it stands in a channel of its own.

    Example:
        >>> final_text("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>3")
        '3'
    """
    said = text.rpartition(_FINAL)[2] if _FINAL in text else text
    return said.removesuffix(_RETURN).removesuffix(_END)


class _UnreadableCall(Exception):
    """A call cannot be read.

    Attributes:
        name: its name, if it is known.
        at: position up to which the text belongs to it for certain.
    """

    def __init__(self, why: str, at: int, name: str = "") -> None:
        super().__init__(why)
        self.at, self.name = at, name


class _Reader:
    """One forward scan over an answer."""

    def __init__(self, text: str, tools: Mapping[str, ToolSchema]) -> None:
        self._text, self._tools = text, tools
        self._seen: dict[str, tuple[int, int]] = {}
        self._pieces: list[str] = []
        self._calls: list[Call] = []
        self._bare: list[tuple[int, int]] = []
        """Calls without marks: how many pieces stand before each, and its place among the calls."""
        self._from = 0
        self._in_message = False

    def read(self) -> ReadAnswer:
        self._scan()
        if self._bare:
            self._end_bare()
        return ReadAnswer("".join(self._pieces), self._calls)

    def behind_thought(self) -> int:
        """Return the position behind the last thought that is closed; 0 if there is none."""
        self._scan()
        return self._from

    def _scan(self) -> None:
        at, text = self._leading_thought(), self._text
        self._from = at if at < len(text) or text.endswith(THOUGHT_END) else 0
        while (found := _MARK.search(text, at)) is not None:
            mark, begin = found[0], found.start()
            self._pieces.append(text[at:begin])
            at = self._behind(mark, begin)
        self._pieces.append(text[at:])

    def _leading_thought(self) -> int:
        """Return where the text begins behind a thought that the model itself opened."""
        if not self._text.lstrip().startswith(THINK):
            return 0
        end = self._text.find(THOUGHT_END)
        return len(self._text) if end < 0 else end + len(THOUGHT_END)

    def _behind(self, mark: str, begin: int) -> int:
        """Take what a mark at a position begins. Return the position behind it."""
        end = begin + len(mark)
        match mark:
            case "<think>":
                closed = self._find(THOUGHT_END, end)
                if closed < 0:
                    return len(self._text)
                self._pieces.clear()
                self._bare = [(0, number) for _, number in self._bare]
                self._from = closed + len(THOUGHT_END)
                return self._from
            case "</think>":
                # The prompt opened the thought, or the model did without saying so. All before it was thought, unless
                # a thought was closed before: then calls stand between, and the mark is quoted.
                if self._from > 0 and self._calls:
                    self._pieces.append(mark)
                    return end
                self._pieces.clear()
                self._calls.clear()
                self._bare.clear()
                self._from = end
                return end
            case "<|message|>" | "<|start|>" | "<|channel|>" | "<|end|>":
                self._in_message = mark == _MESSAGE
                self._pieces.append(mark)
                return end
            case "to=functions." if self._in_message:
                self._pieces.append(mark)
                return end
            case _ if mark[0] == "{":
                if not self._tools:
                    self._pieces.append("{")
                    return begin + 1
                return self._bare_call(begin)
            case _ if mark in _WRAPPERS:
                return self._wrapper(mark, end)
            case _ if mark in _STRAYS:
                return self._stray(mark, begin, end)
        return self._take_call(mark, end)

    def _bare_call(self, begin: int) -> int:
        """Take a JSON object that has no mark in front. It is a call by its keys: an answer may be an object, too."""
        call: Call | None = None
        try:
            content, end = self._json(begin)
        except _UnreadableCall as error:
            end = min(max(error.at, begin + 1), len(self._text))
            thought = self._find(THOUGHT_END, begin)
            if self._from == 0 and 0 <= thought < end:
                # It is more likely that it was thought of than that it quotes the end of a thought.
                end = thought
            if any(self._find(key, begin) >= 0 for key in ('"arguments"', '"parameters"')):
                call = Call("", error=str(error))
        else:
            if _is_call(content, self._tools):
                call = _call_of(content)
                # The model left out the opening mark.
                end = self._past_mark(self._past_space(end), _CLOSED)
        if call is None:
            self._pieces.append(self._text[begin:end])
        else:
            self._bare.append((len(self._pieces), len(self._calls)))
            self._calls.append(call)
        return end

    def _end_bare(self) -> None:
        """Take out of the text what calls without marks have around them.

        Such calls end an answer. With words behind them, they may as well be quoted, so they become calls with an
        error.
        """
        pieces, last = self._bare[0][0], self._bare[-1][0]
        rest = _BEHIND_BARE.sub("", "".join(self._pieces[last:]), count=1)
        shown = f"words stand behind the call: {rest[:SHOWN]!r}; end the answer with the call, or answer without one"
        for _, number in self._bare if rest else ():
            call = self._calls[number]
            self._calls[number] = call if call.error else Call(call.name, error=shown)
        text = (
            "".join(self._pieces[:pieces])
            .rstrip(" \t\n[")
            .removesuffix("```json")
            .removesuffix("```")
            .rstrip()
        )
        self._pieces = [text]

    def _wrapper(self, mark: str, end: int) -> int:
        opens = mark == _WRAPPERS[0]
        if opens and not self._text.startswith(_DEEPSEEK, self._past_space(end)):
            self._refuse(f"behind {mark} stands no {_DEEPSEEK}", "")
        return end

    def _stray(self, mark: str, begin: int, end: int) -> int:
        """Take a mark that has lost what it belongs to. It is the rest of an unreadable call, or one of its own."""
        if not (self._calls and self._calls[-1].error):
            before = "".join(self._pieces[-3:])[-SHOWN:].strip()
            self._refuse(f"{mark} stands behind {before!r}, where no call was opened", "")
        if mark in (_PARAMETER, _KEY, _DEEPSEEK_SEP):
            closed = min(
                (at for m in (_CLOSED, _DEEPSEEK_END) if (at := self._find(m, end)) >= 0), default=-1
            )
            opened = min(
                (at for m in CALL_BEGINS if (at := self._find(m, end)) >= 0), default=len(self._text)
            )
            if 0 <= closed < opened:
                return self._past_mark(closed, _CLOSED, _DEEPSEEK_END)
        return end

    def _take_call(self, mark: str, end: int) -> int:
        """Read the call or the calls behind a mark. Return the position behind them."""
        try:
            match mark:
                case "<tool_call>":
                    return self._block(end)
                case "<function=":
                    return self._past_mark(self._past_space(self._function(end)), _CLOSED)
                case "[TOOL_CALLS]":
                    return self._mistral(end)
                case "<|python_tag|>":
                    return self._python(end)
                case "to=functions.":
                    return self._harmony(end)
            return self._deepseek(end)
        except _UnreadableCall as error:
            self._refuse(str(error), error.name)
            return self._recover(mark, max(error.at, end))

    def _recover(self, mark: str, at: int) -> int:
        """Return where to go on behind a call that cannot be read: at the next call, or behind its own end."""
        ends = {
            _OPENED: (_CLOSED,),
            _FUNCTION: (_CLOSED, _FUNCTION_END),
            _RECIPIENT: (_CALLED, _END, _RETURN),
            _DEEPSEEK: (_DEEPSEEK_END,),
        }.get(mark, ())
        stops = [
            (found, stop)
            for stop in (*ends, *CALL_BEGINS, THOUGHT_END)
            if (found := self._find(stop, at)) >= 0
        ]
        if not stops:
            return len(self._text)
        found, stop = min(stops)
        if stop not in ends:
            return found
        return self._past_mark(self._past_space(found + len(stop)), _CLOSED)

    def _block(self, start: int) -> int:
        """Read the inside of ``<tool_call>``: JSON, functions, or a name with pairs."""
        text = self._text
        at = self._past_space(start)
        if self._find(_CLOSED, at) < 0:
            raise _UnreadableCall("the call has no </tool_call>", self._behind_json(at))
        before = len(self._calls)
        try:
            if text.startswith(_FUNCTION, at):
                while text.startswith(_FUNCTION, at):
                    at = self._past_space(self._function(at + len(_FUNCTION)))
                what = "</function>"
            elif text.startswith(("{", "[", '"'), at):
                content, at = self._json(at)
                at = self._past_space(at)
                self._calls.append(_call_of(content))
                what = "the JSON object"
            else:
                at, what = self._pairs(at), "the arguments"
        except _UnreadableCall:
            del self._calls[before:]
            raise
        if not text.startswith(_CLOSED, at):
            del self._calls[before:]
            behind = text[at : at + SHOWN]
            if not behind or behind.startswith(_OPENED):
                raise _UnreadableCall("the call has no </tool_call>", at)
            raise _UnreadableCall(
                f"behind {what} stands {behind!r}, not </tool_call>; a block has one call", at
            )
        return at + len(_CLOSED)

    def _function(self, start: int) -> int:
        """Read ``NAME><parameter=KEY>VALUE</parameter>...</function>``, or with JSON in place of the parameters."""
        text = self._text
        found = _TOOL_NAME.match(text, start)
        if found is None or not text.startswith(">", found.end()):
            raise _UnreadableCall("<function= has no name and >", start)
        name, at = found[0], self._past_space(found.end() + 1)
        if text.startswith("{", at):
            content, at = self._json(at, name)
            at = self._past(_FUNCTION_END, self._past_space(at), name)
            self._calls.append(_with_arguments(name, content))
            return at
        values: dict[str, str] = {}
        while text.startswith(_PARAMETER, at):
            at = self._parameter(at + len(_PARAMETER), name, values)
        at = self._past(_FUNCTION_END, at, name)
        self._calls.append(_typed(name, values, self._tools))
        return at

    def _parameter(self, start: int, name: str, values: dict[str, str]) -> int:
        key = _TOOL_NAME.match(self._text, start)
        if key is None or not self._text.startswith(">", key.end()):
            raise _UnreadableCall("<parameter= has no name and >", start, name)
        begin = key.end() + 1
        end, behind = self._value(
            begin, _PARAMETER_END, _PARAMETER, (_PARAMETER, _FUNCTION_END), key[0], name
        )
        value = self._text[begin:end].removeprefix("\n").removesuffix("\n")
        _put(values, key[0], value, name, behind)
        return behind

    def _pairs(self, start: int) -> int:
        """Read ``NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...``. A name alone calls its tool."""
        text = self._text
        found = _TOOL_NAME.match(text, start)
        if found is None:
            raise _UnreadableCall(
                f"the call is not JSON: it begins with {text[start : start + SHOWN]!r}", start
            )
        name, at = found[0], self._past_space(found.end())
        if not text.startswith(_KEY, at) and not (text.startswith(_CLOSED, at) and name in self._tools):
            raise _UnreadableCall(
                f"the call is not JSON: it begins with {text[start : start + SHOWN]!r}", start
            )
        values: dict[str, str] = {}
        while text.startswith(_KEY, at):
            begin = at + len(_KEY)
            end = self._find(_KEY_END, begin)
            if end < 0 or 0 <= self._find("<", begin) < end:
                raise _UnreadableCall("<arg_key> has no </arg_key>", begin, name)
            key = text[begin:end].strip()
            begin = self._past(_VALUE, self._past_space(end + len(_KEY_END)), name)
            end, at = self._value(begin, _VALUE_END, _KEY, (_KEY, _CLOSED), key, name)
            _put(values, key, text[begin:end], name, at)
        self._calls.append(_typed(name, values, self._tools))
        return at

    def _value(
        self, begin: int, end_mark: str, next_mark: str, followers: tuple[str, ...], key: str, name: str
    ) -> tuple[int, int]:
        """Return the end of a value, and the position behind its end mark and the space there.

        A value may quote neither its own end mark nor what begins the next value: that may as well be a value which
        was not closed, or not opened.
        """
        end, opened = self._find(end_mark, begin), self._find(next_mark, begin)
        if end < 0 or 0 <= opened < end:
            raise _UnreadableCall(f"{key!r} is not closed by {end_mark}", max(begin, opened), name)
        behind = self._past_space(end + len(end_mark))
        if not self._text.startswith(followers, behind):
            shown = self._text[behind : behind + SHOWN]
            raise _UnreadableCall(
                f"behind {key!r} stands {shown!r}, where a value or the end belongs", behind, name
            )
        return end, behind

    def _mistral(self, start: int) -> int:
        """Read a list of calls in JSON; or a name, and arguments in JSON."""
        at = self._past_space(start)
        found = _TOOL_NAME.match(self._text, at)
        if found is None or self._text.startswith(("[", "{"), at):
            listed, end = self._json(at, what="the calls are")
            if listed == []:
                raise _UnreadableCall(f"the list behind {_MISTRAL} has no call", end)
            self._calls += [
                _call_of(content) for content in (listed if isinstance(listed, list) else [listed])
            ]
            return end
        name, at = found[0], self._past_space(found.end())
        if self._text.startswith(_CALL_ID, at):
            number = _TOOL_NAME.match(self._text, at + len(_CALL_ID))
            at = self._past_space(number.end() if number else at + len(_CALL_ID))
        at = self._past_space(self._past_mark(at, _ARGS))
        if not self._text.startswith("{", at):
            raise _UnreadableCall(f"the calls are not JSON: they begin with {name!r}", at)
        content, at = self._json(at, name)
        self._calls.append(_with_arguments(name, content))
        return at

    def _python(self, start: int) -> int:
        at = self._past_space(start)
        if not self._text.startswith("{", at):
            raise _UnreadableCall(f"behind {_PYTHON} stands {self._text[at : at + SHOWN]!r}, not JSON", at)
        while self._text.startswith("{", at):
            content, at = self._json(at)
            self._calls.append(_call_of(content))
            behind = _BEHIND_BARE.match(self._text, at)
            at = behind.end() if behind else at
        return at

    def _harmony(self, start: int) -> int:
        """Read gpt-oss' form: ``NAME ... <|message|>JSON``, up to a mark or the end."""
        text = self._text
        found = _NAME.match(text, start)
        name = found[0] if found else ""
        at = self._find(_MESSAGE, start)
        if not name or at < 0 or any(0 <= self._find(mark, start) < at for mark in ("{", _END)):
            raise _UnreadableCall(f"behind {_RECIPIENT}{name} stands no {_MESSAGE}", start, name)
        content, at = self._json(self._past_space(at + len(_MESSAGE)), name)
        at = self._past_space(at)
        if at < len(text) and not text.startswith((_CALLED, _END, _START, _RETURN), at):
            raise _UnreadableCall(
                f"the call is not JSON: behind it stands {text[at : at + SHOWN]!r}", at, name
            )
        self._calls.append(_with_arguments(name, content))
        self._in_message = False
        return self._past_mark(at, _CALLED, _END, _RETURN)

    def _deepseek(self, start: int) -> int:
        """Read ``KIND<sep>NAME``, then JSON in a fence; or ``NAME<sep>JSON``, as later versions write it."""
        text = self._text
        word = _TOOL_NAME.match(text, start)
        head = word[0] if word else ""
        at = self._past(_DEEPSEEK_SEP, word.end() if word else start, "")
        name, fenced = head, False
        if not text.startswith("{", self._past_space(at)):
            found = _TOOL_NAME.match(text, at)
            name = found[0] if found else ""
            at = self._past("```json", self._past_space(found.end() if found else at), name)
            fenced = True
        content, at = self._json(self._past_space(at), name)
        at = self._past_space(at)
        at = self._past_space(self._past("```", at, name)) if fenced else at
        at = self._past(_DEEPSEEK_END, at, name)
        self._calls.append(_with_arguments(name, content))
        return at

    def _json(self, at: int, name: str = "", what: str = "the call is") -> tuple[Any, int]:
        """Return the JSON value at a position, and the position behind it."""
        width, left = WINDOW, len(self._text) - at
        while True:
            # An error of the decoder counts the lines before it, so it gets no more of the text than it needs.
            part = self._text[at : at + width]
            try:
                content, end = _JSON.raw_decode(part)
                break
            except json.JSONDecodeError as error:
                is_open = error.msg.startswith("Unterminated string")
                if width < left and (is_open or error.pos > width - LONGEST_WORD):
                    width *= 4
                    continue
                # Behind the beginning of a text that is never closed, nothing can be told from what it quotes.
                behind = len(self._text) if is_open else at + error.pos
                raise _UnreadableCall(f"{what} not JSON: {error.msg}", behind, name) from None
            except RecursionError:
                # What is nested deeper than any call begins no call either, and is not tried level by level.
                behind = at + _behind_levels(part)
                raise _UnreadableCall(
                    f"{what} not JSON: more than {MOST_LEVELS} levels", behind, name
                ) from None
        if problem := _problem(content, part, 0, end):
            raise _UnreadableCall(f"{what} not JSON: {problem}", at + end, name)
        return content, at + end

    def _behind_json(self, at: int) -> int:
        """Return the position behind the JSON at a position, whose texts may quote calls; or where it breaks off."""
        if not self._text.startswith(("{", "["), at):
            return at
        try:
            return self._json(at)[1]
        except _UnreadableCall as error:
            return error.at

    def _refuse(self, why: str, name: str) -> None:
        self._calls.append(Call(name, error=why))

    def _find(self, mark: str, at: int) -> int:
        """Return the next position of a mark, -1 if there is none. Each part is searched once for each mark.

        Invariant: the scan goes forward, so what was found from an earlier position holds until it is passed.
        """
        begin, found = self._seen.get(mark, (len(self._text) + 1, -1))
        if begin <= at and (found < 0 or at <= found):
            return found
        found = self._text.find(mark, at)
        self._seen[mark] = at, found
        return found

    def _past(self, mark: str, at: int, name: str) -> int:
        if not self._text.startswith(mark, at):
            raise _UnreadableCall(f"{self._text[at : at + SHOWN]!r} stands where {mark} belongs", at, name)
        return at + len(mark)

    def _past_mark(self, at: int, *marks: str) -> int:
        """Return the position behind one of the marks if it stands here."""
        return next((at + len(mark) for mark in marks if self._text.startswith(mark, at)), at)

    def _past_space(self, at: int) -> int:
        found = _SPACE.match(self._text, at)
        return found.end() if found else at


def _is_call(content: Any, tools: Mapping[str, ToolSchema]) -> bool:
    """Return whether an object is a call: it has a name and arguments, or nothing but the name of a tool."""
    if not isinstance(content, dict) or not ("name" in content or "function" in content):
        return False
    if "arguments" in content or "parameters" in content or isinstance(content.get("function"), dict):
        return True
    name = content.get("name")
    return set(content) <= _KEYS and isinstance(name, str) and name in tools


def _call_of(content: Any) -> Call:
    """Return the call that a JSON object describes."""
    if not isinstance(content, dict):
        return Call("", error="the call is not a JSON object")
    if isinstance(content.get("function"), dict):
        content = content["function"]
    name = content.get("name", content.get("function"))
    if not isinstance(name, str) or not name:
        return Call("", error='the call has no "name"')
    if "arguments" in content and "parameters" in content:
        return Call(name, error='the call has both "arguments" and "parameters"')
    if not content.keys() & {"arguments", "parameters"}:
        unknown = next((key for key in content if key not in (*_KEYS, "function")), None)
        if unknown is not None:
            return Call(name, error=f'the call has {unknown!r} where "arguments" belongs')
        return Call(name)
    return _with_arguments(name, content.get("arguments", content.get("parameters")))


def _with_arguments(name: str, arguments: Any) -> Call:
    """Return a call with arguments: an object, or its JSON as a text."""
    if isinstance(arguments, str):
        try:
            arguments = _JSON.decode(arguments) if arguments.strip() else {}
        except (json.JSONDecodeError, RecursionError) as error:
            return Call(name, error=f"the call is not JSON: {error}")
        if problem := _problem(arguments, "\\u", 0, 2):
            return Call(name, error=f"the call is not JSON: {problem}")
    if not isinstance(arguments, dict):
        return Call(name, error='"arguments" is not a JSON object')
    return Call(name, arguments)


def _put(values: dict[str, str], key: str, value: str, name: str, at: int) -> None:
    if key in values:
        raise _UnreadableCall(f"{key!r} is given twice", at, name)
    values[key] = value


def _typed(name: str, values: Mapping[str, str], tools: Mapping[str, ToolSchema]) -> Call:
    """Return a call whose arguments were written as text. The tool's schema says which are not text."""
    function = tools.get(name, {}).get("function", {})
    properties = function.get("parameters", {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for key, text in values.items():
        schema = properties.get(key)
        arguments[key] = text
        if _takes_text_only(schema) and text.strip() != "null":
            continue
        try:
            content = _JSON.decode(text)
        except (json.JSONDecodeError, RecursionError):
            continue
        # A text of the word null is a text, unless null is what the schema has beside texts.
        if not (_takes_text_only(schema) and "null" not in _types_of(schema)):
            arguments[key] = content
    if problem := _problem(arguments, "\\u", 0, 2):
        return Call(name, error=f"the call cannot be read: {problem}")
    return Call(name, arguments)


def _takes_text_only(schema: Any) -> bool:
    return "string" in (types := _types_of(schema)) and types <= {"string", "null"}


def _types_of(schema: Any) -> set[str]:
    """Return the types that a schema names, those of its alternatives included."""
    if not isinstance(schema, dict):
        return set()
    own = schema.get("type", ())
    found = {own} if isinstance(own, str) else {kind for kind in own if isinstance(kind, str)}
    for word in ("anyOf", "oneOf"):
        for part in schema.get(word, ()) if isinstance(schema.get(word), list) else ():
            found |= _types_of(part)
    return found


def _problem(content: Any, text: str, begin: int, end: int) -> str:
    """Return why a value cannot be an argument: depth, a key twice, no finite number, or half of a character."""
    level: list[Any] = [content]
    for _ in range(MOST_LEVELS):
        if any(isinstance(value, _Twice) for value in level):
            return "a key is given twice"
        if any(isinstance(value, float) and not math.isfinite(value) for value in level):
            return "a number is not finite, or too large"
        level = [part for value in level for part in _parts(value)]
        if not level:
            break
    if level:
        return f"more than {MOST_LEVELS} levels"
    # A half of a character comes of an escape, or of a text that has it already.
    if text.find("\\u", begin, end) >= 0 or not text.isascii():
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return f"{error.object[error.start]!r} is half of a surrogate pair"
    return ""


def _behind_levels(text: str) -> int:
    """Return the position in a JSON text behind the bracket that opens level `SKIPPED_LEVELS`.

    The decoder has come further, so the strings up to there are closed.
    """
    depth = 0
    for found in _BRACKET_OR_STRING.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth == SKIPPED_LEVELS:
            return found.end()
    return 0


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value


class _Twice(dict[str, Any]):
    """An object of which a key was given twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    return made if len(made) == len(pairs) else _Twice(made)


def _whole(text: str) -> int | float:
    """Return a whole number; infinity for one of more digits than any float has."""
    return int(text) if len(text) <= MOST_DIGITS else math.inf


# What JSON knows and an argument cannot be is read, too, so that the place behind it is known.
_JSON = json.JSONDecoder(strict=False, parse_int=_whole, object_pairs_hook=_object)
