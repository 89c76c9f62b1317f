"""Test that what the learner made of each token is shown where it belongs, and that what it did not keep is not 0."""

from contextlib import closing

import numpy as np
import pytest

from launch.view.questions import Questions
from learner.annotation_files import (
    FOLDER,
    NUMBERS,
    AnnotatedStep,
    AnnotatedTrajectory,
    AnnotationFiles,
    Bit,
    row_type,
)
from tests.view_runs import BOUND, small_run

STALE, CARRIED, CLIPPED = Bit.STALE, Bit.TRAINED, Bit.TRAINED | Bit.CLIPPED


def rows(bits, lags, **numbers):
    made = np.zeros(len(bits), row_type("float16"))
    made["bits"], made["lag"] = bits, lags
    for name in NUMBERS:
        made[name] = numbers.get(name, np.nan)
    return made


def annotated(folder, *, carried_beyond=False, last=CARRIED):
    """Write annotations of the fourth step, whose first trajectory has two tokens beyond the bound."""
    first = rows(
        [CARRIED if carried_beyond else STALE, STALE, CARRIED, CLIPPED, last],
        [3, 3, 1, 1, 1],
        ratio=[np.nan, np.nan, 1.0, 1.5, 0.5],
        correction=[0.0, 0.0, 1.0, 2.0, 1.0],
        advantage=[0.5, 0.5, 0.5, 0.5, -0.25],
    )
    second = rows([CARRIED] * 5, [1] * 5, ratio=[1.0] * 5, correction=[1.0] * 5)
    step = AnnotatedStep(
        step=4, version=3, time=1.0, applied=True, floats="float16", offset=0,
        trajectories=[
            AnnotatedTrajectory("1g5.0.0", 5, 0, [(4, 7), (8, 10)]),
            AnnotatedTrajectory("1g5.1.0", 5, 0, [(4, 7), (8, 10)]),
        ],
        untrained={"uniform": ["1g1.0.0", "1g1.1.0"], "stale": ["1g1.2.0", "1g1.3.0"]},
    )  # fmt: skip
    with closing(AnnotationFiles(folder / FOLDER, 1 << 20)) as files:
        files.add(step, first.tobytes() + second.tobytes())
    return folder


def asked(folder):
    questions = Questions([folder], rest=0.0)
    questions.runs[folder.name].read_all()
    return questions


def test_each_token_has_its_own_numbers_and_observations_have_none(tmp_path):
    questions = asked(annotated(small_run(tmp_path / "run")))
    tokens = questions.ask("trajectory", {"id": "1g5.0.0"})["tokens"]
    assert tokens["ratio"] == [None] * 6 + [1.0, None, 1.5, 0.5]
    assert tokens["weight"] == [None] * 4 + [0.0, 0.0, 1.0, None, 2.0, 1.0]
    assert tokens["advantage"][-1] == -0.25
    assert tokens["entropy"] == [None] * 10
    assert tokens["cut"][4:] == [
        "masked: it lags more than the bound",
        "masked: it lags more than the bound",
        None,
        None,
        "clipped: the surrogate's bound cut its gradient",
        None,
    ]
    # A trajectory of another step has no annotations, which the page shows as "—".
    assert "ratio" not in questions.ask("trajectory", {"id": "1g2.0.0"})["tokens"]


def test_an_answer_of_a_file_stands_in_its_group_with_its_tokens_and_its_origin(tmp_path):
    folder = annotated(small_run(tmp_path / "run"))
    step = AnnotatedStep(
        step=5, version=4, time=2.0, applied=True, floats="float16", offset=0,
        trajectories=[AnnotatedTrajectory("taught-1g5.0", 2, 0, [(1, 3)], False, "taught", "1g5", [7, 8, 9])],
    )  # fmt: skip
    with closing(AnnotationFiles(folder / FOLDER, 1 << 20)) as files:
        files.add(step, rows([CARRIED, CARRIED], [0, 0], advantage=[1.5, 1.5]).tobytes())
    questions = asked(folder)
    member = questions.ask("trajectory", {"id": "1g5.0.0"})
    assert member["origin"] == "own"
    assert member["siblings"][0]["trajectory"] == "taught-1g5.0"
    page = questions.ask("trajectory", {"id": "taught-1g5.0"})
    assert (page["origin"], page["step"], page["group"], page["outcome"]) == ("taught", 5, "1g5", "trained")
    assert (page["tokens"]["id"], page["tokens"]["action"]) == ([7, 8, 9], [False, True, True])
    assert page["tokens"]["advantage"] == [None, 1.5, 1.5]
    assert page["tokens"]["version"] == page["tokens"]["logp"] == page["tokens"]["lag"] == [None] * 3
    assert questions.ask("trajectory", {"id": "1g2.0.0"})["origin"] is None


def test_tokens_beyond_the_bound_that_carried_gradient_are_counted(tmp_path):
    page = asked(annotated(small_run(tmp_path / "sound"))).ask("staleness", {})
    assert (page["carried_beyond"], page["annotated"]) == (0.0, 10.0)
    page = asked(annotated(small_run(tmp_path / "wrong"), carried_beyond=True)).ask("staleness", {})
    assert page["carried_beyond"] == 1.0
    by_lag = {one["lag"]: one for one in page["lags"]}
    assert by_lag[1]["clipped"] == pytest.approx(1 / 8)
    assert by_lag[1]["ratio"] == pytest.approx((1.0 + 1.5 + 0.5 + 5.0) / 8)
    assert by_lag[1]["weight"] == pytest.approx((1.0 + 2.0 + 1.0 + 5.0) / 8)
    assert by_lag[0]["ratio"] is None
    assert by_lag[BOUND + 1]["beyond"]


def test_a_token_that_a_correction_masked_carried_nothing(tmp_path):
    masked = CARRIED | Bit.ZERO_WEIGHT
    questions = asked(annotated(small_run(tmp_path / "run"), last=masked))
    tokens = questions.ask("trajectory", {"id": "1g5.0.0"})["tokens"]
    assert tokens["cut"][-1] == "masked: the correction gave it the weight 0"
    by_lag = {one["lag"]: one for one in questions.ask("staleness", {})["lags"]}
    # Eight tokens have a lag of 1. One of them is clipped, and one is masked.
    assert by_lag[1]["carried"] == 6.0


def test_the_learners_own_reasons_stand_in_the_ledger(tmp_path):
    flow = asked(annotated(small_run(tmp_path / "run"))).ask("ledger", {})["flow"]["outcomes"]
    assert flow["dropped: equal returns in its group"] == 10
    assert flow["dropped: stale, by the learner"] == 10
    assert flow["dropped: evaluated"] == 10


def test_annotations_that_a_learner_undoes_are_forgotten(tmp_path):
    folder = annotated(small_run(tmp_path / "run"))
    questions = asked(folder)
    assert questions.ask("staleness", {})["annotated"] == 10.0
    with closing(AnnotationFiles(folder / FOLDER, 1 << 20)) as files:
        files.rewind(3)
    page = questions.ask("staleness", {})
    assert page["annotated"] is None
    assert page["carried_beyond"] is None
    assert "ratio" not in questions.ask("trajectory", {"id": "1g5.0.0"})["tokens"]
