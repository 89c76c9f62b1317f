"""Counts what agents ask for, and what becomes of it, over all episodes of a suite."""

from dataclasses import asdict, dataclass

from protocol.gauges import Gauge, table

GAUGES = table(
    [
        Gauge(
            "agent_requests_total", "requests", "requests of agents that were answered, of `agent`", "total"
        ),
        Gauge(
            "agent_repeats_total", "requests", "requests that came again, and got the first answer", "total"
        ),
        Gauge(
            "agent_refused_total",
            "requests",
            "requests that cannot be read, or that the chat template cannot render",
            "total",
        ),
        Gauge(
            "agent_withdrawn_total",
            "requests",
            "requests whose client hung up and did not come again, so that their sampling ended",
            "total",
        ),
        Gauge("agent_fields_ignored_total", "fields", "fields of requests that nobody reads", "total"),
        Gauge("agent_calls_total", "calls", "tool calls in the answers", "total"),
        Gauge(
            "agent_calls_unreadable_total",
            "calls",
            "tool calls that begin and cannot be read, so that agents get them as text",
            "total",
        ),
        Gauge(
            "agent_calls_missing_total",
            "answers",
            "answers without a tool call to requests that demand one",
            "total",
        ),
    ]
)
"""Gauges of the suite."""


@dataclass
class AgentCounts:
    """Counts of one process. The fields are those of `GAUGES`, without prefix and ending.

    Example:
        >>> sorted(AgentCounts(requests=2).gauges()) == sorted(GAUGES)
        True
    """

    requests: int = 0
    repeats: int = 0
    refused: int = 0
    withdrawn: int = 0
    fields_ignored: int = 0
    calls: int = 0
    calls_unreadable: int = 0
    calls_missing: int = 0

    def gauges(self) -> dict[str, float]:
        """Return the counts under the names of their gauges."""
        return {f"agent_{name}_total": float(value) for name, value in asdict(self).items()}
