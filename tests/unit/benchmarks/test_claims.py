"""Measured claims: arms fit their tasks, pairs are seeds, and a claim holds only with enough of them."""

import asyncio
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks import real_system
from benchmarks.claims.claims import ARMS, BUDGETS, CLAIMS, TASKS, Bar, Budget, Claim, arms_of, configured
from benchmarks.claims.program import main, parse
from benchmarks.claims.table import (
    T_975,
    Cell,
    Difference,
    Point,
    PointSession,
    cell_from,
    difference,
    next_point,
    passes,
    plot,
    settings_of,
    smoothed,
    tables,
    value_of,
    verdict,
)
from envs.registry import make_suite
from launch.model import make_tokenizer, save_tokenizer
from launch.run_file.load import load
from launch.run_file.reward_rules import lacking
from learner.rewards import needed_marks, needed_rewards
from learner.settings.advantages import GroupAdvantage
from learner.trajectory import Unit, UnitPart
from protocol.messages.episodes import Turn
from tests.trajectories import make_turns

OTC = next(claim for claim in CLAIMS if claim.name == "OTC")
G2RPO = next(claim for claim in CLAIMS if claim.name == "G2RPO")


def cell(arm="sum", seed=0, solved=0.5, calls=0.0, **changes):
    curve = [Point(100 * (i + 1), solved, calls) for i in range(10)]
    return Cell(**({"arm": arm, "seed": seed, "settings": "x", "curve": curve, "rewards": {}, "exact": True,
                    "seconds": 1.0} | changes))  # fmt: skip


def of_arm(arm, solved, calls=()):
    calls = calls or [0.0] * len(solved)
    return {i: cell(arm, i, s, c) for i, (s, c) in enumerate(zip(solved, calls, strict=True))}


@cache
def facts_of(task):
    config = load(TASKS / f"{task}.toml")
    suite = make_suite(config.env.name, config.env.params)
    try:
        return suite.facts()
    finally:
        asyncio.run(suite.close())


@pytest.mark.parametrize("name", sorted(path.stem for path in TASKS.glob("*.toml")))
def test_the_settings_of_a_task_are_valid(name):
    config = load(TASKS / f"{name}.toml")
    assert config.max_policy_lag == 1
    # A batch is all that was sampled, so that equal tokens in batches are equal tokens sampled.
    assert not config.learner.filter_uniform_groups


def test_the_lock_pays_all_or_nothing():
    ladder, lock = (load(TASKS / f"{name}.toml").env.params for name in ("ladder", "lock"))
    assert lock["exact_bonus"] == 1.0
    assert {**lock, "exact_bonus": ladder["exact_bonus"]} == ladder


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_finds_its_rewards_and_marks_on_its_task(name):
    if ARMS[name].task.endswith("lake"):
        pytest.importorskip("gymnasium", reason="the extra gym is not installed")
    if ARMS[name].task == "doors":
        pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    learner, facts = configured(ARMS[name]).learner, facts_of(ARMS[name].task)
    assert {reward for _, reward in needed_rewards(learner)} <= set(facts.reward_names)
    assert {mark for _, mark in needed_marks(learner)} <= set(facts.mark_names)


def test_arms_differ_in_objective_and_rewards_alone():
    plain, treated = (configured(ARMS[name]) for name in ("grpo-hops", "otc"))
    assert treated.learner.reward.group.kind == "fewest_calls"
    same = treated.learner.model_copy(update={"reward": plain.learner.reward})
    assert same == plain.learner
    assert configured(ARMS["unscaled-heavy"]).learner.algorithm.advantage == GroupAdvantage(scale="none")
    budgets = [Budget(100), Budget(200), Budget(100, "steps")]
    assert len({settings_of(config, budget) for config in (plain, treated) for budget in budgets}) == 6


