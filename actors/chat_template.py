"""Renders conversations with a model's chat template, and finds the text that messages add behind an answer.

What was sampled is never rendered again. So only the text *behind* an assistant turn matters. A stand-in takes
the place of the answer: an assistant message with a mark at the end of its content, or of each tool call. The text
behind the mark is the same whatever the answer was. A template may therefore rewrite the thought of an earlier
answer, as Qwen3 does. It may not change the messages before the answer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actors.errors import ActorError, PrefixBroken, TemplateUnusable
from envs.base import ChatMessage, ToolSchema

MARK = "OFFBEATANSWER"
"""Word that no template changes, at the end of the stand-in."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Names that the renderer itself gives to a template."""
KEPT = 256
"""Upper limit of the openings that are kept."""
_PROBE = "OFFBEATPROBE"
_THOUGHT = "OFFBEATTHOUGHT"
_QUESTION: ChatMessage = {"role": "user", "content": "Question"}
_CURE = (
    "use a template that takes such messages, in chat_template.jinja of the model folder, or let the environment "
    "send messages of other roles"
)


@dataclass(frozen=True)
class Opening:
    """Text between an answer and the first message behind it, and the stand-in that it was found with.

    Attributes:
        text: text behind the mark, up to the content of the first message.
        calls: whether the stand-in has tool calls; a mark then stands inside each call.
        as_text: whether the arguments of the calls are JSON text, not a map.
        marks: number of marks that the template writes. gpt-oss writes only the first call of a message.
    """

    text: str
    calls: bool
    as_text: bool
    marks: int = 1

    def kept_from(self, sampled_end: str, ends: Sequence[str]) -> int:
        """Return where the text begins that the policy has not sampled itself.

        Args:
            sampled_end: end token that the policy sampled; "" if the turn was cut.
            ends: all end tokens of the model.

        Example:
            >>> opening = Opening('"}</tool_call><|im_end|>\\n<|im_start|>user\\n', calls=True, as_text=False)
            >>> opening.text[opening.kept_from("<|im_end|>", ["<|im_end|>"]):]
            '\\n<|im_start|>user\\n'
            >>> opening.text[opening.kept_from("", ["<|im_end|>"]):]
            '<|im_end|>\\n<|im_start|>user\\n'
        """
        if sampled_end and sampled_end in self.text:
            return self.text.index(sampled_end) + len(sampled_end)
        if self.calls:
            return min(self.text.index(end) for end in ends if end in self.text)
        return 0


