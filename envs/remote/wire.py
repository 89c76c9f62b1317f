"""Bodies between an environment server and its clients, as JSON, errors among them. Pure.

`docs/run/env-servers.md` lists the routes.
"""

import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from envs.base import StepResult, SuiteFacts, TurnFacts
from envs.errors import EnvError, RemoteFailed, ServerLost, ServiceFailed
from envs.user_code import place_of_error

BODY_BYTES = 16 * 2**20
"""Largest body of a request or an answer."""
PROTOCOL = 1
"""Version of these bodies. A client refuses a server of another one."""
GIVEN_UP = "given_up"
"""Name in the query of a request that ends an episode: it ends by nobody's fault, and its task runs again."""


def encoded(content: Any) -> bytes:
    """Return content as JSON. Numbers of numpy become numbers; what JSON does not know becomes a text.

    Raises:
        EnvError: the content has a cycle, or a key that is no text.

    Example:
        >>> import numpy
        >>> encoded({"reward": numpy.float32(0.5), "at": (1, 2), "of": {3}})
        b'{"reward": 0.5, "at": [1, 2], "of": "{3}"}'
    """
    try:
        return json.dumps(content, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvError(f"what the environment returned cannot be sent: {error}") from None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def decoded(body: bytes) -> dict[str, Any]:
    """Return the map in a body.

    Raises:
        EnvError: it is no map in JSON.

    Example:
        >>> decoded(b'{"done": true}')
        {'done': True}
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EnvError(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise EnvError("the body is not a JSON object")
    return content


def result_body(result: Any) -> dict[str, Any]:
    """Return the body of a step's result.

    Raises:
        EnvError: it is no result.

    Example:
        >>> result_body(StepResult({"role": "tool", "content": "7"}))["messages"]
        [{'role': 'tool', 'content': '7'}]
    """
    if not isinstance(result, StepResult):
        raise EnvError(f"step returned {result!r:.200}, not a StepResult")
    return {
        "messages": result.messages(),
        "rewards": result.rewards,
        "done": bool(result.done),
        "correct": None if result.correct is None else bool(result.correct),
        "info": result.info,
        "after": result.after,
        "tools": None if result.tools is None else list(result.tools),
        "auxiliary": list(result.auxiliary),
        "marks": dict(result.marks),
        "earlier": {str(number): rewards for number, rewards in result.earlier.items()},
        "hints": [result.hints] if isinstance(result.hints, str) else list(result.hints),
        "answer": result.answer,
        "target": result.target,
    }


def result_of(body: Mapping[str, Any]) -> StepResult:
    """Return the result in a body.

    Raises:
        EnvError: it is none.

    Example:
        >>> result_of(result_body(StepResult(rewards={"exact": 1.0}, done=True, correct=True))).rewards
        {'exact': 1.0}
    """
    kinds = {"messages": list, "rewards": dict, "done": bool, "info": dict, "auxiliary": list, "marks": dict}
    for key, kind in kinds.items():
        if not isinstance(body.get(key), kind):
            raise EnvError(f"the server's answer to a step has no valid {key!r}: {body.get(key)!r:.200}")
    earlier = body.get("earlier") or {}
    if not isinstance(earlier, dict) or not all(str(number).isdecimal() for number in earlier):
        raise EnvError(f"the server's answer to a step has no valid 'earlier': {earlier!r:.200}")
    if not isinstance(body.get("hints", ()), list | tuple):
        raise EnvError(f"the server's answer to a step has no valid 'hints': {body['hints']!r:.200}")
    return StepResult(
        body["messages"],
        body["rewards"],
        body["done"],
        body.get("correct"),
        body["info"],
        after=body.get("after"),
        tools=body.get("tools"),
        auxiliary=body["auxiliary"],
        marks=body["marks"],
        earlier={int(number): rewards for number, rewards in earlier.items()},
        # A server of an earlier release gives none.
        hints=tuple(body.get("hints", ())),
        answer=body.get("answer"),
        target=body.get("target"),
    )


def turn_facts_of(body: Any) -> TurnFacts | None:
    """Return the facts of a turn, or None if the body has none.

    Example:
        >>> turn_facts_of(asdict(TurnFacts(5, 3, cut=False))), turn_facts_of(None)
        (TurnFacts(prompt_tokens=5, answer_tokens=3, cut=False), None)
    """
    return TurnFacts(**body) if isinstance(body, dict) else None


def facts_body(facts: SuiteFacts) -> dict[str, Any]:
    """Return the body of a suite's facts."""
    return asdict(facts)


def facts_of(body: Mapping[str, Any]) -> SuiteFacts:
    """Return the facts in a body.

    Example:
        >>> facts = SuiteFacts(heldout_tasks=3, reward_names=("exact",), longest_tasks=(("train", 7, "a.jsonl:8"),))
        >>> facts_of(decoded(encoded(facts_body(facts)))) == facts
        True
    """
    names, marks = body.get("reward_names"), body.get("mark_names")
    return SuiteFacts(
        heldout_tasks=body.get("heldout_tasks"),
        reward_names=None if names is None else tuple(names),
        longest_tasks=tuple((split, index, place) for split, index, place in body.get("longest_tasks", ())),
        remarks=tuple(body.get("remarks", ())),
        heldout_by_env=dict(body.get("heldout_by_env", {})),
        mark_names=None if marks is None else tuple(marks),
        hints=body.get("hints"),
        own_prompts=bool(body.get("own_prompts", False)),
        train_tasks=body.get("train_tasks"),
    )


FAILED = 422
"""Status of an error of the environment."""
SERVICE = 503
"""Status of an error that is nobody's fault."""
FULL = 429
"""Status for a further episode on a server that has no room for it."""
UNKNOWN = 404
"""Status for an episode that the server does not have."""
TAIL_LINES = 6
"""Lines of a traceback that an answer has."""
TEXT = 1_000
"""Characters of an error's text that an answer has."""


def failure_body(error: BaseException, *, blameless: bool) -> dict[str, Any]:
    """Return the body for an error.

    Args:
        blameless: the environment is not at fault.

    Example:
        >>> failure_body(KeyError("answer"), blameless=False)["error"]["kind"]
        'KeyError'
    """
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    found = {
        "blameless": blameless,
        "kind": type(error).__name__,
        "message": " ".join(str(error).split())[:TEXT],
        "place": place_of_error(error) if error.__traceback__ is not None else "",
        # The last line is the error itself.
        "lines": [line.strip()[:TEXT] for line in lines[-TAIL_LINES - 1 : -1]],
    }
    return {"error": found}


def error_of(status: int, body: Mapping[str, Any], url: str) -> ServiceFailed | RemoteFailed:
    """Return the error that an answer means.

    Args:
        status: status of the answer, not 200.
        url: address of the server, for the text.

    Example:
        >>> body = failure_body(KeyError("answer"), blameless=False)
        >>> str(error_of(FAILED, body, "http://127.0.0.1:80"))
        "KeyError: 'answer', on http://127.0.0.1:80"
        >>> type(error_of(404, {}, "http://127.0.0.1:80")).__name__
        'ServerLost'
    """
    found = body.get("error")
    found = found if isinstance(found, Mapping) else {}
    kind, message, place = (str(found.get(key, "")) for key in ("kind", "message", "place"))
    if status == FAILED and kind:
        where = f" in {place}" if place else ""
        given = found.get("lines")
        lines = " / ".join(str(line) for line in given) if isinstance(given, list) else ""
        return RemoteFailed(
            f"{kind}: {message}{where}, on {url}" + (f"; last lines: {lines}" if lines else "")
        )
    if status == SERVICE and kind:
        return ServiceFailed(f"on {url}: {kind}: {message}")
    cure = "; is it the token of the server's keys folder?" if status == 401 else ""
    why = f": {message}" if message else ""
    # A server that refuses a request would refuse it again. One that has lost an episode can play another.
    kind_of_error = ServerLost if status == UNKNOWN or status >= 500 else ServiceFailed
    return kind_of_error(f"the environment server {url} answered with status {status}{why}{cure}")
