"""Requests and answers of the route `/v1/chat/completions`, in OpenAI's form, and what all routes share. Pure.

A turn is sampled whole, and a request with `stream` gets it as one burst of events. The bound on an answer's length is
obeyed. What else a request says about sampling is the learner's: it is recorded, and the answers that do not do what
was demanded are counted.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.base import ChatMessage, ToolSchema, TurnFacts
from envs.calls import Call, final_text, read_answer, thought_of, without_thought
from envs.errors import EnvError
from envs.messages import message_of

RECORDED = ("temperature", "top_p", "top_k", "seed", "tool_choice")
"""Settings that the trajectory's info tells, and that nobody obeys."""
BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST_STOPS = 64
"""Stop strings that a request may have."""
SHOWN = 64
"""Characters of a setting that are recorded."""


def limit_in(content: Mapping[str, Any]) -> int | None:
    """Return the smallest of the bounds that a request sets on its answer; None if it sets none.

    Raises:
        EnvError: a bound is no whole number of at least 1.

    Example:
        >>> limit_in({"max_tokens": 9, "max_completion_tokens": 5})
        5
    """
    given = {name: content[name] for name in BOUNDS if content.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise EnvError(f"{name} = {value!r:.200}: give a whole number of at least 1")
    return min(given.values(), default=None)


def settings_in(content: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the settings of a request that are recorded.

    Example:
        >>> settings_in({"temperature": 0.2, "seed": None, "tool_choice": {"type": "any"}})
        {'temperature': 0.2, 'tool_choice': 'any'}
    """
    found: dict[str, str | float] = {}
    for name in RECORDED:
        value = content.get(name)
        value = value.get("type") if isinstance(value, Mapping) else value
        if isinstance(value, int) and abs(value) >= 2**63:
            # No such number can be sent with the trajectory.
            value = str(value) if abs(value) < 10**SHOWN else "a very large number"
        if isinstance(value, int | float):
            found[name] = value
        elif isinstance(value, str):
            found[name] = value[:SHOWN].encode("utf-8", "replace").decode("utf-8")
    return found


def demands_call(content: Mapping[str, Any]) -> bool:
    """Return whether a request wants an answer with a tool call.

    Example:
        >>> [demands_call({"tool_choice": choice}) for choice in ("required", "auto", {"type": "tool"}, None)]
        [True, False, True, False]
    """
    choice = content.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    return kind in ("required", "any", "function", "tool")


def fields_ignored(content: Mapping[str, Any], *read: str) -> int:
    """Return how many fields of a request nobody reads.

    Args:
        read: the fields that its route reads, apart from those of this module.

    Example:
        >>> fields_ignored({"messages": [], "seed": 1, "store": False, "metadata": {}}, "messages")
        2
    """
    return len(set(content) - {"model", "tools", "stream", *RECORDED, *BOUNDS, *read})


@dataclass(frozen=True)
class ChatRequest:
    """One request of an agent."""

    messages: list[ChatMessage]
    """The conversation, in the form that environments use."""
    tools: list[ToolSchema]
    model: str
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    """True if a stream ends with the number of tokens."""
    max_tokens: int | None = None
    """Most tokens that the answer may have; None: as many as the run allows."""
    settings: dict[str, str | float] = field(default_factory=dict)
    """Sampling settings of the request, which nobody obeys."""
    demands_call: bool = False
    """True if it wants an answer with a tool call."""
    fields_ignored: int = 0
    """Number of its fields that nobody reads."""


@dataclass(frozen=True)
class Reply:
    """The policy's turn, as an agent gets it."""

    message: dict[str, Any]
    finish_reason: str
    facts: TurnFacts
    stopped_by: str = ""
    """Stop string at which the text ends; "": none of the request's."""
    unreadable: int = 0
    """Number of tool calls that begin in the text and cannot be read."""
    told: tuple[ChatMessage, ...] = ()
    """If there are such calls: the turn as it was written, and an error for each of its calls, for the policy."""


def parse_request(body: bytes) -> ChatRequest:
    """Return the request in a body. Fields that are not known are ignored, as sampling parameters are.

    Raises:
        EnvError: the body is no such request, or asks for what cannot be had.

    Example:
        >>> parse_request(b'{"messages": [{"role": "developer", "content": "Be brief."}]}').messages
        [{'role': 'system', 'content': 'Be brief.'}]
    """
    content = fields_of(body)
    messages = content.get("messages")
    if not isinstance(messages, list) or not messages:
        raise EnvError('the body has no "messages"')
    if content.get("n") not in (None, 1):
        raise EnvError(f"n = {content['n']}: an agent gets one answer to a request")
    options = content.get("stream_options")
    return ChatRequest(
        messages=[message_of(message) for message in messages],
        tools=[tool_of(tool, tool.get("function")) for tool in functions_in(content)],
        model=str(content.get("model", "")),
        stop=stops_in(content, "stop"),
        stream=bool(content.get("stream")),
        usage=isinstance(options, dict) and bool(options.get("include_usage")),
        max_tokens=limit_in(content),
        settings=settings_in(content),
        demands_call=demands_call(content),
        fields_ignored=fields_ignored(content, "messages", "stop", "stream_options", "n"),
    )


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a body; none if it is JSON, but no object.

    Raises:
        EnvError: it is not JSON, which has neither NaN nor infinity.

    Example:
        >>> fields_of(b'{"n": 1}'), fields_of(b"[]")
        ({'n': 1}, {})
    """
    try:
        content = json.loads(body, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"the body is not JSON: {error}") from None
    return content if isinstance(content, dict) else {}


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:SHOWN]} is too large a number")
    return number


def stops_in(content: Mapping[str, Any], name: str, *, alone: bool = True) -> tuple[str, ...]:
    """Return the stop strings of a request: a list of texts, or a text if it may stand ``alone``.

    Raises:
        EnvError: they are something else, or more than `MOST_STOPS`.

    Example:
        >>> stops_in({"stop": "end"}, "stop"), stops_in({}, "stop")
        (('end',), ())
    """
    stop = content.get(name) or []
    stop = [stop] if isinstance(stop, str) and alone else stop
    if not isinstance(stop, list) or not all(isinstance(string, str) for string in stop):
        raise EnvError(f"{name} = {stop!r:.200}: give {'a text, or ' if alone else ''}a list of texts")
    if len(stop) > MOST_STOPS:
        # Each of them is looked for in the whole answer.
        raise EnvError(f"{name} has {len(stop)} texts, at most {MOST_STOPS}")
    return tuple(stop)


def functions_in(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tools of a request that are functions; the others cannot be called here.

    Raises:
        EnvError: "tools" is not a list of objects.
    """
    tools = content.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise EnvError(f"tools = {tools!r:.200}: give a list of objects")
    return [tool for tool in tools if tool.get("type") == "function"]


def tool_of(tool: Mapping[str, Any], function: Any) -> ToolSchema:
    """Return a tool as chat templates take it.

    Args:
        tool: the tool, for errors.
        function: its name, description and parameters.

    Raises:
        EnvError: it has no name, or its parameters are no object.
    """
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise EnvError(f"a tool of type function has no name: {tool!r:.200}")
    made = {
        key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None
    }
    if not isinstance(made.get("parameters", {}), Mapping):
        raise EnvError(f"the parameters of tool {made['name']!r} are no object: {made['parameters']!r:.200}")
    return {"type": "function", "function": made}


def make_reply(answer: str, request: ChatRequest, turn: int, facts: TurnFacts) -> Reply:
    """Return what the agent gets for an answer of the policy.

    Tool calls that can be read become calls. The text ends before the request's first stop string; the tokens behind
    it stay in the trajectory.

    Args:
        answer: text of the turn, without its end token.
        request: the request that it answers.
        turn: number of the turn, from which the ids of calls are made.
        facts: number of tokens.

    Example:
        >>> request = parse_request(b'{"messages": [{"role": "user", "content": "2 + 2?"}], "stop": "\\\\n"}')
        >>> make_reply("4\\nOr 5?", request, 0, TurnFacts(9, 5, cut=False)).message
        {'role': 'assistant', 'content': '4'}
    """
    schemas = {tool["function"]["name"]: tool for tool in request.tools}
    text = without_thought(answer, schemas)
    ends = [(at, stop) for stop in request.stop if stop and (at := text.find(stop)) >= 0]
    end, stopped_by = min(ends, default=(len(text), ""))
    text = text[:end]
    read = read_answer(text, schemas) if schemas else None
    found = read.calls if read is not None else []
    calls = [call for call in found if not call.error]
    text = final_text(text)
    if calls and read is not None:
        # In gpt-oss' form, what is not in the channel for the user is thought.
        text = final_text(read.text).strip()
        text = "" if text.startswith("<|channel|>") else text
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
    if thought := thought_of(answer, schemas):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for number, call in enumerate(calls)
        ]
    reason = "tool_calls" if calls else "length" if facts.cut and not ends else "stop"
    unreadable = len(found) - len(calls)
    return Reply(
        message,
        reason,
        facts,
        stopped_by,
        unreadable,
        _told(without_thought(answer, schemas), found) if unreadable else (),
    )


def _told(text: str, calls: Sequence[Call]) -> tuple[ChatMessage, ...]:
    """Return what the policy reads in place of results: none of the calls was run."""
    said: ChatMessage = {"role": "assistant", "content": text}
    results: list[ChatMessage] = []
    for number, call in enumerate(calls):
        why = call.error or "it was not run, because another call of this answer cannot be read"
        # Nine letters and digits, because Mistral's template takes no other ids.
        result: ChatMessage = {
            "role": "tool",
            "content": f"Error: {why}",
            "tool_call_id": f"call{number:05d}",
        }
        results.append({**result, "name": call.name} if call.name else result)
    return (said, *results)


def usage(facts: TurnFacts) -> dict[str, int]:
    """Return the number of tokens in the API's words."""
    prompt, answer = facts.prompt_tokens, facts.answer_tokens
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def completion(reply: Reply, request: ChatRequest, name: str, created: int) -> dict[str, Any]:
    """Return the body of an answer. ``name`` is the answer's id, and ``created`` is in seconds since 1970."""
    choice = {"index": 0, "message": reply.message, "logprobs": None, "finish_reason": reply.finish_reason}
    head = {"id": name, "object": "chat.completion", "created": created, "model": request.model}
    return {**head, "choices": [choice], "usage": usage(reply.facts)}


def chunks(reply: Reply, request: ChatRequest, name: str, created: int) -> Iterator[bytes]:
    """Yield the server-sent events of a streamed answer, up to ``[DONE]``."""
    head = {"id": name, "object": "chat.completion.chunk", "created": created, "model": request.model}
    delta = {key: value for key, value in reply.message.items() if key != "tool_calls"}
    deltas: list[dict[str, Any]] = [delta]
    deltas += [
        {"tool_calls": [{"index": i, **call}]} for i, call in enumerate(reply.message.get("tool_calls", ()))
    ]
    for delta in deltas:
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}]})
    if request.usage:
        yield _event({**head, "choices": [], "usage": usage(reply.facts)})
    yield b"data: [DONE]\n\n"


def error_body(message: str, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return the body of an error in the API's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_event(status: int, body: dict[str, Any]) -> bytes:
    """Return the event that ends a stream in which no answer came. ``body`` is that of the error.

    Example:
        >>> error_event(503, error_body("gone", kind="server_error"))[:32]
        b'data: {"error": {"message": "gon'
    """
    return _event(body)


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
