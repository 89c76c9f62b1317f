"""What became of every token, and how stale the trained ones were: sums over the journal's index. Pure."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from broker.core.records import OUTCOMES
from launch.view.annotations import AnnotationReader
from launch.view.columns import RowColumns, is_uniform, rewards_by
from launch.view.histograms import bin_edges, histogram
from launch.view.journal_index import UNKNOWN, JournalIndex, Row
from launch.view.overview import number
from launch.view.run_reader import Columns, RunFiles

HELD = "held"
MASKED = "trained: masked as too stale"
"""Tokens of trained trajectories that were older than the bound when they were trained, so they carried no gradient."""
LENGTH_BINS = 24
SERIES_POINTS = 400


def ledger_page(
    files: RunFiles, index: JournalIndex, kept: AnnotationReader, columns: RowColumns
) -> dict[str, Any]:
    """Return the ledger as a flow in action tokens, its sum in tokens, its course over the steps, and lengths.

    Action tokens are what generators sampled; tokens are those and the prompts and observations around them.
    """
    sums: dict[str, Counter[str]] = {}
    for row in index.rows:
        for piece in row.pieces:
            outcome = piece.outcome or HELD
            if outcome == "dropped":
                outcome = f"dropped: {why_dropped(row, index, kept.reasons)}"
            stale = 0 if files.bound is None else sum(n for lag, n in piece.lags if lag > files.bound)
            counts = sums.setdefault(outcome, Counter(tokens=0, action_tokens=0, segments=0))
            counts["tokens"] += piece.tokens
            counts["action_tokens"] += piece.action_tokens - stale
            counts["segments"] += 1
            if stale:
                sums.setdefault(MASKED, Counter())["action_tokens"] += stale
    ledger = index.ledger
    return {
        "flow": _flow(files, index, sums),
        "sum": None if ledger is None else _closing(ledger),
        "of_rows": {name: dict(counts) for name, counts in sums.items()},
        "meanings": meanings(),
        "bound": files.bound,
        "series": series(files.steps),
        "lengths": lengths(columns),
        "distance": files.steps.last("broker/length_distance_tokens"),
        "bias": files.steps.last("broker/length_bias_tokens"),
        "learner": files.summary.get("tokens_by_outcome") if files.summary else None,
        "rolled_back": None if ledger is None else ledger.rolled_back.tokens,
        "replayed": None if ledger is None else ledger.replayed_tokens,
        "redelivered": None if ledger is None else ledger.redelivered.tokens,
    }


def why_dropped(row: Row, index: JournalIndex, reasons: Mapping[str, str]) -> str:
    """Return why the learner did not train a trajectory: its own reason if it kept one, else what the journal tells.

    Args:
        reasons: the learner's, by trajectory.

    Example:
        >>> row = Row("e.0", "e", "e", 1, "env", "eval", "g", 0.0)
        >>> why_dropped(row, JournalIndex(__import__("pathlib").Path("none"), 1), {})
        'evaluated'
    """
    if row.purpose == "eval":
        return "evaluated"
    if row.status == "failed":
        return "failed"
    reason = reasons.get(row.trajectory, "")
    if reason == "uniform" or (not reason and is_uniform(index.groups.get(row.group, []))):
        return "equal returns in its group"
    return f"{reason}, by the learner" if reason else "by the learner"


def meanings() -> dict[str, str]:
    """Return what each outcome means, in the words of the broker's ledger."""
    return {
        **{str(name): text for name, text in OUTCOMES.items()},
        MASKED: "tokens of trained trajectories that lagged more than the bound, so that they carried no gradient",
        HELD: "tokens that wait for their episode, their group or the learner",
        UNKNOWN: "tokens whose outcome is in a file of the journal that is deleted or damaged",
    }


def _flow(files: RunFiles, index: JournalIndex, sums: Mapping[str, Counter[str]]) -> dict[str, Any]:
    ledger = index.ledger
    # The summary counts to the very end, the metrics to their last line.
    counts = [files.steps.last("generator/tokens_total"), (files.summary or {}).get("tokens_generated")]
    sampled = max((float(count) for count in counts if count is not None), default=None)
    if ledger is None:
        return {"sampled": sampled, "journaled": None, "delivered": None, "outcomes": {}}
    outcomes = {
        str(name): tally.action_tokens for name, tally in ledger.outcomes.items() if tally.action_tokens
    }
    held = ledger.stored.action_tokens - sum(tally.action_tokens for tally in ledger.outcomes.values())
    # The learner's reasons are known of the trajectories in the journal; all of them, unless files are deleted.
    reasons = {name: counts["action_tokens"] for name, counts in sums.items() if name.startswith("dropped: ")}
    if sum(reasons.values()) == outcomes.get("dropped", 0):
        outcomes.pop("dropped", None)
        outcomes |= {name: n for name, n in reasons.items() if n}
    trained, masked = outcomes.get("trained", 0), sums.get(MASKED, Counter())["action_tokens"]
    if masked and sums["trained"]["action_tokens"] + masked == trained:
        outcomes |= {"trained": trained - masked, MASKED: masked}
    return {
        "sampled": sampled,
        "journaled": ledger.stored.action_tokens,
        # Metrics are written once a step, so the newest line may be older than the journal.
        "not_journaled": None if sampled is None else max(0.0, sampled - ledger.stored.action_tokens),
        "delivered": ledger.delivered.action_tokens - ledger.redelivered.action_tokens,
        "outcomes": {**outcomes, HELD: held},
    }


