"""How a host that was away when its run ended comes to an end, and how long one waits whose head is late."""

import json
import os

import pytest

from launch.errors import COME_BACK, FINAL, HeadGone, NoHead, exit_code, leave_note
from launch.run_folder import CONFIG
from launch.supervise.host import NO_HEAD, PAUSE_S, HeadSearch
from learner.run_files import RESULT, says_over

HOUR_S = 3600.0
REFUSED = NoHead("https://10.0.0.5:5756/status: refused; does `offbeat train` run on the head?")


@pytest.fixture
def search(tmp_path):
    return HeadSearch(tmp_path, tmp_path / "runs" / "r", patience_s=72 * HOUR_S)


def starts(search, *times):
    """Return the exit codes of starts that find no head at these times."""
    codes = []
    for now in times:
        try:
            search.failed(REFUSED, now)
            codes.append(0)
        except (NoHead, HeadGone) as error:
            codes.append(exit_code(error))
    return codes


def test_starts_look_for_a_late_head_and_end_for_good_after_the_time_of_the_setting(search):
    tries = [130.0 * n for n in range(2000)]
    codes = starts(search, *tries)
    last = next(n for n, at in enumerate(tries) if at > 72 * HOUR_S)
    assert codes[:last] == [COME_BACK] * last, "every engine starts the host again, Slurm too"
    assert codes[last] == FINAL
    # A person who starts it all the same has it look for as long again.
    assert codes[last + 1 :] == [COME_BACK] * (len(tries) - last - 1)


def test_what_a_person_reads_names_cause_bound_and_cure(search):
    with pytest.raises(
        NoHead, match=r"refused; .*since 1970-01-01 00:00 UTC until 1970-01-04 00:00 UTC \(fleet"
    ):
        search.failed(REFUSED, 0.0)
    for hours in range(1, 73):
        with pytest.raises(NoHead):
            search.failed(REFUSED, hours * HOUR_S)
    with pytest.raises(HeadGone, match=r"no_head_hours \(72\): the run is over, or .* start this host again"):
        search.failed(REFUSED, 72.5 * HOUR_S)


@pytest.mark.parametrize("between", ["the head answers", "the host is off", "the clock is set back"])
def test_the_search_begins_anew(search, between):
    assert starts(search, *(n * HOUR_S for n in range(73))) == [COME_BACK] * 73
    now = 72.0 * HOUR_S + 1
    match between:
        case "the head answers":
            search.found()
        case "the host is off":
            now += PAUSE_S
        case _:
            now = 5.0
    assert starts(search, now, now + HOUR_S) == [COME_BACK, COME_BACK]


@pytest.mark.parametrize("text", ["", "one", "9 1", "nan nan", "1 2 3"])
def test_a_record_that_cannot_be_read_begins_anew(search, tmp_path, text):
    (tmp_path / NO_HEAD).write_text(text)
    assert starts(search, 1.0) == [COME_BACK]
    assert (tmp_path / NO_HEAD).read_text() == "1.0 1.0"


def test_without_a_bound_it_looks_for_ever(tmp_path):
    search = HeadSearch(tmp_path, tmp_path / "r", patience_s=float("inf"))
    with pytest.raises(NoHead, match=r"since 1970-01-01 00:00 UTC \(fleet"):
        search.failed(REFUSED, 0.0)
    assert starts(search, *(n * HOUR_S for n in range(5000))) == [COME_BACK] * 5000


@pytest.mark.parametrize("kind", ["over", "error", "resumed", "begun anew", "damaged"])
def test_a_run_folder_that_says_the_run_is_over_ends_the_host_at_once(search, tmp_path, kind):
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    (run / CONFIG).write_text("{}")
    os.utime(run / CONFIG, (1, 1))
    match kind:
        case "error":
            leave_note(run, "learner", FINAL, "it diverged")
        case "damaged":
            (run / RESULT).write_text("[")
        case _:
            (run / RESULT).write_text(json.dumps({"run": "resumed" if kind == "resumed" else "over"}))
    if kind == "begun anew":
        os.utime(run / RESULT, (0, 0))
    over = kind in ("over", "error")
    assert starts(search, 1.0) == [0 if over else COME_BACK]
    if over:
        assert "says that the run is over" in search.failed(REFUSED, 2.0)
        assert says_over(run) == (kind == "over")
