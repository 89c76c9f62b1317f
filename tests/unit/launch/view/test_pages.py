"""Test that the numbers of the pages are those of the files, counted in a second way."""

import inspect
import json
import random
import re

import pytest

from launch.errors import BadQuestion, NotKept
from launch.view import overview
from launch.view.questions import ANSWERS, DOCS, Questions
from launch.view.table import SORTS
from tests.unit.launch.view.second_way import Sums
from tests.view_runs import BOUND, CLOCK, Maker, small_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def questions(folder):
    asked = Questions([folder])
    asked.runs["small"].read_all()
    return asked


@pytest.fixture(scope="module")
def sums(folder):
    return Sums(folder / "journal", BOUND)


def test_the_ledger_closes_on_the_sums_of_the_files(questions, sums):
    page = questions.ask("ledger", {})
    assert page["sum"]["difference"] == 0
    assert page["sum"]["stored"] == sum(sums.tokens.values()) == 200
    assert page["sum"]["held"] == sums.tokens["held"] == 40
    assert {name: n for name, n in page["sum"]["outcomes"].items() if n} == {
        name: n for name, n in sums.tokens.items() if name != "held"
    }


def test_the_flow_of_sampled_tokens_adds_up(questions, sums):
    flow = questions.ask("ledger", {})["flow"]
    sampled = sum(action for tokens in sums.of.values() for _, action, _ in tokens)
    assert flow["journaled"] == sampled == sum(flow["outcomes"].values())
    assert flow["outcomes"]["trained: masked as too stale"] == sums.beyond == 2
    assert flow["outcomes"]["trained"] == sum(sums.lags.values()) - sums.beyond
    assert flow["outcomes"]["dropped: evaluated"] == 10
    assert flow["outcomes"]["dropped: equal returns in its group"] == 20


def test_tokens_by_lag_are_counted_token_by_token(questions, sums):
    page = questions.ask("staleness", {})
    assert {one["lag"]: one["tokens"] for one in page["lags"]} == dict(sums.lags)
    assert page["tokens_beyond"] == sums.beyond
    assert [one["lag"] for one in page["lags"] if one["beyond"]] == [
        lag for lag in sorted(sums.lags) if lag > BOUND
    ]
    assert page["steps_beyond"] == 0


def test_ten_random_trajectories_have_the_tokens_of_the_files(questions, sums):
    for name in random.Random(1).sample(sorted(sums.of), 10):
        page = questions.ask("trajectory", {"id": name})
        tokens = sums.of[name]
        assert page["tokens"]["id"] == [token for token, _, _ in tokens]
        assert page["tokens"]["version"] == [version if action else None for _, action, version in tokens]
        assert page["tokens"]["word"][0] == "<bos>"
        assert page["outcome"] == sums.outcome.get(name, "held")
        assert page["step"] == sums.trained_at.get(name)
        assert page["reward"] == (None if page["status"] == "failed" else pytest.approx(sums.rewards[name]))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"purpose": "eval"}, {"1eval-before 0-0.0", "1eval-after 4-0.0"}),
        ({"purpose": "eval", "task": "0", "correct": "true"}, {"1eval-after 4-0.0"}),
        ({"evaluation": "before 0"}, {"1eval-before 0-0.0"}),
        ({"uniform": "true"}, {f"1g1.{i}.0" for i in range(4)}),
        ({"outcome": "trained", "reward_min": "0.9"}, {"1g2.3.0", "1g3.1.0", "1g4.1.0"}),
        ({"status": "failed", "reason": "KeyError"}, {"1g7.0.0", "1g7.1.0"}),
        ({"lag_min": "3"}, {"1g5.0.0"}),
        ({"step_min": "3", "step_max": "3"}, {"1g4.0.0", "1g4.1.0"}),
        ({"group": "1g8"}, {"1g8.0.0", "1g8.1.0"}),
        ({"trajectory": "g3.1"}, {"1g3.1.0"}),
        ({"version": "1", "purpose": "train", "outcome": "trained"}, {"1g3.0.0", "1g3.1.0"}),
        ({"length_min": "6"}, set()),
    ],
)
def test_filters_select_what_they_say(questions, given, wanted):
    page = questions.ask("table", given)
    assert {row["trajectory"] for row in page["rows"]} == wanted
    assert page["selected"] == len(wanted)
    assert sum(page["histogram"]["counts"]) + page["histogram"]["missing"] == len(wanted)


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("down", [False, True])
def test_rows_are_sorted_by_what_they_show(questions, sort, down):
    rows = questions.ask("table", {"sort": f"-{sort}" if down else sort})["rows"]
    assert len(rows) == len(questions.ask("table", {})["rows"])
    shown = {"version": lambda row: (row["versions"] or [None])[-1], "place": lambda row: row["at"]}
    if sort != "task":
        values = [shown.get(sort, lambda row: row[sort])(row) for row in rows]
        known = [value for value in values if value is not None]
        assert known == sorted(known, reverse=down)
        assert values == known + [None] * (len(values) - len(known))


