"""Turns conversations into token ids with the model's own chat template, without transformers.

Only the first prompt is the encoding of a whole rendered conversation. Later turns never encode earlier text
again. The tokens that the policy sampled stay as they are, and an observation is encoded as the *new text*
that the template adds after an assistant turn. So the tokens of turn n + 1 begin with the tokens of turns 1
to n.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from actors.errors import PrefixBroken, TemplateUnusable
from envs.base import ChatMessage

_MARK = "ANSWER"
# Templates of reasoning models add an empty thought to an assistant turn that has none, and drop it again
# once a message follows. A thought with content may stay, so the second stand-in has one.
_STAND_INS = (_MARK, f"<think>\nthought\n</think>\n\n{_MARK}")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class Renderer:
    """Tokenizer and chat template of a model folder.

    Args:
        folder: holds tokenizer.json, tokenizer_config.json and a chat template (in chat_template.jinja or in
            tokenizer_config.json).

    Raises:
        TemplateUnusable: a file or the end token is missing, or the template does not compile.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        except Exception as error:
            # The tokenizers library raises bare Exception.
            raise TemplateUnusable(f"{self._folder / 'tokenizer.json'}: {error}") from None
        config = _json(self._folder / "tokenizer_config.json")
        self._special = _special_tokens(config, _json(self._folder / "special_tokens_map.json"))
        self._template = _compile(_template_text(self._folder, config))
        self.eos_ids = self._find_eos_ids(_json(self._folder / "generation_config.json"))

    def prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the token ids of the first observation, up to where the policy's first action begins."""
        return self.encode(self.text(messages, add_generation_prompt=True))

    def text(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = False) -> str:
        """Return the conversation as the template renders it.

        Raises:
            TemplateUnusable: the template rejects the conversation.
        """
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except jinja2.TemplateError as error:
            roles = [m["role"] for m in messages]
            raise TemplateUnusable(f"chat template of {self._folder}: {error} (roles {roles})") from None

    def observation(self, message: ChatMessage, sampled: Sequence[int]) -> list[int]:
        """Return the token ids between the end of one action and the start of the next.

        The template writes three parts after the assistant's text: the end of the turn, the observation, and
        the opening of the next assistant turn. The result leaves out the part of the turn's end that the
        policy sampled itself: everything up to the end token, if ``sampled`` ends with one.

        Raises:
            PrefixBroken: the template changes earlier turns when a message is added.
            TemplateUnusable: the template rejects the conversation.
        """
        closing, added = self._behind_answer(message)
        if sampled and sampled[-1] in self.eos_ids:
            end = self._tokenizer.id_to_token(sampled[-1]) or ""
            if end and end in closing:
                closing = closing.partition(end)[2]
        return self.encode(closing + added)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of an action for the environment, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _behind_answer(self, message: ChatMessage) -> tuple[str, str]:
        """Return the text that ends an assistant turn, and the text that ``message`` after it adds."""
        broken: PrefixBroken | None = None
        for stand_in in _STAND_INS:
            talk: list[ChatMessage] = [{"role": "user", "content": "Question"}]
            talk.append({"role": "assistant", "content": stand_in})
            before = self.text(talk)
            after = self.text([*talk, message], add_generation_prompt=True)
            if after.startswith(before):
                return before[before.rindex(_MARK) + len(_MARK) :], after[len(before) :]
            broken = broken or PrefixBroken(
                f"chat template of {self._folder} rewrites earlier turns when a {message['role']!r} message "
                f"is added: {_parting(self.encode(before), self.encode(after), self._tokenizer)}; use a "
                "template that leaves earlier turns as they are"
            )
        assert broken is not None
        raise broken

    def check_prefix(self, known: Sequence[int], prompt: Sequence[int]) -> None:
        """Raise PrefixBroken, which names the first difference, unless ``prompt`` begins with ``known``."""
        if list(prompt[: len(known)]) != list(known):
            raise PrefixBroken(
                f"the next prompt does not begin with the {len(known)} tokens so far: "
                f"{_parting(known, prompt, self._tokenizer)}; something rewrote the history"
            )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _find_eos_ids(self, generation: dict[str, Any]) -> tuple[int, ...]:
        listed = generation.get("eos_token_id")
        ids = set(listed if isinstance(listed, list) else [] if listed is None else [listed])
        eos = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
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


def _json(path: Path) -> dict[str, Any]:
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


def _compile(text: str) -> jinja2.Template:
    """Compile a chat template in an environment like the one that `transformers` renders with."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise TemplateUnusable(f"chat template does not compile: {error}") from None


class _GenerationBlock(jinja2.ext.Extension):
    """Tag ``{% generation %}``: some templates mark assistant text with it; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012  (the attribute's type is fixed by jinja2)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
