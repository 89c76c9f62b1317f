"""A tool call as a chat template writes it, by which those who would read the model's calls are tried. Pure."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

from actors.chat_template import ChatTemplate
from actors.errors import TemplateUnusable
from envs.base import ChatMessage, ToolSchema

NAME = "look_up_word"
ARGUMENTS: Mapping[str, Any] = {"word": "two words", "count": 7}
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


def written_calls(template: ChatTemplate) -> list[WrittenCall]:
    """Return the call in the forms that a template takes: arguments as a map or as JSON, ids of both kinds.

    Returns:
        An empty list if the template writes no calls.
    """
    found = dict[str, WrittenCall]()
    for name_in_id in _IDS:
        for arguments in (dict(ARGUMENTS), json.dumps(ARGUMENTS)):
            call = {"id": name_in_id, "type": "function", "function": {"name": NAME, "arguments": arguments}}
            answer = cast(ChatMessage, {"role": "assistant", "content": "", "tool_calls": [call]})
            try:
                text = _answer_text(template, answer)
            except TemplateUnusable:
                continue
            if NAME in text:
                found.setdefault(text, WrittenCall(text))
    return list(found.values())


def opens_thought(template: ChatTemplate) -> bool:
    """Return whether a template opens a thought in the prompt, so that an answer begins inside it."""
    try:
        prompt = template.text([_QUESTION], [TOOL], add_generation_prompt=True)
    except TemplateUnusable:
        return False
    return "</think>" not in prompt.rpartition("<think>")[2] and "<think>" in prompt


def _answer_text(template: ChatTemplate, answer: ChatMessage) -> str:
    """Return what a template writes for an answer, without its end token and all that follows."""
    whole = template.text([_QUESTION, answer], [TOOL])
    text = _behind(whole, template.text([_QUESTION], [TOOL], add_generation_prompt=True))
    last = max(text.rfind("7"), 0)
    ends = [at for end in template.ends if (at := text.find(end, last)) >= 0]
    return text[: min(ends, default=len(text))]


def _behind(whole: str, prompt: str) -> str:
    """Return what follows a prompt in a whole conversation.

    A template may open a thought in the prompt that it does not write for an earlier answer.

    Example:
        >>> _behind("Q<|assistant|><|call|>", "Q<|assistant|><think>")
        '<|call|>'
    """
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, prompt, strict=False)))
    begin = whole.rfind("<", 0, same)
    # They may part inside a word of markup.
    return whole[begin if begin >= 0 and ">" not in whole[begin:same] else same :]