def test_the_arms_of_a_room_with_a_door_differ_in_the_objective_alone():
    plain, treated = (configured(ARMS[name]) for name in ("grpo-doors", "gigpo-doors"))
    assert treated.learner.algorithm.advantage.kind == "compared"
    same = treated.learner.model_copy(update={"algorithm": plain.learner.algorithm})
    assert treated.model_copy(update={"learner": same}) == plain
    # The lake's published runs stay valid: its arms have the task that they had.
    assert (ARMS["gigpo"].task, ARMS["grpo-lake"].task, BUDGETS["lake"]) == ("lake", "lake", Budget(40_000))


def test_arms_with_families_differ_from_the_baseline_in_these_alone():
    plain, treated = (configured(ARMS[name]).learner for name in ("grpo-dials", "ghpo"))
    assert treated.family.kind == "hint"
    assert treated.model_copy(update={"family": None}) == plain
    plain, anywhere, unsure = (
        configured(ARMS[name]).learner for name in ("grpo-wide", "branch-anywhere", "arpo-branch")
    )
    assert (anywhere.family.where, unsure.family.where) == ("anywhere", "uncertain")
    assert unsure.family.model_copy(update={"where": "anywhere"}) == anywhere.family
    own = unsure.algorithm.model_copy(update={"shared_prefix": "own"})
    assert unsure.model_copy(update={"family": None, "algorithm": own}) == plain
    # The trajectories of a batch are as many in all arms: eight to a task.
    assert {learner.group_size for learner in (plain, anywhere, unsure)} == {8}
    assert unsure.family.rollouts == 4


@pytest.mark.parametrize(("name", "kind"), [("ghpo", "hint"), ("arpo-branch", "branch"), ("grpo-wide", None)])
def test_a_learner_of_the_benchmark_has_the_families_of_its_arm(name, kind, tmp_path, monkeypatch):
    save_tokenizer(make_tokenizer(["abc"]), tmp_path / "model", max_length=64)
    for part in ("TrainingEngine", "join", "Publisher", "Report", "Trainer"):
        monkeypatch.setattr(real_system, part, MagicMock())
    config = configured(ARMS[name])
    system = real_system.System(config, tmp_path, str(tmp_path / "model"), [])
    with real_system.learning(system, config, 3, session_class=PointSession) as (_, session):
        families, tasks = session.intake.families, session.curriculum.refill(version=0, lockstep=True)
    assert kind == (None if families is None else families.config.kind)
    # One batch under way and one ahead, as the lag is forced, each of four tasks.
    assert len({task.group_id for task in tasks}) == 2 * 4
    assert len(tasks) == 2 * 4 * (4 if kind == "branch" else 8)
    assert [task.data["index"] for task in tasks if not task.member] == list(range(3000, 3008))


def test_the_environments_of_families_give_what_these_need():
    for name in ("ghpo", "arpo-branch"):
        if ARMS[name].task == "wide_lake":
            pytest.importorskip("gymnasium", reason="the extra gym is not installed")
        assert not list(lacking(configured(ARMS[name]).learner, facts_of(ARMS[name].task)))


def test_claims_compare_arms_of_one_task():
    assert arms_of(CLAIMS) == list(ARMS.values())
    for claim in CLAIMS:
        tasks = {ARMS[name].task for name in (claim.arm, *(bar.over for bar in claim.bars))}
        assert len(tasks) == 1
        assert tasks <= BUDGETS.keys()


def test_numbers_of_a_run():
    curve = [Point(100, 0.0, 4.0), Point(400, 0.4, 3.0), Point(450, 0.8, 2.0), Point(500, 1.0, 1.0)]
    run = cell(curve=curve)
    # Batches count by their tokens over the run, and equally in the last fifth, which begins at 400 tokens.
    assert value_of(run, "area") == pytest.approx((300 * 0.4 + 50 * 0.8 + 50 * 1.0) / 500)
    assert value_of(run, "final") == pytest.approx(0.9)
    assert value_of(run, "calls") == pytest.approx(1.5)
    assert cell_from(json.loads(json.dumps({**run.__dict__}))) == run