class ChatTemplate:
    """A chat template with the special tokens and arguments that it is rendered with.

    Args:
        text: the template, in Jinja.
        special: special tokens by role, for example ``eos_token``.
        arguments: further variables of the template, such as ``enable_thinking``.
        ends: texts of the tokens that end an assistant turn.
        place: file or folder, for errors.

    Raises:
        TemplateUnusable: the template does not compile, or ``arguments`` has a name that only the renderer may give.
    """

    def __init__(
        self,
        text: str,
        special: Mapping[str, str],
        *,
        arguments: Mapping[str, Any] | None = None,
        ends: Sequence[str] = (),
        place: str = "",
    ) -> None:
        if taken := sorted(RESERVED & (arguments or {}).keys()):
            raise TemplateUnusable(
                f"model.template_args: {', '.join(taken)}: Offbeat itself gives this to the template; leave it out"
            )
        self._template = _compile(text)
        self._variables = {**special, **(arguments or {})}
        self.ends, self._place = tuple(ends), place
        self._openings: dict[tuple[Any, ...], Opening] = {}

    def text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSchema] = (),
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the conversation as the template renders it.

        Raises:
            TemplateUnusable: the template rejects the conversation.
        """
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            roles = [m["role"] for m in messages]
            raise TemplateUnusable(f"chat template of {self._place}: {error} (roles {roles})") from None

    def behind_answer(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()
    ) -> tuple[str, Opening]:
        """Return the text that messages add behind an answer, up to the next answer, and its opening.

        Raises:
            PrefixBroken: the template changes earlier messages when these follow.
            TemplateUnusable: the template rejects or leaves out these messages.
        """
        opening = self.opening(messages, tools)
        stand_in = _stand_in(messages, opening.calls, opening.as_text)
        # The schemas stand before the answer, so one is as good as all, and renders faster.
        after = self.text([_QUESTION, stand_in, *messages], tools[:1], add_generation_prompt=True)
        return after.split(MARK, opening.marks)[-1], opening

    def opening(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Opening:
        """Return the text that opens messages of these roles and names behind an answer.

        Raises:
            PrefixBroken, TemplateUnusable: see `behind_answer`.
        """
        key = (bool(tools), *((m["role"], m.get("name", "")) for m in messages))
        if key not in self._openings:
            # Names of tools may come from the model, so there is no end to them.
            if len(self._openings) >= KEPT:
                self._openings.clear()
            self._openings[key] = self._find_opening(messages, tools)
        return self._openings[key]

    def drops_thoughts(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> bool:
        """Return whether the template leaves out the thought of an answer once these messages follow."""
        forms = (
            {"content": f"<think>\n{_THOUGHT}\n</think>\n\n{MARK}"},
            {"content": MARK, "reasoning_content": _THOUGHT, "thinking": _THOUGHT},
        )
        for form in forms:
            answer = cast(ChatMessage, {"role": "assistant", **form})
            try:
                alone = self.text([_QUESTION, answer], tools)
                followed = self.text([_QUESTION, answer, *messages], tools, add_generation_prompt=True)
            except TemplateUnusable:
                continue
            if _THOUGHT in alone and _THOUGHT not in followed:
                return True
        return False

    def _find_opening(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> Opening:
        """Try the stand-ins one after the other. If none works, raise the error of the plain one."""
        plain = (False, False)
        with_calls = [(True, False), (True, True)] if any(m["role"] == "tool" for m in messages) else []
        named = any(m["role"] == "tool" and m.get("name") for m in messages)
        refused: dict[tuple[bool, bool], ActorError] = {}
        for form in [*with_calls, plain] if named else [plain, *with_calls]:
            try:
                return self._try_stand_in(messages, tools, *form)
            except (PrefixBroken, TemplateUnusable) as error:
                refused[form] = error
        raise refused[plain]

    def _try_stand_in(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema], calls: bool, as_text: bool
    ) -> Opening:
        """Render words in place of the messages' contents, and check what the template makes of them."""
        probe = [cast(ChatMessage, {**m, "content": f"{_PROBE}{n}."}) for n, m in enumerate(messages)]
        roles = " and ".join(dict.fromkeys(repr(m["role"]) for m in messages))
        head = self._text_before_answer(tools)
        stand_in = _stand_in(messages, calls, as_text)
        after = self.text([_QUESTION, stand_in, *probe], tools, add_generation_prompt=True)
        if not after.startswith(head):
            raise PrefixBroken(
                f"chat template of {self._place} rewrites earlier messages when {roles} messages follow an answer: "
                f"{_parting(head, after)}; use a template that leaves earlier messages as they are"
            )
        if MARK not in after:
            raise TemplateUnusable(f"chat template of {self._place} leaves out an earlier answer")
        behind = after[after.rindex(MARK) + len(MARK) :]
        for message in probe:
            if message["content"] not in behind:
                raise TemplateUnusable(
                    f"chat template of {self._place} leaves out a {message['role']!r} message that follows an answer; "
                    f"{_CURE}"
                )
        text = behind[: behind.index(probe[0]["content"])]
        opening = Opening(text, calls, as_text, after.count(MARK))
        if calls and not any(end in opening.text for end in self.ends):
            raise TemplateUnusable(f"chat template of {self._place}: no end token behind a tool call")
        return opening

    def _text_before_answer(self, tools: Sequence[ToolSchema]) -> str:
        """Return the text of the messages before an answer, without what opens the answer."""
        alone = self.text([_QUESTION], tools)
        prompt = self.text([_QUESTION], tools, add_generation_prompt=True)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(alone, prompt, strict=False))
        return "".join(a for a, _ in same)


def _stand_in(messages: Sequence[ChatMessage], calls: bool, as_text: bool) -> ChatMessage:
    """Return an assistant message that ends in `MARK`, with a call for each tool message if ``calls``."""
    if not calls:
        return {"role": "assistant", "content": MARK}
    results = [m for m in messages if m["role"] == "tool"]
    listed = []
    arguments = {"a": MARK}
    for number, result in enumerate(results):
        listed.append(
            {
                "id": result.get("tool_call_id") or f"call{number:05d}",
                "type": "function",
                "function": {
                    "name": result.get("name") or "tool",
                    "arguments": json.dumps(arguments) if as_text else arguments,
                },
            }
        )
    return {"role": "assistant", "content": "", "tool_calls": listed}


def _parting(before: str, after: str) -> str:
    """Return where two texts differ first, with a few characters around that place."""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after))
    around = slice(max(0, at - 12), at + 24)
    return f"{before[around]!r} became {after[around]!r}"


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
