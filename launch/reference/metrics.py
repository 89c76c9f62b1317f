"""Fills the tables of docs/run/metrics.md from the gauges that the code declares."""

import re
from collections.abc import Mapping

from broker.status import BROKER
from envs.agent.session import GAUGES as AGENT
from envs.gym.suite import GAUGES as GYMNASIUM
from envs.remote.suite import GAUGES as REMOTE
from envs.rows.suite import GAUGES as ROWS
from envs.scoring.scorer import GAUGES as SCORER
from envs.tools.suite import GAUGES as TOOLS
from learner.gauges import (
    CRITIC,
    ENTROPY,
    EVALUATION,
    EVALUATION_SETS,
    FAMILY,
    HISTOGRAMS,
    METHODS,
    REPLAY,
    ROLLOUT,
    UPDATE,
)
from protocol.gauges import ACTOR, ENV, GENERATOR, Gauge

SECTIONS: dict[str, tuple[str, Mapping[str, Gauge]]] = {
    "rollout": ("", ROLLOUT),
    "update": ("", UPDATE),
    "methods": ("", METHODS),
    "entropy": ("", ENTROPY),
    "critic": ("", CRITIC),
    "replay": ("", REPLAY),
    "family": ("", FAMILY),
    "generator": ("generator/", GENERATOR),
    "actor": ("actor/", ACTOR),
    "env": (ENV, {**ROWS, **TOOLS, **AGENT, **GYMNASIUM, **REMOTE, **SCORER}),
    "broker": ("broker/", BROKER),
    "evaluation": ("", EVALUATION),
    "evaluation_sets": ("", EVALUATION_SETS),
    "histograms": ("histogram/", HISTOGRAMS),
}
"""Sections of the page, each with the prefix of its tags and its gauges."""
_PLACE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def tags() -> list[str]:
    """Return every tag that TensorBoard may show, except the tags of a user's own environments."""
    return [prefix + name for prefix, gauges in SECTIONS.values() for name in gauges]


def fill_tables(page: str) -> str:
    """Return the page with new tables between each ``<!-- table: SECTION -->`` and ``<!-- end -->``.

    Raises:
        KeyError: the page names a section that does not exist.
    """
    return _PLACE.sub(lambda match: _table(match[1]), page)


def _table(section: str) -> str:
    prefix, gauges = SECTIONS[section]
    rows = [f"| `{prefix}{gauge.name}` | {gauge.unit} | {gauge.meaning} |" for gauge in gauges.values()]
    return "\n".join(
        [f"<!-- table: {section} -->", "| tag | unit | meaning |", "|---|---|---|", *rows, "<!-- end -->"]
    )