def _closing(ledger: Any) -> dict[str, Any]:
    outcomes = {name: tally.tokens for name, tally in ledger.outcomes.items()}
    return {
        "stored": ledger.stored.tokens,
        "held": ledger.held_tokens,
        "outcomes": outcomes,
        "difference": ledger.stored.tokens - ledger.held_tokens - sum(outcomes.values()),
    }


def series(steps: Columns) -> dict[str, list[float | None]]:
    """Return the ledger's tallies over the learner steps, in tokens, from at most `SERIES_POINTS` steps."""
    prefix, suffix = "broker/ledger_", "_tokens"
    every = max(1, math.ceil(steps.rows / SERIES_POINTS))
    places = list(range(steps.rows))[::-1][::every][::-1]
    found = {"step": [number(steps["step"][i]) for i in places]}
    for name in ("held", *OUTCOMES):
        column = steps[f"{prefix}{name}{suffix}"]
        values = [number(column[i]) for i in places]
        if any(values):
            found[name] = values
    return found


def lengths(columns: RowColumns) -> dict[str, Any]:
    """Return histograms of the action tokens of finished training trajectories, and of those that were trained."""
    codes = columns.codes
    ended = columns["purpose"] == codes["purpose"].known("train")
    for status in ("unfinished", "failed"):
        ended &= columns["status"] != codes["status"].known(status)
    of_all = columns["length"][ended]
    trained = of_all[codes["outcome"].where(lambda outcome: "trained" in outcome)[columns["outcome"][ended]]]
    if not len(of_all):
        return {"edges": [], "all": [], "trained": []}
    edges = bin_edges([int(of_all.min()), int(of_all.max())], LENGTH_BINS, whole=True)
    return {
        "edges": edges,
        "all": histogram(of_all, edges),
        "trained": histogram(trained, edges),
        "mean_all": float(of_all.mean()),
        "mean_trained": float(trained.mean()) if len(trained) else None,
    }


# --- staleness ----------------------------------------------------------------------------------------------


def staleness_page(files: RunFiles, index: JournalIndex, kept: AnnotationReader) -> dict[str, Any]:
    """Return trained tokens by policy lag, with the mean reward of their trajectories, and what the bound did.

    A lag is the version that the commit updated, less the token's version on the newest line of versions.
    """
    reward_by = rewards_by(files.config)
    tokens: Counter[int] = Counter()
    rewards: dict[int, float] = {}
    trajectories: Counter[int] = Counter()
    for row in index.rows:
        reward, seen = reward_by(row), set()
        for piece in row.pieces:
            for lag, count in piece.lags:
                tokens[lag] += count
                if reward is not None:
                    rewards[lag] = rewards.get(lag, 0.0) + reward * count
                seen.add(lag)
        trajectories.update(seen)
    bound, sums = files.bound, kept.sums
    largest = [value for value in files.steps["learner/policy_lag_max_versions"] if not math.isnan(value)]
    return {
        "bound": bound,
        "lags": [
            {
                "lag": lag,
                "tokens": tokens[lag],
                "trajectories": trajectories[lag],
                "reward": rewards[lag] / tokens[lag] if lag in rewards else None,
                "beyond": bound is not None and lag > bound,
                **({} if sums is None else sums.at(lag)),
            }
            for lag in sorted(tokens)
        ],
        "tokens": sum(tokens.values()),
        "tokens_beyond": sum(n for lag, n in tokens.items() if bound is not None and lag > bound),
        "annotated": None if sums is None else float(sums.tokens.sum()),
        "carried_beyond": None if sums is None or bound is None else float(sums.carried[bound + 1 :].sum()),
        # The learner reports the largest lag of the tokens that carried gradient in each step.
        "steps": len(largest),
        "largest_with_gradient": max(largest, default=None),
        "steps_beyond": None if bound is None or not largest else sum(value > bound for value in largest),
        "mean": {
            "step": [number(value) for value in files.steps["step"]],
            "mean": [number(value) for value in files.steps["learner/policy_lag_mean_versions"]],
            "max": [number(value) for value in files.steps["learner/policy_lag_max_versions"]],
        },
    }