def test_a_run_that_is_bound_by_steps_is_measured_over_steps():
    curve = [Point(100, 0.0, 0.0, steps=400), Point(900, 1.0, 0.0, steps=500)]
    run = cell(curve=curve, unit="steps")
    assert (value_of(run, "area"), value_of(run, "final")) == (0.2, 1.0)
    assert value_of(cell(curve=curve), "area") == pytest.approx(800 / 900)
    assert smoothed(run)[31:33] == [0.0, 1.0]
    assert cell_from(json.loads(json.dumps({**run.__dict__}))) == run


def trajectory(group, member, *, turns, solved, **changes):
    t = make_turns(f"{group}.{member}.0", [{"reward": 0.0}] * turns, group=group)
    return replace(t, correct=solved, **changes)


def test_hinted_and_branched_trajectories_are_used_up_and_not_counted_as_solved():
    """Two whole episodes of three turns, one of them solved; then a branch that samples the last turn alone."""
    whole = [trajectory("0g1", i, turns=3, solved=i == 0) for i in (0, 1)]
    branch = trajectory("0g1r1", 0, turns=3, solved=True, parent="0g1.1.0")
    start = branch.turns[5].start
    turns = [Turn(t.index, t.start, t.end, t.index == 5) for t in branch.turns]
    branch = replace(branch, turns=turns, action_mask=np.arange(len(branch)) >= start)
    parts = (UnitPart("0g1", whole[:1], {"unhinted": whole[1:]}), UnitPart("0g1r1", [branch]))
    point = next_point(Point(10, 1.0, 1.0, 20, 30), [Unit("0g1", "0g1", [whole[0], branch], parts)])
    assert point == Point(tokens=10 + 6 + 6 + 2, solved=0.5, calls=0.0, steps=20 + 3 + 3 + 1, repeated=30 + 2)
    only = next_point(Point(0, 0.0, 0.0), [Unit("0g1", "0g1", [branch], (UnitPart("0g1r1", [branch]),))])
    assert (only.solved, only.steps, only.repeated) == (0.0, 1, 2)


def test_differences_are_paired_by_seed():
    treated, baseline = of_arm("gdpo", [0.9, 0.5, 0.7]), of_arm("sum", [0.8, 0.1, 0.6])
    del baseline[1]
    found = difference(Bar("final", "sum", 0.0), treated, {**baseline, 9: cell("sum", 9)})
    assert found.values == pytest.approx((0.1, 0.1))


def test_saved_calls_are_a_share_of_the_baselines():
    found = difference(
        Bar("calls", "x", 0.25), of_arm("otc", [1, 1], [1.0, 0.0]), of_arm("x", [1, 1], [4.0, 0.0])
    )
    assert found.values == (0.75, 0.0)


def test_the_interval_is_students():
    """Five values with mean 3 and sample deviation sqrt(2.5): 3 -+ 2.776 sqrt(2.5 / 5)."""
    low, high = Difference((1.0, 2.0, 3.0, 4.0, 5.0)).interval
    assert (low, high) == pytest.approx((3 - 2.776 * 0.5**0.5, 3 + 2.776 * 0.5**0.5))
    assert Difference((0.5,)).interval == (-float("inf"), float("inf"))
    many = Difference(tuple(float(i % 2) for i in range(200))).interval
    assert many[1] - many[0] == pytest.approx(2 * T_975[-1] * 0.5012547 / 200**0.5)
    assert list(T_975) == sorted(T_975, reverse=True)


