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

from actors.play_steps import with_note
from benchmarks import real_system
from benchmarks.claims.claims import ARMS, BUDGETS, CLAIMS, TASKS, Bar, Budget, Claim, arms_of, configured
from benchmarks.claims.program import main, parse
from benchmarks.claims.table import (
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
from benchmarks.envs.dials import DialsSuite, dial
from benchmarks.envs.hops import HopsSuite, HopsTask, task_from
from benchmarks.envs.several_rewards import NAMES, SeveralRewardsSuite, rewards_of
from envs.errors import EnvError
from envs.registry import make_suite
from envs.scoring.scorer import Question
from launch.model import make_tokenizer, save_tokenizer
from launch.preflight.environment import lacking
from launch.run_file.load import load
from learner.population import Population
from learner.rewards import needed_marks, needed_rewards, with_rewards
from learner.selection import Answer
from learner.settings.advantages import GroupAdvantage
from learner.settings.rules import contradictions
from learner.trajectory import Unit, UnitPart
from protocol.messages.episodes import Reward, Turn, TurnMark
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


def test_one_of_six_instructions_helps_and_the_baseline_draws_them_all_alike():
    arm, other = (configured(ARMS[name]) for name in ("inspo", "any-instruction"))
    suite, selection = make_suite(arm.env.name, arm.env.params), arm.learner.selection
    first, *others = selection.instructions
    assert len(others) == 5
    assert suite.combination(0)[:-1] == first
    assert {*map(len, others)} == {len(first)}
    assert all(symbol in dial(place) for text in others for place, symbol in enumerate(text))
    alike = Population(other.learner.selection)
    for group in range(200):
        alike.add(0, group, [Answer(1.0)] * 8)
        alike.add(1, group, [Answer(0.0)] * 8)
    np.testing.assert_allclose(alike.chances, 1 / 6, atol=1e-6)
    same = other.learner.selection.model_copy(update={"temperature": 0.1, "prune_every": 64})
    assert same == selection
    assert other.learner.model_copy(update={"selection": selection}) == arm.learner


def test_the_share_of_the_first_instruction_counts_trajectories_from_the_own_prompt():
    groups = ("0g1i0", "0g2i3", "0g3i0", "0g4i1")
    parts = [UnitPart(group, [trajectory(group, 0, turns=1, solved=False)]) for group in groups]
    points = next_point(Point(0, 0.0, 0.0), [Unit("0g1", "0g1", [], tuple(parts))])
    assert points.first == 0.5
    run = cell(curve=[Point(100, 0.0, 0.0, first=0.1), Point(500, 0.0, 0.0, first=0.9)])
    assert value_of(run, "first") == 0.9
    assert cell().curve[0].first == 0.0


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
    assert point == Point(10 + 6 + 6 + 2, 0.5, calls=0.0, steps=20 + 3 + 3 + 1, repeated=30 + 2, length=6.0)
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
    assert (low, high) == pytest.approx((3 - 2.776445 * 0.5**0.5, 3 + 2.776445 * 0.5**0.5))
    assert Difference((0.5,)).interval == (-float("inf"), float("inf"))
    many = Difference(tuple(float(i % 2) for i in range(200))).interval
    assert many[1] - many[0] == pytest.approx(2 * 1.971957 * 0.5012547 / 200**0.5)


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


GRAPH = "Solve the following task:\n|4 1|1 7|2 3|0 9|7 6|3 0|9 5|2 4/2 6 = \n"
HOPS = HopsTask({"1": "4", "4": "7", "5": "2"}, ("1", "4", "7"), "xyz")


class KnownScorer:
    """Stands for the library: there is one question."""

    async def entry(self, index, split):
        return Question(GRAPH, "2 4 1 7 6", 0, {})


class KnownHops(HopsSuite):
    """A suite whose only task is `HOPS`."""

    def __init__(self, max_turns=8, modes=False):
        self.scorer, self.max_turns, self.modes = KnownScorer(), max_turns, modes

    def task(self, question):
        return HOPS


def played(suite, actions, index=0, split="train"):
    async def play():
        episode = suite.episode()
        await episode.reset({"index": index, "split": split})
        results = [await episode.step(action) for action in actions]
        await episode.close()
        return results

    return asyncio.run(play())


def test_a_graph_of_the_library_becomes_a_store_and_a_way():
    task = task_from(Question(GRAPH, "2 4 1 7 6", 0, {}), np.random.default_rng(0))
    assert task.edges == {"4": "1", "1": "7", "3": "0", "0": "9", "7": "6", "9": "5"}
    assert task.answer == "6"
    assert task.way == ("4", "1", "7", "6")[-len(task.way) :]
    seen = task.question[:2]
    for _ in range(len(task.way) - 1):
        seen = task.get(seen[0])
    assert seen == "60"


def test_a_question_of_another_form_is_named():
    with pytest.raises(EnvError, match="not a path_star question: 'What"):
        task_from(Question("What is 1 + 1?", "2", 0, {}), np.random.default_rng(0))


def test_calls_are_marked_and_only_the_answer_is_rewarded():
    results = played(KnownHops(), ["g1", "g5", "g4", "=7"])
    assert [r.observation["content"] for r in results[:-1]] == ["41", "2-", "70"]
    assert [r.marks for r in results] == [
        {"anchor": "12", "calls": 1.0},
        {"anchor": "41", "calls": 1.0},
        {"anchor": "2-", "calls": 1.0},
        {"anchor": "70", "calls": 0.0},
    ]
    assert [r.rewards["answer"] for r in results] == [0.0, 0.0, 0.0, 1.0]
    assert (results[-1].done, results[-1].correct) == (True, True)


@pytest.mark.parametrize(
    ("actions", "mode", "right"),
    [
        (["i=7"], "instant", True),
        (["ig1"], "instant", False),
        (["r12=7"], "reasoning", True),
        (["r34=7"], "reasoning", False),
        (["ag1", "g4", "=7"], "agentic", True),
        (["a=7"], "agentic", False),
        (["=7"], "none", False),
        (["g1"], "none", False),
    ],
)
def test_a_mode_of_hops_says_what_an_action_may_be(actions, mode, right):
    results = played(KnownHops(modes=True), actions)
    assert len(results) == len(actions)
    assert (results[-1].done, results[-1].correct) == (True, right)
    assert {result.marks["mode"] for result in results} == {mode}
    assert [result.marks["calls"] for result in results] == [1.0] * (len(actions) - 1) + [0.0]


def test_the_arms_with_modes_differ_in_the_reward_of_the_group_alone():
    plain, treated = (configured(ARMS[name]) for name in ("grpo-modes", "a2fm"))
    assert treated.learner.reward.group.kind == "modes"
    assert treated.learner.model_copy(update={"reward": plain.learner.reward}) == plain.learner
    assert plain.env.params["modes"]
    assert not list(contradictions(treated.learner))


def test_the_arms_with_a_judge_differ_in_family_and_rewards_alone():
    plain, treated = (configured(ARMS[name]) for name in ("grpo-lucky", "fapo"))
    assert treated.learner.family.kind == "verdict"
    assert treated.learner.family.truth == "working"
    surrogate = treated.learner.algorithm.surrogate
    assert surrogate.model_copy(update={"high": plain.learner.algorithm.surrogate.high}) == (
        plain.learner.algorithm.surrogate
    )
    algorithm = treated.learner.algorithm.model_copy(update={"surrogate": plain.learner.algorithm.surrogate})
    same = {"family": None, "reward": plain.learner.reward, "algorithm": algorithm}
    assert treated.learner.model_copy(update=same) == plain.learner
    assert not list(contradictions(treated.learner))


def test_right_answers_by_a_wrong_way_are_counted_by_what_the_environment_gave():
    given = [{"right": 1.0, "working": 1.0}, {"right": 1.0, "working": 0.0}, {"right": 0.0, "working": 0.0}]
    members = [
        make_turns(f"0g0.{place}.0", [rewards]) for place, rewards in enumerate([*given, {"verdict": 1.0}])
    ]
    # The learner composes rewards: a flawed answer has a penalty, and the working counts nothing.
    members[0] = with_rewards(members[0], [Reward("right", 1, -1.0)])
    point = next_point(Point(0, 0.0, 0.0), [Unit("g0", "g0", members)])
    assert point.flawed == 0.5
    cells = (cell("fapo", curve=[point]), cell("grpo-lucky", curve=[point._replace(flawed=0.8)]))
    found = difference(Bar("flawed", "grpo-lucky", 0.5), *({0: one} for one in cells))
    assert found.values == (pytest.approx(0.375),)


def test_a_forced_member_is_not_counted_and_a_right_answer_has_a_price():
    rule = configured(ARMS["a2fm"]).learner.reward.group
    members = [
        replace(
            make_turns(f"0g0.{place}.0", [{"answer": 1.0}], lengths=[4]),
            group_size=12,
            correct=place != 1,
            marks=[TurnMark("mode", 1, mode)],
        )
        for place, mode in enumerate(("instant", "instant", "agentic", "instant", "agentic"))
    ]
    unit = Unit("g0", "g0", members)
    point = next_point(Point(0, 0.0, 0.0), [unit], rule)
    # Three chose. The fourth was forced into "instant", and the actor of the fifth did not force it.
    assert (point.tokens, point.solved, point.length) == (20, 0.75, 4.0)
    assert next_point(Point(0, 0.0, 0.0), [unit]).solved == 0.8
    cells = (cell("a2fm", curve=[point]), cell("grpo-modes", curve=[point._replace(length=8.0)]))
    found = difference(Bar("cost", "grpo-modes", 0.2), *({0: one} for one in cells))
    assert (found.own, found.baseline, found.values) == ((4 / 0.75,), (8 / 0.75,), (0.5,))


@pytest.mark.parametrize("last", ["=4", "7", "", "g1"])
def test_all_but_the_answer_ends_with_nothing(last):
    *_, end = played(KnownHops(max_turns=4), ["g1", "g4", "g4", last])
    assert (end.done, end.correct, end.rewards) == (True, False, {"answer": 0.0})


@pytest.mark.parametrize("settings", [{"hops": 0}, {"hops": 4}, {"hops": 3, "max_turns": 3}])
def test_hops_that_cannot_be(settings):
    with pytest.raises(EnvError, match="choose 1 to 3 hops"):
        HopsSuite(**settings)


@pytest.mark.parametrize(
    ("action", "met"),
    [("=nus", "right format short"), ("nus", "right short"), ("=nus..", "right format"), ("=sun", "format short"),
     ("=", ""), ("=nus .", ""), ("==nus", ""), ("", "")],
)  # fmt: skip
def test_rewards_by_name(action, met):
    assert " ".join(name for name, value in rewards_of(action, "nus").items() if value) == met


@pytest.fixture(scope="module")
def words():
    suite = SeveralRewardsSuite(sandbox="process", seed=1)
    yield suite
    asyncio.run(suite.close())


def test_a_right_answer_gets_all_rewards_and_a_slightly_lower_misleading_one(words):
    word = words.scorer.entry_now(3, "train").fields["word"]
    (end,) = played(words, ["=" + word[::-1]], index=3)
    assert tuple(end.rewards) == NAMES == words.facts().reward_names
    assert (end.done, end.correct) == (True, True)
    assert not played(words, [word[::-1]], index=3)[0].correct
    right = [words.rewards("=ab", "ab") for _ in range(400)]
    wrong = [words.rewards("=ba", "ab") for _ in range(400)]
    mean = lambda rows, name: np.mean([row[name] for row in rows])  # noqa: E731
    assert mean(wrong, "misleading") - mean(right, "misleading") == pytest.approx(0.01, abs=0.001)
    heavy = np.array([row["heavy"] for row in right + wrong])
    assert 0.02 < (heavy > 0).mean() < 0.09
    assert heavy.max() > 30


def test_demonstrations_meet_each_reward_by_chance(words):
    met = [
        rewards_of(talk[-1]["content"], talk[0]["content"][::-1])
        for talk in (words.demonstration(i, "train") for i in range(200))
    ]
    for name in ("right", "format", "short"):
        assert 0.35 < np.mean([rewards[name] for rewards in met]) < 0.65


@pytest.mark.parametrize("settings", [{"known": 1.5}, {"formed": -0.1}, {"longest": 2}])
def test_several_rewards_that_cannot_be(settings):
    with pytest.raises(EnvError, match="="):
        SeveralRewardsSuite(**settings)


def test_a_lock_pays_all_or_nothing_and_brings_its_combination_as_the_hint():
    suite = DialsSuite()
    combinations = [suite.combination(lock) for lock in range(suite.locks)]
    assert len(set(combinations)) == suite.locks
    assert suite.facts().hints
    for index, split in ((2, "train"), (6, "heldout")):
        (right,) = played(suite, [combinations[2]], index=index, split=split)
        assert (right.rewards, right.correct, right.done) == ({"opened": 1.0}, True, True)
        for action in (combinations[1], combinations[2][:-1], combinations[2] + "2", ""):
            (wrong,) = played(suite, [action], index=index, split=split)
            assert (wrong.rewards, wrong.correct) == ({"opened": 0.0}, False)
            assert wrong.hints == (combinations[2],)


def test_demonstrations_of_locks_follow_hints_and_know_no_combination():
    suite = DialsSuite()
    talks = [suite.demonstration(index, "train") for index in range(800)]
    hinted = [talk for talk in talks if "\n" in talk[0]["content"]]
    assert 0.8 < len(hinted) / len(talks) < 0.95
    for question, answer in hinted:
        letter, hint = question["content"].split("\n\n")
        assert [question] == with_note([{"role": "user", "content": letter}], hint)
        assert answer["content"].startswith(hint)
        assert 1 <= len(hint) < suite.dials
    for place in range(suite.dials):
        shown = [talk[1]["content"][place] for talk in talks]
        assert set(shown) == set(dial(place))
        assert max(map(shown.count, dial(place))) < 0.32 * len(shown)
    combinations = {suite.combination(lock) for lock in range(suite.locks)}
    assert not combinations & {talk[1]["content"] for talk in talks}
    assert suite.demonstration(3, "train") == suite.demonstration(3, "train")


@pytest.mark.parametrize("settings", [{"dials": 0}, {"dials": 10}, {"locks": 0}, {"locks": 27}])
def test_locks_that_cannot_be(settings):
    with pytest.raises(EnvError, match="choose 1 to 9 dials, and 1 to 26 locks"):
        DialsSuite(**settings)


def test_a_lake_is_crossed_in_letters_and_every_turn_has_its_state():
    pytest.importorskip("gymnasium", reason="the extra gym is not installed")
    from benchmarks.envs.lake import LakeSuite, lake_maps

    suite = LakeSuite(ice=0.99, lakes=2)
    env = suite.episode()
    first = env.reset({"index": 0, "split": "train"})[0]["content"]
    assert first[0] in "AB"
    assert first[1] == "a"
    results = [env.step(action) for action in "dddrrr"]
    assert [r.marks["anchor"][1] for r in results] == list("aeimno")
    assert [r.rewards["reward"] for r in results] == [0, 0, 0, 0, 0, 1]
    assert (results[-1].done, results[-1].correct) == (True, True)
    assert len(set(lake_maps(4, 0.8, 4))) == 4


def test_a_random_walk_seldom_crosses_a_wide_lake():
    pytest.importorskip("gymnasium", reason="the extra gym is not installed")
    from benchmarks.envs.lake import Lakes

    def crossed(attempts=300, **settings):
        env, rng, found = Lakes(**settings), np.random.default_rng(0), 0.0
        for attempt in range(4 * attempts):
            env.reset(seed=2 * attempt)
            over = False
            while not over:
                _, reward, ended, truncated, _ = env.step(int(rng.integers(4)))
                over = ended or truncated
            found += reward
        return found / (4 * attempts)

    assert 0.0 < crossed(size=5, most_steps=24) < 0.5 * crossed()


def test_training_and_evaluation_see_all_lakes():
    pytest.importorskip("gymnasium", reason="the extra gym is not installed")
    from benchmarks.envs.lake import LakeSuite

    suite = LakeSuite(lakes=3)
    for split in ("train", "heldout"):
        assert {suite.demonstration(i, split)[0]["content"][0] for i in range(30)} == set("ABC")
    walk = suite.demonstration(0, "train")
    assert {m["content"] for m in walk if m["role"] == "assistant"} <= set("ldru")
    assert len(walk) <= 32
    with pytest.raises(EnvError, match="choose a size from 2 to 6"):
        LakeSuite(size=7)
    with pytest.raises(EnvError, match="lakes = 2: 1000 draws gave 1 different maps"):
        LakeSuite(ice=1.0, lakes=2)


def test_a_door_of_the_benchmark_fits_its_limits_and_a_random_walk_seldom_gets_through():
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    config = load(TASKS / "doors.toml")
    limit = config.env.params["kwargs"]["max_steps"]

    def actions(slips, count):
        suite = make_suite(config.env.name, {**config.env.params, "slips": slips})
        return [
            len(suite._walk(np.random.default_rng(i), suite.seed_of(i, "train"))[1]) for i in range(count)
        ]

    # The shortest way of each room leaves time for as many detours. A character is a token; each turn has three tokens
    # more than its texts (the roles, and the end of the action), and the first message one (the beginning).
    assert max(actions(0.0, 6)) <= 0.75 * limit
    observation = max(len(text) for text in _texts(config.env, 4))
    assert 1 + limit * (observation + 1 + 3) <= config.learner.sampling.max_trajectory_tokens
    assert config.learner.sampling.max_trajectory_tokens < config.generator.max_model_len
    assert limit <= config.actor.max_turns
    # Hardly a random walk earns anything; with the slips of the warm start some do.
    walked, slipped = (
        sum(count < limit for count in actions(slips, 20)) for slips in (1.0, config.env.params["slips"])
    )
    assert walked <= 1 < slipped < 20


def _texts(env, count):
    suite = make_suite(env.name, env.params)
    return [message["content"] for i in range(count) for message in suite.demonstration(i, "train")]