def test_reasons_of_failures_are_counted(questions):
    page = questions.ask("table", {})
    assert page["failures"] == [
        {"env": "sums", "reason": "KeyError: 'x'", "count": 2, "trajectory": "1g7.1.0"}
    ]
    assert questions.ask("table", {"outcome": "trained"})["failures"] == []


def test_the_worst_held_out_tasks_are_named(questions):
    page = questions.ask("table", {})
    rewards = [row["reward"] for row in page["rows"] if row["purpose"] == "eval"]
    assert page["worst"] == [
        {
            "set": "", "task": 0, "answers": 2, "failed": 0, "solved": 1, "reward": sum(rewards) / 2,
            "trajectory": "1eval-after 4-0.0",
        }
    ]  # fmt: skip
    assert questions.ask("table", {"correct": "true"})["worst"] == []


def test_groups_that_teach_nothing_are_counted(questions):
    page = questions.ask("table", {})
    assert page["equal_groups"] == 1
    assert page["groups"] == len({row["group"] for row in page["rows"] if row["purpose"] == "train"})


def test_seconds_of_all_turns_are_those_of_the_trajectories(questions, sums):
    turns = questions.ask("timeline", {})["turns"]
    times = [time for name in sums.of for time in questions.ask("trajectory", {"id": name})["times"]]
    for name in ("waited", "sampled", "tools"):
        assert turns[name] == pytest.approx(sum(time[name] for time in times))
    # One trajectory of the run has slow tools; each of the others waits 0.3 s and samples for 1.3 s.
    assert turns["waited"] == pytest.approx(0.3 * len(sums.of))


def test_a_trajectory_without_a_sample_has_its_answer_and_target(tmp_path):
    maker = Maker(tmp_path / "run")
    maker.group(2, rewards=[0.0, 1.0], extra={"answer": "9", "target": "4"})
    maker.train()
    questions = Questions([maker.close()])
    page = questions.ask("trajectory", {"id": "1g0.0.0"})
    assert (page["answer"], page["target"], page["sample"]) == ("9", "4", None)


def test_rows_without_a_value_come_last_in_both_directions(questions):
    for sort in ("lag", "-lag"):
        lags = [row["lag"] for row in questions.ask("table", {"sort": sort})["rows"]]
        known = [lag for lag in lags if lag is not None]
        assert lags == known + [None] * (len(lags) - len(known))
        assert known == sorted(known, reverse=sort == "-lag")


@pytest.mark.parametrize(
    ("question", "given"),
    [
        ("table", {"reward_min": "many"}),
        ("table", {"reward_min": "nan"}),
        ("table", {"sort": "../etc"}),
        ("table", {"correct": "maybe"}),
        ("table", {"start": "x"}),
        ("batch", {"step": "-1"}),
        ("batch", {"step": "../1"}),
        ("samples", {"step": "1e9"}),
        ("../overview", {}),
    ],
)
def test_a_bad_question_names_its_parameter(questions, question, given):
    with pytest.raises(BadQuestion):
        questions.ask(question, given)


def test_an_unknown_run_or_trajectory_is_said(questions):
    with pytest.raises(NotKept, match=r"no run '\.\./\.\./etc'"):
        questions.ask("overview", {"run": "../../etc"})
    with pytest.raises(NotKept, match=r"no trajectory '\.\./x'"):
        questions.ask("trajectory", {"id": "../x"})


def test_bars_of_a_batch_end_at_the_arrival_and_are_as_long_as_their_turns(questions):
    page = questions.ask("batch", {"step": "4"})
    assert [bar["trajectory"] for bar in page["bars"]] == ["1g5.1.0", "1g5.0.0"]
    for bar in page["bars"]:
        seconds = sum(turn["waited"] + turn["sampled"] + turn["tools"] for turn in bar["turns"])
        assert bar["seconds"] == pytest.approx(seconds) == pytest.approx(4.6)
        assert bar["ended"] - bar["began"] == pytest.approx(seconds)
        assert bar["ended"] <= bar["delivered"] <= page["taken"]
    assert page["share_tools"] == pytest.approx(3.0 / 4.6)