@pytest.mark.parametrize(
    ("values", "better", "held"),
    [
        ((0.2, 0.2, 0.21, 0.22, 0.2), True, True),
        ((0.1, 0.1, 0.11, 0.3, 0.4), True, False),
        ((0.9, 0.9, 0.2, -0.9, 0.3), True, False),
        ((0.9, 0.9, 0.2, -0.9, 0.3), False, True),
    ],
    ids=["holds", "the median is below the bar", "the interval has 0", "as good is enough"],
)
def test_a_bar_needs_median_and_interval(values, better, held):
    assert passes(Bar("final", "x", 0.2, better=better), Difference(values)) is held


def test_a_bar_may_say_what_both_arms_must_have_themselves():
    bar = Bar("final", "grpo-dials", 0.3, reach=0.5, below=0.2)
    for own, baseline, held in (
        ([0.6, 0.9, 0.5, 0.6, 0.7], [0.1, 0.0, 0.1, 0.1, 0.3], True),
        ([0.45, 0.45, 0.45, 0.6, 0.45], [0.0] * 5, False),
        ([0.9] * 5, [0.2, 0.21, 0.2, 0.2, 0.2], False),
    ):
        found = difference(bar, of_arm("ghpo", own), of_arm("grpo-dials", baseline))
        assert passes(bar, found) is held
    ghpo = next(claim for claim in CLAIMS if claim.name == "GHPO")
    rows = tables([], [ghpo])["claims"].splitlines()
    assert len(rows) == 3
    assert "solved, last fifth ≥ +0.300 over grpo-dials, itself ≥ 0.5, where grpo-dials has < 0.2" in rows[2]


def test_a_claim_holds_only_with_all_bars_and_enough_seeds():
    good, bad = Difference((0.5,) * 5), Difference((-0.5,) * 5)
    assert verdict(OTC, [good, good]) == "holds"
    assert verdict(OTC, [good, bad]) == "did not help here"
    assert verdict(OTC, [Difference((0.5,) * 4)] * 2) == "not decided"
    assert verdict(OTC, [good, Difference(())]) == "not measured"
    single = Claim("X", "x", "", (Bar("final", "y", 0.0, better=False),), "")
    assert verdict(single, [Difference((0.5,) * 4)]) == "not decided"


def test_the_table_has_every_claim_with_its_figure_and_verdict():
    cells = [
        *of_arm("otc", [0.95] * 5, [1.5] * 5).values(),
        *of_arm("grpo-hops", [0.95] * 5, [3.0, 3.0, 3.1, 3.0, 3.0]).values(),
        *of_arm("gdpo", [0.3] * 5).values(),
        *of_arm("sum", [0.5, 0.5, 0.6, 0.5, 0.5]).values(),
        *of_arm("gigpo", [0.5, 0.5]).values(),
        *of_arm("grpo-lake", [0.3, 0.3]).values(),
    ]
    made = tables(cells)
    rows = {line.split("]")[0].removeprefix("| ["): line for line in made["claims"].splitlines()[2:]}
    assert list(rows) == [claim.name for claim in CLAIMS]
    assert "| +50% [+49%, +51%]; +0.000 [+0.000, +0.000] | 5 | **holds** |" in rows["OTC"]
    assert rows["GDPO"].endswith("| -0.200 [-0.276, -0.164] | 5 | **did not help here** |")
    assert "| 2 of 5 | **not decided** |" in rows["GiGPO"]
    assert rows["G2RPO"].endswith("| -; - | 0 of 5 | **not measured** |")
    assert (
        "| otc | hops | otc | 0.950 [0.950, 0.950] | 0.950 [0.950, 0.950] | 1.500 [1.500, 1.500] |"
        in made["arms"]
    )
    assert (
        "| gdpo | several_rewards | gdpo | 0.300 [0.300, 0.300] | 0.300 [0.300, 0.300] | - |" in made["arms"]
    )


