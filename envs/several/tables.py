"""The ``[[env]]`` tables of a run file, checked."""

import re
from collections import Counter
from typing import Any

from envs.errors import EnvError

KEYS = ("name", "label", "weight", "params")
"""Keys of an ``[[env]]`` table."""
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,40}")


def checked(environments: Any) -> list[dict[str, Any]]:
    """Return the tables of ``[[env]]`` with all keys.

    Raises:
        EnvError: a key is unknown or missing, a weight is below 0, all are 0, or two tables have one label.
    """
    if not isinstance(environments, list | tuple) or not environments:
        raise EnvError("params.environments is empty: write one [[env]] table for each environment")
    tables = []
    for number, table in enumerate(environments):
        where = f"[[env]] number {number + 1}"
        if unknown := sorted(set(table) - set(KEYS)):
            raise EnvError(f"{where}: there is no key {unknown[0]!r}; it takes {', '.join(KEYS)}")
        if not isinstance(table.get("name"), str):
            raise EnvError(f"{where} has no name")
        label, weight = table.get("label", table["name"]), table.get("weight", 1.0)
        if not isinstance(label, str) or not _LABEL.fullmatch(label):
            raise EnvError(f"{where}: label {label!r}: write letters, digits, - and _ (at most 40)")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise EnvError(f"{where}: weight = {weight!r}: write a number, 0 or above")
        params = table.get("params", {})
        tables.append({"name": table["name"], "label": label, "weight": float(weight), "params": params})
    twice = [label for label, count in Counter(table["label"] for table in tables).items() if count > 1]
    if not any(table["weight"] for table in tables):
        raise EnvError(
            "every [[env]] has weight = 0: there is nothing to train on; give one a weight above 0"
        )
    if twice:
        raise EnvError(f"two [[env]] tables have the label {twice[0]!r}; give each a label of its own")
    return tables