def test_the_sentence_says_who_limits(questions):
    page = questions.ask("overview", {})
    assert "The learner limits: learner busy 95 %, generators idle 40 %" in page["sentence"]
    # 1 / (1 - 0.4) - 1
    assert "at most 67 % more" in page["sentence"]
    assert page["state"] == "broken off"
    assert page["alarms"][0]["title"] == "The run broke off without a summary"
    assert page["advice"] == []


def test_evaluations_stand_in_the_timeline_with_the_seconds_that_the_learner_stood(tmp_path):
    maker = Maker(tmp_path / "run")
    maker.group(2)
    maker.train()
    answered = {"evaluation/answered_tasks": 4.0, "evaluation/accuracy": 0.5}
    with (maker.folder / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 1, "time": CLOCK + 9, **answered, "evaluation/stood_seconds": 2.5}) + "\n"
        )
        # A line of an earlier version, and one of a named set beside which the learner trained on.
        file.write(json.dumps({"step": 2, "time": CLOCK + 19, **answered}) + "\n")
        named = {"evaluation/hard/answered": 3.0, "evaluation/hard/stood_seconds": 0.0}
        file.write(json.dumps({"step": 2, "time": CLOCK + 20, **named}) + "\n")
    page = Questions([maker.close()]).ask("timeline", {})
    assert page["evaluations"] == [
        {"set": "", "step": 1, "at": CLOCK + 9, "stood": 2.5},
        {"set": "", "step": 2, "at": CLOCK + 19, "stood": None},
        {"set": "hard", "step": 2, "at": CLOCK + 20, "stood": 0.0},
    ]
    assert page["totals"]["evaluate"] == 2.5


def test_the_answers_to_one_task_stand_together(questions):
    siblings = questions.ask("trajectory", {"id": "1eval-after 4-0.0"})["siblings"]
    assert [(one["evaluation"], one["correct"]) for one in siblings] == [
        ("before 0", False),
        ("after 4", True),
    ]


def test_two_runs_differ_in_their_settings(folder, tmp_path):
    learner = {"max_policy_lag": 2, "steps": 9, "batch_trajectories": 8, "group_size": 2}
    other = small_run(tmp_path / "other", settings={"learner": learner})
    page = Questions([folder, other]).ask("differences", {})
    assert [row for row in page["settings"] if row["setting"] == "learner.batch_trajectories"] == [
        {"setting": "learner.batch_trajectories", "values": ["4", "8"]}
    ]
    assert not [row for row in page["settings"] if row["setting"] == "run.name"]


def test_deleted_files_are_said_and_later_trajectories_are_there(tmp_path):
    maker = Maker(tmp_path / "long")
    maker.group(2, rewards=[0.0, 1.0])
    maker.train()
    maker.checkpoint()
    maker.new_file()
    maker.group(2, rewards=[0.0, 1.0])
    maker.train()
    folder = maker.close()
    journal = folder / "journal"
    (journal / "journal-00000001.log").rename(journal / "journal-00000001.released")
    (journal / "journal-00000001.released").write_bytes(b"")
    questions = Questions([folder])
    questions.runs["long"].read_all()
    page = questions.ask("ledger", {})
    # The snapshot carries the sums of what is deleted.
    assert page["sum"]["difference"] == 0
    assert page["sum"]["outcomes"]["trained"] == 40
    assert page["progress"]["deleted_below"] == 2
    assert page["progress"]["deleted_until_step"] == 1
    assert [row["trajectory"] for row in questions.ask("table", {"sort": "place"})["rows"]] == [
        "1g1.0.0",
        "1g1.1.0",
    ]
    with pytest.raises(NotKept, match=r"deleted at step 1: keep more with broker\.journal\.keep_bytes"):
        questions.ask("trajectory", {"id": "1g0.0.0"})


def test_a_file_deleted_after_it_was_read_takes_its_tokens_along(tmp_path):
    maker = Maker(tmp_path / "run")
    maker.group(2, rewards=[0.0, 1.0])
    maker.train()
    folder = maker.close()
    questions = Questions([folder])
    questions.runs["run"].read_all()
    (folder / "journal" / "journal-00000001.log").rename(folder / "journal" / "journal-00000001.released")
    with pytest.raises(
        NotKept, match=r"deleted\. It was last used at step 1\. Keep more with broker\.journal\.keep_b"
    ):
        questions.ask("trajectory", {"id": "1g0.0.0"})