def test_the_two_claims_of_a_recipe_share_its_table():
    made = tables([*of_arm("gigpo", [0.5, 0.6]).values(), *of_arm("grpo-lake", [0.4, 0.4]).values()])
    *_, lake, doors = made["gigpo"].splitlines()
    assert lake.startswith("| lake | solved, last fifth ≥ +0.050 over grpo-lake; ")
    assert doors.startswith("| doors | solved, last fifth ≥ +0.050 over grpo-doors; ")
    assert doors.endswith("| -; - | 0 of 5 | **not measured** |")
    only = [claim for claim in CLAIMS if claim.name == "GiGPO-doors"]
    assert tables([], only)["gigpo"].splitlines()[2:] == [doors]


def test_a_recipe_has_a_table_of_its_claim_alone():
    made = tables([*of_arm("gdpo", [0.5, 0.6]).values(), *of_arm("sum", [0.4, 0.4]).values()])
    assert set(made) == {"claims", "arms", *(ARMS[claim.arm].recipe for claim in CLAIMS)}
    *_, row = made["gdpo"].splitlines()
    assert row.startswith("| several_rewards | solved, last fifth ≥ +0.035 over sum | +0.150 [")
    assert row.endswith("| 2 of 5 | **not decided** |")


def test_what_is_finished_is_shown_without_a_start(tmp_path, capsys):
    main(["--claims", "OTC", "--only-finished", "--out", str(tmp_path / "none.jsonl")])
    assert "| 0 of 5 | **not measured** |" in capsys.readouterr().out


def test_finished_runs_are_not_repeated(tmp_path, capsys):
    """All runs are in the file, so nothing starts; those of other settings and seeds are left out."""
    out, js, png = (tmp_path / name for name in ("claims.jsonl", "claims.json", "claims.png"))
    names = [arm.name for arm in arms_of([G2RPO])]
    prints = {name: settings_of(configured(ARMS[name]), BUDGETS[ARMS[name].task]) for name in names}
    done = [cell(name, 0, 0.7, settings=prints[name]) for name in names]
    others = [replace(done[0], settings="old", exact=False), replace(done[0], seed=7, exact=False)]
    out.write_text("".join(json.dumps(c.__dict__) + "\n" for c in [*others, *done]))
    main(["--claims", "G2RPO", "--seeds", "0", "--out", str(out), "--json", str(js), "--plot", str(png)])
    assert "| 1 of 5 | **not decided** |" in capsys.readouterr().out
    kept = json.loads(js.read_text())["results"]
    assert [(row["arm"], row["final"], row["tokens"]) for row in kept] == [
        (name, 0.7, 1000) for name in names
    ]
    assert png.stat().st_size > 1000


def test_a_run_with_a_wrong_lag_is_reported(tmp_path):
    out = tmp_path / "claims.jsonl"
    names = [arm.name for arm in arms_of([OTC])]
    prints = {name: settings_of(configured(ARMS[name]), BUDGETS["hops"]) for name in names}
    done = [cell(name, 0, settings=prints[name], exact=name == "otc") for name in names]
    out.write_text("".join(json.dumps(c.__dict__) + "\n" for c in done))
    with pytest.raises(SystemExit, match="1 runs in which tokens did not lag as forced"):
        main(["--claims", "OTC", "--seeds", "0", "--out", str(out)])


def test_the_smoke_run_is_small():
    args = parse(["--smoke"])
    assert (args.claims, args.seeds, args.budget) == (["GDPO"], [0], 1_000)


def test_a_figure_of_nothing_is_empty_and_no_error(tmp_path):
    plot([], tmp_path / "claims.png")
    assert (tmp_path / "claims.png").exists()


def test_every_method_that_made_rewards_or_families_has_a_row_in_the_tables_of_claims():
    """Measured or not: a reader finds each method's promise, and what is known of it."""
    root = Path(__file__).parents[3]
    text = (root / "docs" / "claims.md").read_text()
    linked = set(re.findall(r"\| \[[^\]]+\]\(recipes/\w+\.md#([\w-]+)\)", text))
    shipped = {path.stem for path in (root / "recipes" / "methods").glob("*/*.toml")}
    assert shipped == linked
