"""Sends samples of a run as spans, after the fact: plain OTLP over HTTP with JSON, without an SDK.

Receivers are OpenTelemetry collectors, and products that take OTLP. A sample is a trace: the trajectory, and below it
what its turns waited, sampled and spent in tools, where the journal still has it. The attributes have the names of
OpenInference and of OpenTelemetry's conventions for generative AI. Format:
https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

import hashlib
import json
import os
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit

from broker.errors import JournalError
from launch.commands.journal import PlacedSegment, trajectories
from launch.errors import LaunchError
from learner.samples import Sample, answer_of, encode_line, prompt_of
from protocol import names

PATH = "/v1/traces"
TIMEOUT_S = 30.0
SPANS_AT_ONCE = 200
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""Variable of the environment with headers, as ``name=value,name=value``: a secret does not stand on a command line."""
MAX_SAID = 300


class Phase(NamedTuple):
    """A stretch of a turn, in seconds since 1970."""

    name: str
    turn: int
    start: float
    end: float


def send_spans(samples: Sequence[Sample], url: str, *, run: str, journal: Path) -> str:
    """Send samples to a receiver. Return a line about the result.

    Args:
        url: address of the receiver; ``/v1/traces`` is put behind it unless it ends so.
        run: name of the run, which becomes the service.
        journal: folder of the run's journal, for the times; it may be missing.

    Raises:
        LaunchError: the address is none, or the receiver does not take the spans.
    """
    target, headers = target_of(url), headers_of(os.environ.get(HEADERS, ""))
    times = phases_by_task(journal)
    spans = [span for sample in samples for span in spans_of(sample, run, times.get(sample.task, []))]
    for start in range(0, len(spans), SPANS_AT_ONCE):
        _post(target, headers, request_of(spans[start : start + SPANS_AT_ONCE], run))
    return f"{target}: {len(samples)} samples in {len(spans)} spans"


def target_of(url: str) -> str:
    """Return the address that spans are posted to.

    Raises:
        LaunchError: the address is not http or https, or has a password in it.

    Example:
        >>> target_of("http://localhost:6006"), target_of("https://host/api/public/otel/v1/traces")
        ('http://localhost:6006/v1/traces', 'https://host/api/public/otel/v1/traces')
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise LaunchError(f"--otlp {url}: give an address such as http://localhost:6006")
    if parts.username or parts.password:
        raise LaunchError(
            f"--otlp: a password does not belong into an address; set {HEADERS}=authorization=..."
        )
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith(PATH) else path + PATH).geturl()


def headers_of(text: str) -> dict[str, str]:
    """Return the headers in `HEADERS`.

    Example:
        >>> headers_of("authorization=Basic%20abc=,x-key=1")
        {'authorization': 'Basic abc=', 'x-key': '1'}
    """
    pairs = [pair.partition("=") for pair in text.split(",") if "=" in pair]
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows nothing, so that headers with a secret go to nobody else."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(target: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> None:
    request = urllib.request.Request(
        target,
        data=json.dumps(body).encode(),
        headers={**headers, "Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S) as answer:
            answer.read(MAX_SAID)
    except HTTPError as error:
        with error:
            said = error.read(MAX_SAID).decode(errors="replace")
        raise LaunchError(f"--otlp {target}: {error.code} {error.reason}: {ascii(said)[1:-1]}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise LaunchError(f"--otlp {target}: {reason}; is a receiver there?") from None


def request_of(spans: Sequence[Mapping[str, Any]], run: str) -> dict[str, Any]:
    """Return the body of a request (ExportTraceServiceRequest)."""
    resource = {"attributes": attributes({"service.name": f"offbeat/{run}"})}
    return {
        "resourceSpans": [
            {"resource": resource, "scopeSpans": [{"scope": {"name": "offbeat"}, "spans": list(spans)}]}
        ]
    }


def attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return attributes in the form of OTLP; None is left out.

    Example:
        >>> attributes({"a": True, "b": 2, "c": None})
        [{'key': 'a', 'value': {'boolValue': True}}, {'key': 'b', 'value': {'intValue': '2'}}]
    """
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            # 64-bit integers are texts in the JSON of protobuf.
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case _:
            return {"stringValue": str(value)}


def spans_of(sample: Sample, run: str, phases: Sequence[Phase]) -> Iterator[dict[str, Any]]:
    """Yield the spans of a sample: the trajectory, then its phases."""
    trace = _ident(16, run, encode_line(sample))
    root = _ident(8, trace, "trajectory")
    written = sample.time or 0.0
    start = min((phase.start for phase in phases), default=written)
    end = max((phase.end for phase in phases), default=written)
    facts = {
        name: getattr(sample, name)
        for name in (
            "step", "policy_version", "split", "evaluation", "env", "group", "chosen", "advantage", "version_min",
            "version_max", "lag", "end", "correct", "answer", "target", "replayed",
        )
    }  # fmt: skip
    yield _span(
        trace, root, "", f"{sample.env} {sample.task}", start, end,
        {
            "openinference.span.kind": "AGENT",
            "input.value": prompt_of(sample),
            "output.value": answer_of(sample),
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.request.model": f"offbeat/{run}",
            "session.id": sample.group,
            **{f"offbeat.{name}": value for name, value in facts.items()},
            "offbeat.return": sample.return_,
            **{f"offbeat.reward.{name}": value for name, value in sample.rewards.items()},
        },
        failure=sample.failure if sample.failed else "",
    )  # fmt: skip
    for number, phase in enumerate(phases):
        kind = "TOOL" if phase.name == "tools" else "LLM"
        values = {"openinference.span.kind": kind, "offbeat.turn": phase.turn}
        yield _span(
            trace,
            _ident(8, trace, number),
            root,
            f"{phase.name} {phase.turn}",
            phase.start,
            phase.end,
            values,
        )


def _ident(nbytes: int, *parts: object) -> str:
    """Return an id that follows from its parts, so that a span that is sent twice is one."""
    text = "\0".join(map(str, parts))
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=nbytes).hexdigest()


def _span(
    trace: str,
    span: str,
    parent: str,
    name: str,
    start: float,
    end: float,
    values: Mapping[str, Any],
    *,
    failure: str = "",
) -> dict[str, Any]:
    status = {"code": 2, "message": failure} if failure else {"code": 1}
    return {
        "traceId": trace,
        "spanId": span,
        **({"parentSpanId": parent} if parent else {}),
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(int(start * 1e9)),
        "endTimeUnixNano": str(int(end * 1e9)),
        "attributes": attributes(values),
        "status": status,
    }


def phases_by_task(journal: Path) -> dict[str, list[Phase]]:
    """Return what the last attempt at each task did when; empty without a journal, or one without times."""
    try:
        found = trajectories(journal)
    except JournalError:
        return {}
    return {names.task_of(name): list(phases_of(held)) for name, held in found.items()}


def phases_of(held: Iterable[PlacedSegment]) -> Iterator[Phase]:
    """Yield the phases of a trajectory's turns.

    They end at the broker's time of arrival, less what came behind them in the segment, so that no clock of an actor's
    host counts.
    """
    for piece in held:
        at = piece.arrived
        if at is None:
            continue
        phases: list[Phase] = []
        for spent in reversed(piece.segment.times):
            for name in ("tools", "sampled", "waited"):
                seconds = getattr(spent, name)
                if seconds:
                    phases.append(Phase(name, spent.turn, at - seconds, at))
                    at -= seconds
        yield from reversed(phases)