def test_metrics_that_are_known_are_not_sent_again(tmp_path):
    maker = Maker(tmp_path / "run")
    maker.group(2)
    maker.train()
    questions = Questions([maker.folder])
    whole = questions.ask("metrics", {"names": "learner/loss"})
    assert (whole["since"], whole["columns"]["step"]) == ("", [1.0])
    maker.line()
    new = questions.ask("metrics", {"names": "learner/loss", "since": whole["mark"]})
    assert new["since"] == whole["mark"]
    assert [len(column) for column in new["columns"].values()] == [1, 1, 1]
    again = questions.ask("metrics", {"names": "learner/loss", "since": new["mark"]})
    assert again["columns"]["step"] == []
    # A learner that goes back cuts the file, so what is known is no longer true.
    lines = (maker.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (maker.folder / "metrics.jsonl").write_text(lines[0])
    cut = questions.ask("metrics", {"names": "learner/loss", "since": new["mark"]})
    assert (cut["since"], cut["columns"]["step"]) == ("", [1.0])
    for since in ("../..", "1.x", "9.9", "1.999"):
        assert questions.ask("metrics", {"names": "learner/loss", "since": since})["since"] == ""
    maker.close()


def test_logs_are_read_on_where_they_were_left(tmp_path):
    maker = Maker(tmp_path / "run")
    maker.close()
    log = maker.folder / "logs" / "learner.log"
    log.parent.mkdir()
    log.write_text("2026-01-01 00:00:01,000 INFO     one\n2026-01-01 00:00:02,000 WARNING  tw")
    questions = Questions([maker.folder])

    def texts(**given):
        return [line["text"] for line in questions.ask("logs", given)["lines"]]

    assert texts() == ["one", "tw"]
    with log.open("a") as file:
        file.write("o\n  behind it\n")
    assert texts() == ["one", "two", "  behind it"]
    assert texts(level="WARNING") == ["two", "  behind it"]
    assert texts(count="1") == ["  behind it"]
    # Another file of the same name.
    log.write_text("2026-01-01 00:00:03,000 INFO     anew\n")
    assert texts() == ["anew"]


def test_alarms_name_pages_of_the_documentation_that_are_there(questions):
    page = questions.ask("overview", {})
    for finding in page["alarms"]:
        assert questions.ask("docs", {"page": finding["docs"]})["text"].startswith(("# ", "<!--"))
    for name in ("../README.md", "/etc/passwd", "run/../../README.md", ""):
        with pytest.raises(NotKept, match="the documentation has no page"):
            questions.ask("docs", {"page": name})


def test_every_finding_links_to_a_page_of_the_documentation():
    source = inspect.getsource(overview)
    named = set(re.findall(r'"([a-z-]+/[a-z-]+\.md)(?:#[\w-]+)?"', source))
    assert len(named) > 5
    for name in named:
        assert (DOCS / name).is_file(), name


def test_a_growing_journal_is_followed(tmp_path):
    maker = Maker(tmp_path / "run")
    maker.group(2)
    maker.journal.flush()
    questions = Questions([maker.folder])
    assert questions.ask("table", {})["total"] == 2
    maker.train()
    maker.group(2)
    maker.journal.flush()
    page = questions.ask("table", {})
    assert page["total"] == 4
    assert {row["outcome"] for row in page["rows"]} == {"trained", "held"}
    maker.close()


def test_the_viewer_changes_no_byte(folder, questions):
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()
    }
    for name in ("runs", "differences", *ANSWERS):
        json.dumps(questions.ask(name, {"id": "1g2.0.0"}))
    assert {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()
    } == before


@pytest.mark.parametrize("kept", [1, 30, 200])
def test_a_journal_whose_broker_was_killed_in_a_record_is_shown_to_its_last_whole_one(tmp_path, kept):
    maker = Maker(tmp_path / "run")
    maker.group(2, rewards=[0.0, 1.0])
    maker.train()
    whole = Questions([maker.folder]).ask("ledger", {})
    maker.group(1)
    maker.journal.flush()
    journal = maker.folder / "journal" / "journal-00000001.log"
    size = journal.stat().st_size
    questions = Questions([maker.folder])
    assert questions.ask("table", {})["total"] == 3
    maker.close()
    # Less than the last segment is cut, so that a part of it stands at the end of the file.
    with journal.open("r+b") as file:
        file.truncate(size - kept)
    questions = Questions([maker.folder])
    page = questions.ask("ledger", {})
    assert page["sum"]["difference"] == 0
    assert page["sum"]["outcomes"] == whole["sum"]["outcomes"]
    assert page["progress"]["damage"] == []
    assert questions.ask("table", {})["total"] == 2
