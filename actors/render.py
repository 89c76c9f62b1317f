"""Turns conversations into token ids with the model's own chat template, without transformers.

Only the first prompt is the encoding of a whole rendered conversation. Later turns never encode earlier text
again. The tokens that the policy sampled stay as they are, and an observation is encoded as the *new text*
that the template adds after an assistant turn. So the tokens of turn n + 1 begin with the tokens of turns 1
to n.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from actors.calls import CallReading, library_readers, opens_thought, written_calls
from actors.chat_template import ChatTemplate
from actors.errors import PrefixBroken, TemplateUnusable
from envs.base import ChatMessage, ToolSchema

_CUT = "\ufdd0"
"""Stands inside the text of a special token in a message, where `Renderer.encode` cuts the text. Unicode has this
character for internal use, so no message has it."""
_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>")
"""Form of the tokens that mark turns, with the bar of ASCII or the wide one of DeepSeek."""
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Renderer:
    """Tokenizer and chat template of a model folder.

    Args:
        folder: holds tokenizer.json, tokenizer_config.json and a chat template (in chat_template.jinja or in
            tokenizer_config.json).
        template_args: further variables of the template, such as ``enable_thinking``.
        special_in_messages: let the texts of special tokens in the messages of an environment become these tokens.
            Otherwise they stay text, so that a prompt or a tool's result cannot pretend to be another turn.
        remark: is told once, of the first prompt with tools that the model cannot know or whose calls nobody reads;
            `offbeat check` looks at this before a run, but an actor may be started without it.

    Raises:
        TemplateUnusable: a file or the end token is missing, or the template does not compile.
    """

    def __init__(
        self,
        folder: str | Path,
        template_args: Mapping[str, Any] | None = None,
        *,
        special_in_messages: bool = False,
        remark: Callable[[str], None] | None = None,
    ) -> None:
        self._remark = remark
        self._folder = Path(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        except Exception as error:
            # The tokenizers library raises bare Exception.
            raise TemplateUnusable(f"{self._folder / 'tokenizer.json'}: {error}") from None
        config = _read_json_object(self._folder / "tokenizer_config.json")
        special = _special_tokens(config, _read_json_object(self._folder / "special_tokens_map.json"))
        text = _template_text(self._folder, config)
        self.eos_ids = self._find_eos_ids(special, _read_json_object(self._folder / "generation_config.json"))
        ends = [self._tokenizer.id_to_token(number) or "" for number in self.eos_ids]
        self._template = ChatTemplate(
            text,
            special,
            arguments=template_args,
            ends=[end for end in ends if end],
            place=str(self._folder),
        )
        self.text = self._template.text
        """Renders a conversation as text, see `ChatTemplate.text`."""
        self._special = None if special_in_messages else _special_pattern(self._tokenizer)
        self.calls = CallReading(
            written_calls(self._template),
            lambda: library_readers(self._tokenizer, self.eos_ids),
            thinks=opens_thought(self._template),
        )
        """Reader of the model's tool calls."""

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Return the token ids of the first observation, up to where the policy's first action begins."""
        schemas = [self._cut_all(tool) for tool in tools]
        text = self.text(self._as_text(messages), schemas, add_generation_prompt=True)
        if schemas and self._remark is not None:
            self._remark_on_tools([schema["function"]["name"] for schema in schemas], text, self._remark)
        return self.encode(text)

    def _remark_on_tools(self, names: Sequence[str], prompt: str, remark: Callable[[str], None]) -> None:
        """Tell once if a prompt does not name its tools, or if nobody reads their calls."""
        if not any(name in prompt for name in names):
            why = (
                "the chat template leaves them out, and no message names them, so the model cannot know them"
            )
        elif self.calls.reader == "nobody":
            why = (
                f"nobody reads the calls that the chat template writes, which begin with {self.calls.mark!r}"
            )
        else:
            return
        self._remark = None
        remark(f"a prompt has tools, for example {names[0]!r}, but {why}; offbeat check says what helps")

    def observation(
        self, messages: Sequence[ChatMessage], sampled: Sequence[int], tools: Sequence[ToolSchema] = ()
    ) -> list[int]:
        """Return the token ids between the end of one action and the start of the next.

        The template writes three parts after the assistant's text: the end of the turn, the messages, and
        the opening of the next assistant turn. All messages are rendered together. The result leaves out the
        part of the turn's end that the policy sampled itself: everything up to the end token, if ``sampled``
        ends with one.

        Raises:
            PrefixBroken: the template changes earlier messages when these are added.
            TemplateUnusable: the template rejects the conversation.
        """
        behind, opening = self._template.behind_answer(self._as_text(messages), tools)
        ended = bool(sampled) and sampled[-1] in self.eos_ids
        end = (self._tokenizer.id_to_token(sampled[-1]) or "") if ended else ""
        return self.encode(behind[opening.kept_from(end, self._template.ends) :])

    def check_follow_up(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> str:
        """Try messages behind an answer. Return a remark on what the template would do otherwise, or "".

        Raises:
            PrefixBroken, TemplateUnusable: an episode could not go on with such messages.
        """
        self._template.opening(messages, tools)
        if not self._template.drops_thoughts(messages, tools):
            return ""
        roles = " and ".join(dict.fromkeys(repr(m["role"]) for m in messages))
        return (
            f"the chat template leaves out the thought of an earlier answer once {roles} messages follow; in training "
            "the thought stays in the context, see docs/understand/actor.md"
        )

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of an action for the environment.

        Args:
            token_ids: tokens of the action.
            keep_special: keep the special tokens, such as the marks of a tool call, as text.
        """
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special)
        return text

    def with_known_calls(self, answer: str) -> str:
        """Return an answer with its tool calls in a form that environments know, see `CallReading.with_known_calls`."""
        return self.calls.with_known_calls(answer)

    def check_prefix(self, known: Sequence[int], prompt: Sequence[int]) -> None:
        """Raise PrefixBroken, which names the first difference, unless ``prompt`` begins with ``known``."""
        if list(prompt[: len(known)]) != list(known):
            raise PrefixBroken(
                f"the next prompt does not begin with the {len(known)} tokens so far: "
                f"{_parting(known, prompt, self._tokenizer)}; something rewrote the history"
            )

    @property
    def vocabulary(self) -> int:
        """Number of tokens, special ones included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens."""
        pieces = text.split(_CUT)
        return [i for piece in pieces for i in self._tokenizer.encode(piece, add_special_tokens=False).ids]

    def answer(self, text: str) -> list[int]:
        """Return the tokens of an answer that somebody else wrote, with an end token; special ones in it stay text."""
        cut = text if self._special is None else self._special.sub(_cut_special_token, text)
        return [*self.encode(cut), self.eos_ids[0]]

    def _as_text(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Cut special tokens in what others wrote. What stands as the assistant's is the environment's own."""
        pattern = self._special
        if pattern is None or not any(pattern.search(m["content"]) for m in messages):
            return messages
        return [
            m
            if m["role"] == "assistant"
            else cast(ChatMessage, {**m, "content": pattern.sub(_cut_special_token, m["content"])})
            for m in messages
        ]

    def _cut_all(self, value: Any) -> Any:
        """Return a schema with the special tokens of all its texts cut: a server of tools writes its own."""
        if isinstance(value, str) and self._special is not None:
            return self._special.sub(_cut_special_token, value)
        if isinstance(value, dict):
            return {self._cut_all(name): self._cut_all(part) for name, part in value.items()}
        return [self._cut_all(part) for part in value] if isinstance(value, list) else value

    def _find_eos_ids(self, special: Mapping[str, str], generation: dict[str, Any]) -> tuple[int, ...]:
        listed = generation.get("eos_token_id")
        ids = set(listed if isinstance(listed, list) else [] if listed is None else [listed])
        eos = self._tokenizer.token_to_id(special.get("eos_token", ""))
        if eos is not None:
            ids.add(eos)
        if not ids:
            raise TemplateUnusable(
                f"{self._folder}: no end token; give eos_token in tokenizer_config.json or eos_token_id in "
                "generation_config.json"
            )
        return tuple(sorted(ids))


def _parting(known: Sequence[int], new: Sequence[int], tokenizer: Any) -> str:
    """Return where two token sequences differ first, with a few tokens around that place."""
    at = next(
        (i for i, (a, b) in enumerate(zip(known, new, strict=False)) if a != b), min(len(known), len(new))
    )
    around = slice(max(0, at - 3), at + 4)

    def show(ids: Sequence[int]) -> str:
        return " ".join(f"{i}:{tokenizer.id_to_token(i)!r}" for i in ids[around]) or "(end)"

    return f"they part at token {at}: so far [{show(known)}], then [{show(new)}]"


def _special_pattern(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the special tokens' texts, the longest first; None if there is none of two characters.

    Some tokenizers do not mark all tokens that begin a turn as special, so the form of the text counts, too.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    texts = sorted(
        (t.content for t in added if len(t.content) > 1 and (t.special or _CONTROL.fullmatch(t.content))),
        key=len,
        reverse=True,
    )
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _cut_special_token(found: re.Match[str]) -> str:
    return f"{found[0][0]}{_CUT}{found[0][1:]}"


def _read_json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TemplateUnusable(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise TemplateUnusable(f"{path}: expected an object, found {type(content).__name__}")
    return content


def _special_tokens(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by role. A file gives each as a string, or as an object with its content."""
    tokens: dict[str, str] = {}
    for name in _SPECIAL:
        value = config.get(name) or special_map.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _template_text(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    # An older form of the file holds a list of named templates.
    if isinstance(template, list):
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    if not isinstance(template, str):
        raise TemplateUnusable(
            f"{folder}: no chat template; put one into chat_template.jinja or take an instruction-tuned model"
        )
    return template
