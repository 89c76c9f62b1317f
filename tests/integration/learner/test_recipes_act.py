"""The named part of each recipe moves a step on episodes that its own job has sampled, by at least 1 %."""

import re

import numpy as np
import pytest

from benchmarks.acts.episodes import FOLDER, job_of, load_job
from benchmarks.acts.measure import BAR, measure, ready, wrong_called_right
from benchmarks.acts.parts import METHODS
from benchmarks.acts.program import BEGIN, END, PAGE, measured, percent, table, verdict
from launch.run_file.load import load, run_files
from learner.advantages import risk_advantages

pytestmark = pytest.mark.timeout(300)

EVENTS = {
    *("arpo-gui", "rapo", "spear", "replay-fifo"),
    *("gac", "distillation"),
    *("dots", "vspo", "deeptravel", "xrpo", "inspo", "inspo-proposals"),
    *("ghpo", "scaf-grpo", "igrpo", "urpo", "dyna-mind", "arpo-branch", "r3l", "agent-r", "xrpo-seeding"),
    *("icpo", "ampo", "srpo", "fapo"),
}
"""Recipes whose named part is an event of a run: a family, a draw from the replay table, a choice of tasks, a gradient
beside the one of the step before, or a teacher that scores the batch, among them the policy's average."""
NOT_RECORDED = {"smollm2", "sft", "planted_mistakes"}
"""Jobs without recorded episodes: `smollm2` and `planted_mistakes` have the algorithm of `calculator`, and `sft` trains
on answers that nobody sampled."""
SMALL = 400_000
"""Most bytes of a file of episodes."""


@pytest.fixture(scope="module")
def found():
    return {name: measured(name) for name in METHODS}


def test_each_recipe_is_measured_or_its_part_is_an_event():
    assert set(METHODS) | EVENTS | NOT_RECORDED == set(run_files())
    assert not set(METHODS) & (EVENTS | NOT_RECORDED)


@pytest.mark.parametrize("name", METHODS)
def test_each_named_part_moves_a_step(found, name):
    assert {part.part: part.share for part in found[name] if part.share < BAR} == {}


@pytest.mark.parametrize("name", METHODS)
def test_what_a_recipe_calls_right_is_right(name):
    wrong = wrong_called_right(name)
    assert wrong is None or (wrong[1] > 0 and wrong[0] <= 0.02 * wrong[1])


@pytest.mark.parametrize("name", METHODS)
def test_a_mechanism_touches_some_trajectories_and_not_all(found, name):
    for part in found[name]:
        assert part.touched is None or 0 < part.touched[0] < part.touched[1]


def test_the_measure_sees_a_part_that_cannot_act():
    """FAPO called every right answer flawed, by a bound for another reward; a clip has no effect in a single step."""
    config = load(run_files()["fapo-rule"])
    flawed = config.learner.reward.flawed.model_copy(update={"least": 0.35})
    learner = config.learner.model_copy(
        update={"reward": config.learner.reward.model_copy(update={"flawed": flawed})}
    )
    (part,) = measure("fapo-rule", learner, job_of("fapo-rule", config))
    assert part.touched[0] == part.touched[1]
    config = load(run_files()["gspo"], ["learner.algorithm.updates_per_batch=1"])
    _, clip = measure("gspo", config.learner, job_of("gspo", config))
    assert clip.share == 0
    assert not clip.acts


def test_advantages_of_riskpo_stay_in_bounds_on_partial_credit():
    config = load(run_files()["riskpo"])
    advantage = config.learner.algorithm.advantage
    for step in job_of("riskpo", config).steps:
        members = ready(config.learner, step)
        assert np.abs(risk_advantages(advantage, members, None)[0]).max() < 5 * advantage.most_share


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.job")), ids=lambda path: path.stem)
def test_a_file_of_episodes_is_small_and_has_lags(path):
    job = load_job(path)
    assert path.stat().st_size < SMALL
    assert sum(len(step.numbers) for step in job.steps) >= 100
    assert any(step.version > 0 for step in job.steps)


def test_the_page_shows_what_is_measured(found):
    """Shares may differ by rounding from machine to machine; verdicts and counts may not."""
    page = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()
    assert numbers_out(page) == numbers_out(table(found))
    shares = re.findall(r"([\d.]+) % \|", page)
    fresh = re.findall(r"([\d.]+) % \|", table(found))
    np.testing.assert_allclose([*map(float, shares)], [*map(float, fresh)], rtol=0.1, atol=1.0)


def numbers_out(text):
    return re.sub(r"[\d.]+ %", "x %", text)


def test_verdicts_and_shares_in_words(found):
    parts = found["decoupled-ppo"]
    assert verdict(parts) == "yes"
    dead = parts[0].__class__("x", "y", 0.0)
    assert (verdict([parts[0], dead]), verdict([dead])) == ("part", "no")
    assert percent(0.0) == "0.0 %"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("dppo", {"statistic": "binary_kl", "bound": 0.05}),
        ("dppo", {"statistic": "log_square", "bound": 0.04}),
        ("m2po", {"form": "clip"}),
    ],
)
def test_the_other_forms_of_a_trust_region_act(name, form):
    config = load(run_files()[name])
    algorithm = config.learner.algorithm
    surrogate = algorithm.surrogate.model_copy(update=form)
    learner = config.learner.model_copy(
        update={"algorithm": algorithm.model_copy(update={"surrogate": surrogate})}
    )
    (part,) = measure(name, learner, job_of(name, config))
    assert part.acts
