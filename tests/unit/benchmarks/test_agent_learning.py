"""Test the tasks of `benchmarks.agent_learning`, and what it prints of a run."""

import re

from benchmarks.agent_learning import program, rows

SUM = re.compile(r"(\d) (plus|minus|times) (\d)")

SUMMARY = {
    "seed": 3, "steps": 2, "training_seconds": 90.0, "tokens_trained": 1_500, "accuracy": {"tasks": 64},
    "evaluations": [{"step": 0, "accuracy": 0.25}, {"step": 2, "accuracy": 0.75}],
    "episodes": {"episodes": 64, "failed": 4, "failures": []},
    "policy_lag": {"mean_versions": 0.5, "max_versions": 2, "bound": 2},
}  # fmt: skip


def test_no_held_out_sum_is_trained_in_another_form():
    train, held = rows.make_rows()
    assert len(held) == rows.HELDOUT * len(rows.FORMS)

    def sums(of):
        return {SUM.search(row["question"]).groups() for row in of}

    assert not sums(train) & sums(held)


def test_most_demonstrations_call_a_wrong_tool():
    train, _ = rows.make_rows()
    wanted = [rows.TOOLS[SUM.search(row["question"])[2]] for row in train]
    right = sum(tool in row["messages"][1]["content"] for tool, row in zip(wanted, train, strict=True))
    assert abs(right / len(train) - rows.SHARES[0]) < 0.05


def test_the_table_shows_seeds_and_medians():
    lines = [{"step": 1, program.RETURN: 0.25}, {"step": 2, program.RETURN: 0.5, program.LAG: 1.0}]
    result = program.result_of(SUMMARY, lines) | {"load": 1.2}
    assert result["curves"][program.LAG] == [[2, 1.0]]
    last = program.table([result, result | {"seed": 4}]).splitlines()[-3:]
    assert last[0] == "| 3 | 0.25 | 0.75 | 2 | 1.5 | 64 (4) | 1,500 | 0.50 / 2 (2) | 1 |"
    assert last[2].startswith("| median | 0.25 | 0.75 |")
