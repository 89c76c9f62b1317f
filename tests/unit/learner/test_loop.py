"""Test the training loop on scripted parts: what follows an update, a skipped update, and a stop."""

import dataclasses
import html
import json
import shutil
import types

import numpy as np
import pytest

from learner.curriculum import SOLVED, SignalWatch
from learner.errors import Diverged, NothingToLearn, SamplerDiffers, Stopped
from learner.intake.trajectories import OpenTrajectories
from learner.metrics import Report as RealReport
from learner.metrics import return_histograms
from learner.replay.table import make_table
from learner.retrain import Unpublished
from learner.run import REPLAY_FILE, TrainingRun
from learner.run_files import PublishedVersion, Start
from learner.sample_log import SampleLog
from learner.samples import read_samples
from learner.settings.learner import LearnerConfig, ReplayConfig
from learner.trainer import Trainer
from learner.trajectory import Counts, Unit
from learner.update.report import SamplerGap, UpdateReport
from learner.weight_copy import OutgoingWeights
from protocol.failures import FailureCounts
from protocol.messages.episodes import Failure, Reward
from protocol.version_line import VersionLine
from tests.trajectories import make_trajectory


class Intake:
    # All work that the bound allows is under way.
    curriculum = types.SimpleNamespace(wanted_trajectories=None, selection_metrics=dict)

    def __init__(self):
        self.gauges = {"broker/units_ready": 2.0, "env/number": 1.0}
        self.counts, self.sampled_tokens, self.open = Counts(), 0, OpenTrajectories()
        self.line, self.signal, self.families = VersionLine(), SignalWatch(), None

    def take_recent(self):
        return [make_trajectory("t")]

    def check(self):
        pass

    def state(self):
        return {}


class Session:
    """An session that hands out one batch until the script says stop, and records the calls it gets."""

    def __init__(self, stop_at=None):
        self.intake, self.log, self.stop_at, self.replayed = Intake(), [], stop_at, []
        # Results of the next evaluations.
        self.held_out = []

    version_before = 0
    checkpoint_wanted = ""
    in_step = awaits_versions = False

    def inherit(self):
        self.log.append(("inherit",))

    def flush(self, *, step):
        self.log.append(("flush", step))

    def confirm_commits(self, *, step):
        self.log.append(("confirm_commits", step))

    def checkpointed(self, *, step):
        self.log.append(("checkpointed", step))

    def collect(self, *, step, version):
        if self.stop_at is not None and step >= self.stop_at[0]:
            raise Stopped(self.stop_at[1])
        return [Unit("u", "g", [make_trajectory("t"), make_trajectory("t")])]

    def evaluate(self, tag, of, *, version):
        self.log.append(("evaluate", tag, version))
        return self.held_out.pop(0) if self.held_out else [make_trajectory("t")] * of.answers

    def announce(self, message):
        self.log.append(("announce", message.version))
        self.line = message.line

    def commit(self, groups, *, step, version, replayed_tokens=0):
        assert version <= step
        self.replayed.append(replayed_tokens)
        self.log.append(("commit", step))

    def trained(self, *, update_s, step_s):
        assert 0 <= update_s <= step_s

    def refill(self, *, step, version):
        self.log.append(("refill", step, version))

    @property
    def curriculum(self):
        return self

    def state(self):
        return {}


class Engine:
    parameters = types.SimpleNamespace(trained=1_000_000, whole=1_000_000)

    sampler = None

    def __init__(self, outcomes):
        self.outcomes, self.saved, self.log = list(outcomes), [], []

    def update(self, trajectories, *, current_version):
        outcome = self.outcomes.pop(0)
        return UpdateReport(
            applied=outcome == "applied",
            nonfinite=outcome == "nonfinite",
            metrics={"learner/trained_tokens": 4.0, "learner/step_seconds": 0.1},
            histograms={"policy_lag_versions": np.array([0, 0, 1, 1])},
            sampler=self.sampler,
            advantages=np.array([0.25, np.nan]),
        )

    def weights(self):
        return OutgoingWeights({}, ())

    def save(self, folder, state, also):
        self.saved.append(json.loads(json.dumps(state)))
        self.log.append(("save", state["step"]))

    def save_pretrained(self, folder):
        folder.mkdir(parents=True)
        self.log.append(("save_pretrained", folder.name))


class Report:
    def __init__(self):
        self.lines = []

    def write(self, step, scalars, histograms=None, passed_on=None):
        self.lines.append((step, {**(passed_on or {}), **scalars}))

    def write_failures(self, step, failures):
        self.failures = failures.rows()

    def write_samples(self, step, samples):
        self.samples = samples


def learner(tmp_path, outcomes, *, stop_at=None, **settings):
    values = {
        "steps": len(outcomes),
        "evaluation_tasks": 2,
        "max_nonfinite_steps": 2,
        "checkpoint_every": 0,
        **settings,
    }
    session, engine = Session(stop_at), Engine(outcomes)
    engine.log = session.log
    trainer = Trainer(LearnerConfig(**values), tmp_path, engine, session, Unpublished(), Report())
    return TrainingRun(trainer, session)


def test_the_learner_asks_for_patience_while_it_writes(tmp_path, monkeypatch):
    it = learner(tmp_path, ["applied"], checkpoint_every=1, export_every=1)
    asked = []
    for name in ("save", "save_pretrained"):
        write = getattr(it.trainer.engine, name)

        def watched(*arguments, write=write, **named):
            asked.append(it.checkpoints.writes.patience_s)
            write(*arguments, **named)

        monkeypatch.setattr(it.trainer.engine, name, watched)
    it.train()
    # 16 bytes for each of a million parameters at 50 MB/s: a model, a checkpoint, and the evaluation's at the end.
    assert asked[:2] == [pytest.approx(0.32)] * 2
    assert it.checkpoints.writes.writes == len(asked)
    assert it.checkpoints.writes.patience_s == 0.0


def test_each_applied_step_raises_the_version_and_is_committed(tmp_path):
    it = learner(tmp_path, ["applied"] * 3)
    it.train()
    assert (it.trainer.step, it.trainer.version, it.ended_by) == (3, 3, "all steps done")
    assert [entry[1] for entry in it.session.log if entry[0] == "announce"] == [1, 2, 3]
    assert [entry[1] for entry in it.session.log if entry[0] == "commit"] == [1, 2, 3]
    assert [entry[1:] for entry in it.session.log if entry[0] == "evaluate"] == [
        ("before 0", 0),
        ("after 3", 3),
    ]
    assert it.trainer.totals.lag_counts == {"0": 6, "1": 6}
    first = it.evaluations.records[0]
    assert (first["answered"], first["failed"], first["not_run"]) == (2, 0, 0)


def test_the_sampler_is_compared_at_the_first_version_only(tmp_path):
    """A learner that begins again without a checkpoint finds answers with a KV cache of versions that are undone."""
    gap = SamplerGap(24, 0.5, 1.0, "token 3 of g.0", -2.5, -2.0)
    first = learner(tmp_path / "first", ["applied"])
    first.trainer.engine.sampler, first.trainer.sampler_limit = gap, 0.1
    with pytest.raises(SamplerDiffers):
        first.train()
    again = learner(tmp_path / "again", ["applied"])
    again.trainer.engine.sampler, again.trainer.sampler_limit = gap, 0.1
    again.trainer.version = 1
    again.trainer.learn()
    assert again.trainer.step == 1


def test_generators_that_report_late_have_sampled_at_least_what_arrived(tmp_path):
    it = learner(tmp_path, ["applied"] * 2, evaluation_tasks=0)
    it.train()
    it.session.intake.counts.note("uniform", 1, 5)
    assert it.tokens_generated == 2 * 10 + 5
    it.session.intake.sampled_tokens = 99
    assert it.tokens_generated == 99


def test_tokens_that_a_mask_leaves_out_were_sampled_too(tmp_path):
    """A generator that is killed takes its own count along."""
    it = learner(tmp_path, ["stale"] * 2, evaluation_tasks=0)
    it.train()
    # Each batch has two trajectories of five action tokens.
    assert it.tokens_generated == 2 * 10


def test_weights_are_published_every_nth_step(tmp_path):
    it = learner(tmp_path, ["applied"] * 5, publish_every=2)
    it.train()
    assert (it.trainer.step, it.trainer.version) == (5, 2)


def test_a_skipped_step_delays_a_publication_by_one_step(tmp_path):
    it = learner(tmp_path, ["applied", "nonfinite", "applied", "applied", "applied"], publish_every=2)
    it.train()
    assert [entry for entry in it.session.log if entry[0] in ("announce", "commit")] == [
        *(("commit", 1), ("commit", 2)),
        *(("announce", 1), ("commit", 3)),
        ("commit", 4),
        *(("announce", 2), ("commit", 5)),
    ]


def test_a_step_that_is_not_finite_publishes_nothing_and_saves_its_trajectories(tmp_path):
    it = learner(tmp_path, ["applied", "nonfinite", "applied"])
    it.train()
    assert (it.trainer.step, it.trainer.version, it.trainer.totals.skipped_steps) == (3, 2, 1)
    saved = np.load(tmp_path / "nonfinite" / "step-000002.npz")
    assert saved["1.token_ids"].tolist() == make_trajectory("t").token_ids.tolist()
    assert len(json.loads((tmp_path / "nonfinite" / "step-000002.json").read_text())) == 2


def test_too_many_in_a_row_stop_the_run_and_the_text_says_where_to_look(tmp_path):
    it = learner(tmp_path, ["nonfinite", "applied", "nonfinite", "nonfinite", "applied"])
    with pytest.raises(Diverged, match="2 steps in a row") as caught:
        it.train()
    assert it.trainer.step == 4
    assert str(tmp_path / "nonfinite") in str(caught.value)


def test_a_batch_without_fresh_tokens_is_not_a_skipped_step(tmp_path):
    it = learner(tmp_path, ["stale", "stale", "stale"])
    it.train()
    assert (it.trainer.version, it.trainer.totals.skipped_steps) == (0, 0)


@pytest.mark.parametrize(("reason", "evaluated"), [("time limit", True), ("SIGTERM", False)])
def test_a_stop_ends_with_a_checkpoint_and_an_evaluation_unless_one_is_in_a_hurry(
    tmp_path, reason, evaluated
):
    it = learner(tmp_path, ["applied"] * 5, stop_at=(2, reason))
    it.train()
    assert it.ended_by == reason
    assert it.trainer.engine.saved[-1]["step"] == 2
    assert (("evaluate", "after 2", 2) in it.session.log) is evaluated


def test_every_gauge_that_the_broker_passes_on_is_reported(tmp_path):
    it = learner(tmp_path, ["applied"], evaluation_tasks=0)
    it.train()
    (_, scalars), *_ = it.trainer.report.lines
    assert scalars["broker/units_ready"] == 2.0
    assert scalars["env/number"] == 1.0


def test_a_learner_that_takes_over_publishes_above_what_generators_have(tmp_path):
    it = learner(tmp_path, ["applied"], evaluation_tasks=0)
    it.trainer.take_over(always=False)
    assert it.trainer.version == 0
    it.session.version_before = 7
    it.trainer.take_over(always=False)
    assert it.trainer.version == 8
    assert it.session.log == [("announce", 8)]
    assert it.session.line == [(0, 8)]


def test_a_broker_that_lost_what_it_knew_does_not_bring_versions_back(tmp_path):
    """Generators still serve the newer versions; a number used twice would name two sets of weights."""
    it = learner(tmp_path, ["applied"], evaluation_tasks=0)
    it.trainer.version, it.trainer.publisher.published, it.session.version_before = 4, PublishedVersion(9), 0
    it.trainer.take_over(always=True)
    assert (it.trainer.version, it.session.line) == (10, [(4, 10)])


def test_two_restarts_with_no_checkpoint_in_between_are_both_on_the_line(tmp_path):
    it = learner(tmp_path, ["applied"], evaluation_tasks=0)
    it.trainer.version, it.trainer.publisher.published, it.session.version_before = (
        10,
        PublishedVersion(25, ((10, 20),)),
        25,
    )
    it.trainer.take_over(always=True)
    assert (it.trainer.version, it.session.line) == (26, [(10, 20), (10, 26)])
    assert it.session.intake.line.lag(22, 26) == 2


def test_weights_that_were_published_before_keep_their_number(tmp_path):
    it = learner(tmp_path, ["applied"], evaluation_tasks=0)
    it.trainer.step, it.trainer.version, it.session.version_before = 4, 4, 4
    it.trainer.take_over(always=True)
    assert (it.trainer.version, it.session.line) == (4, [])


def test_weights_ahead_of_what_was_published_get_a_number_of_their_own(tmp_path):
    """The checkpoint was made out of turn, between two publications."""
    it = learner(tmp_path, ["applied"], evaluation_tasks=0, publish_every=2)
    it.trainer.step, it.trainer.version, it.trainer.unpublished, it.session.version_before = 5, 2, 1, 2
    it.trainer.take_over(always=True)
    assert (it.trainer.version, it.session.line, it.trainer.unpublished) == (3, [(2, 3)], 0)


def test_the_report_forgets_what_came_after_a_checkpoint(tmp_path):
    report = RealReport(tmp_path, wall_clock=lambda: 1_800_000_000.0004)
    for step in (1, 2, 3):
        report.write(step, {"learner/loss": float(step)})
    report.close()
    with open(tmp_path / "metrics.jsonl", "a") as lines:
        # A crash cut this line.
        lines.write('{"step": 4, "learner/lo')
    report = RealReport(tmp_path, wall_clock=lambda: 1_800_000_060.5)
    report.rewind(2)
    report.write(3, {"learner/loss": 30.0})
    report.note(3, "told")
    report.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(m["step"], m["learner/loss"]) for m in lines[:3]] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [m["time"] for m in lines] == [1_800_000_000.0, 1_800_000_000.0, *[1_800_000_060.5] * 2]


def test_a_metric_without_a_meaning_is_refused(tmp_path):
    report = RealReport(tmp_path)
    with pytest.raises(KeyError, match="learner/los"):
        report.write(1, {"learner/los": 1.0})
    report.close()


def test_what_was_trained_is_replayed_told_apart_and_part_of_the_checkpoint(tmp_path):
    config = ReplayConfig(rule="uniform", share=0.5, max_policy_lag=9)
    it = learner(tmp_path, ["applied"] * 3, evaluation_tasks=0)
    it.trainer.replay, trained = make_table(config), []

    def update(trajectories, *, current_version):
        trained.append([t.replayed for t in trajectories])
        report = Engine.update(it.trainer.engine, trajectories, current_version=current_version)
        return dataclasses.replace(report, replayed_tokens=4 * sum(trained[-1]) // 2)

    it.trainer.engine.update = update
    it.train()
    assert trained == [[False] * 2, [False, False, True, True], [False, False, True, True]]
    assert it.session.replayed == [0, 4, 4]
    assert (it.trainer.totals.trained_tokens, it.trainer.totals.replayed_tokens) == (4, 8)
    assert it.trainer.report.lines[1][1]["replay/share"] == 0.5
    # All trajectories of the fake have version 0; the updates had versions 0, 1 and 2.
    assert [scalars["replay/age_mean_versions"] for _, scalars in it.trainer.report.lines] == [0.0, 1.0, 2.0]
    it.checkpoints.save_beside(tmp_path)
    again = make_table(config)
    again.load(tmp_path / REPLAY_FILE)
    assert (len(again), again.sampled) == (len(it.trainer.replay), it.trainer.replay.sampled)


def test_a_commit_goes_out_before_the_state_is_taken_and_word_of_it_when_it_is_whole(tmp_path):
    it = learner(tmp_path, ["applied"] * 4, evaluation_tasks=0, checkpoint_every=2)
    it.train()
    steps = [entry for entry in it.session.log if entry[0] != "announce"]
    cut = lambda step: [("flush", step), ("save", step), ("checkpointed", step)]  # noqa: E731
    assert steps == [
        *[("commit", 1), ("refill", 1, 1)],
        *[("commit", 2), ("refill", 2, 2), *cut(2)],
        *[("commit", 3), ("refill", 3, 3)],
        *[("commit", 4), *cut(4)],
        ("confirm_commits", 4),
    ], "the last checkpoint is not written twice"


def test_the_broker_can_ask_for_a_checkpoint_between_steps_and_while_we_wait(tmp_path):
    it = learner(tmp_path, ["applied"] * 3, evaluation_tasks=0)
    collect = it.session.collect

    def wanted(*, step, version):
        if step == 1:
            it.session.checkpoint_wanted = "the journal is filling"
            it.session.while_waiting()
            assert [state["step"] for state in it.trainer.engine.saved] == [1]
            assert not it.session.checkpoint_wanted
        if step == 2:
            it.session.checkpoint_wanted = "again"
        return collect(step=step, version=version)

    it.session.collect = wanted
    it.train()
    assert [state["step"] for state in it.trainer.engine.saved] == [1, 3]


def test_a_learner_that_continues_a_lineage_hears_what_the_broker_holds_first(tmp_path):
    it = learner(tmp_path, ["applied"], evaluation_tasks=0)
    it.train(continues=True)
    assert it.session.log[0] == ("inherit",)


def test_an_evaluation_that_a_crash_left_out_is_made_up_for(tmp_path):
    it = learner(tmp_path, ["applied"] * 4, evaluation_every=2)
    it.trainer.step, it.trainer.version = 2, 2
    it.evaluations.records = [{"tag": "before", "step": 0}]
    it.trainer.engine.outcomes = ["applied"] * 2
    it.train()
    assert [e["tag"] for e in it.evaluations.records] == ["before", "step 2", "after"]


def test_every_set_is_evaluated_before_and_after_and_at_its_own_steps(tmp_path):
    sets = {"hard": {"tasks": 1, "samples": 2, "every": 3}, "end": {"every": 0}}
    it = learner(tmp_path, ["applied"] * 4, evaluation_every=2, evaluation=sets)
    it.train()
    assert [(e["set"], e["tag"]) for e in it.evaluations.records] == [
        ("", "before"), ("hard", "before"), ("end", "before"), ("", "step 2"), ("hard", "step 3"),
        ("", "after"), ("hard", "after"), ("end", "after"),
    ]  # fmt: skip
    asked = [entry[1] for entry in it.session.log if entry[0] == "evaluate"]
    assert asked[:3] == ["before 0", "hard before 0", "end before 0"]
    assert len(set(asked)) == len(asked), "tasks of two evaluations must not have one name"
    assert [step for step, line in it.trainer.report.lines if "evaluation/hard/answered" in line] == [0, 3, 4]
    assert [step for step, line in it.trainer.report.lines if "evaluation/answered_tasks" in line] == [
        0,
        2,
        4,
    ]


def test_a_set_that_is_new_at_a_restart_is_evaluated_before_the_next_step(tmp_path):
    it = learner(tmp_path, ["applied"] * 4, evaluation={"hard": {"tasks": 1}})
    it.trainer.step, it.trainer.version = 2, 2
    it.evaluations.records = [{"tag": "before", "step": 0}]
    it.trainer.engine.outcomes = ["applied"] * 2
    it.train()
    assert [(e.get("set", ""), e["step"]) for e in it.evaluations.records] == [
        ("", 0),
        ("hard", 2),
        ("", 4),
        ("hard", 4),
    ]


def test_a_learner_that_begins_again_forgets_what_was_reported(tmp_path):
    report = RealReport(tmp_path)
    report.write(1, {"learner/loss": 1.0})
    it = learner(tmp_path, ["applied"])
    it.trainer.report, it.session.version_before = report, 3
    it.start_from(Start(epoch=2, lineage=1, again=True))
    report.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert (it.trainer.step, it.trainer.version) == (0, 4)


def test_a_run_in_which_everything_fails_is_reported_and_ends_with_the_error(tmp_path):
    it = learner(tmp_path, ["applied"], evaluation_tasks=0)
    failed = make_trajectory("t", status="failed", error="KeyError: 'a' in t.py:3")
    it.session.intake.signal.episode(failed)
    it.session.intake.take_recent = lambda: [failed]

    def collect(*, step, version):
        raise NothingToLearn("64 of 64 episodes failed")

    it.session.collect = collect
    with pytest.raises(NothingToLearn):
        it.train()
    assert it.trainer.report.lines == [(0, {"rollout/failed_share": 1.0})]
    assert [row["message"] for row in it.trainer.report.failures] == ["KeyError: 'a' in t.py:3"]


def test_a_policy_that_has_nothing_left_to_learn_is_evaluated(tmp_path):
    it = learner(tmp_path, ["applied"] * 2, stop_at=(1, f"{SOLVED}: 128 in a row"))
    it.train()
    assert [entry[1] for entry in it.session.log if entry[0] == "evaluate"] == ["before 0", "after 1"]


@pytest.mark.filterwarnings("ignore:html5lib")
def test_tensorboard_has_a_table_of_the_reasons(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report, failures = RealReport(tmp_path), FailureCounts()
    failures.add(Failure(kind="KeyError", message="'a|b'", place="t.py:3"))
    for step in (1, 2):
        report.write_failures(step, failures)
    report.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (event,) = events.Tensors("failures/text_summary")
    assert "<code>KeyError: 'a|b' in t.py:3</code>" in shown_in_tensorboard(event)


def shown_in_tensorboard(event):
    from tensorboard.plugin_util import markdown_to_safe_html

    return html.unescape(markdown_to_safe_html(event.tensor_proto.string_val[0]))


def test_tensorboard_has_charts_histograms_of_returns_and_a_table_of_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    it = learner(tmp_path, ["applied"])
    it.trainer.report = it.evaluations.report = RealReport(tmp_path)
    it.trainer.samples = it.evaluations.samples = SampleLog(tmp_path, lambda ids: f"{len(ids)} tokens")
    it.session.held_out = [[make_trajectory("t", purpose="eval", reward=0.5)] * 2] * 2
    it.train()
    it.trainer.report.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    layout = layout_pb2.Layout.FromString(
        events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    )
    (category,) = layout.category
    assert [chart.title.split(" ")[0] for chart in category.chart] == [
        "reward", "held-out", "length", "lag", "idle", "failures",
    ]  # fmt: skip
    assert list(category.chart[0].multiline.tag) == [
        "rollout/return_mean$", "rollout/correct_share$", "reward/",
    ]  # fmt: skip
    assert events.Histograms("histogram/return_generated")[0].histogram_value.num == 1
    assert events.Histograms("histogram/advantage_trained")[0].histogram_value.num == 1
    assert events.Scalars("1_overview/1_rollout_return_mean")[0].value == 0.0
    assert sorted(events.Tags()["scalars"])[0].startswith("1_overview/")
    before, after = (e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/text_summary"))
    assert (
        "| `training, best` | `4 tokens` | `5 tokens` | `return 0 (score 0)` | `+0.250` | `v0` | `0` |"
        in after
    )
    assert "| `held-out, first` | `4 tokens` | `5 tokens` | `return 0.5 (score 0.5)` |" in before
    assert [(s.split, s.step, s.advantage) for s in read_samples(tmp_path)] == [
        *[("heldout", 0, None)] * 2,
        ("train", 1, 0.25),
        ("train", 1, None),
        *[("heldout", 1, None)] * 2,
    ]


def test_the_first_group_has_samples_while_no_step_comes_and_after_an_interrupt(tmp_path):
    it = learner(tmp_path, ["applied"], stop_at=(0, "SIGTERM"), evaluation_tasks=0)
    it.trainer.samples = SampleLog(tmp_path, lambda ids: f"{len(ids)} tokens")
    it.session.intake.recent = []
    it.while_waiting()
    assert list(read_samples(tmp_path)) == []
    it.session.intake.recent = [make_trajectory("1g0.0.0", group="1g0", group_size=1, reward=0.0)]
    it.train()
    assert [(s.step, s.chosen, s.return_) for s in read_samples(tmp_path)] == [(0, "first", 0.0)]
    it.while_waiting()
    assert len(list(read_samples(tmp_path))) == 1


def test_rewards_of_several_names_have_a_histogram_each(tmp_path):
    two = [Reward("exact", 1, 1.0), Reward("format", 1, 0.5), Reward("exact", 3, 0.5)]
    arrived = [make_trajectory("a", rewards=two), make_trajectory("b", rewards=two[:1])]
    arrived.append(make_trajectory("c", status="failed", rewards=two))
    found = return_histograms(arrived)
    assert {name: values.tolist() for name, values in found.items()} == {
        "return_generated": [2.0, 1.0],
        "reward/exact": [1.5, 1.0],
        "reward/format": [0.5],
    }
    assert list(return_histograms(arrived[1:])) == ["return_generated"]
    report = RealReport(tmp_path)
    report.write(1, {}, found)
    with pytest.raises(KeyError, match="rewards_of"):
        report.write(1, {}, {"rewards_of": np.zeros(1)})
    report.close()


def test_an_evaluation_of_tasks_that_were_never_run_is_repeated_once_and_never_a_figure(tmp_path):
    """L2: all held-out tasks failed for want of a generator, and the run said: accuracy 0.00."""
    it = learner(tmp_path, ["applied"])
    solved = make_trajectory("t", correct=True)
    it.session.held_out = [[None, None], [solved, solved], [None, solved], [None, None]]
    it.train()
    assert [entry[1] for entry in it.session.log if entry[0] == "evaluate"] == [
        "before 0", "before 0 again", "after 1", "after 1 again",
    ]  # fmt: skip
    before, after = it.evaluations.records
    assert (before["accuracy"], before["answered"]) == (1.0, 2)
    assert (after["accuracy"], after["return_mean"], after["not_run"]) == (None, None, 2)
    reported = [line for _, line in it.trainer.report.lines if "evaluation/not_run_tasks" in line]
    assert "evaluation/accuracy" in reported[0]
    assert not {"evaluation/accuracy", "evaluation/return_mean"} & set(reported[1])


def right(number):
    """Return two answers, of which so many are right."""
    return [dataclasses.replace(make_trajectory("t"), correct=i < number) for i in range(2)]


def models_of(folder):
    return sorted(path.name for path in (folder / "models").glob("*"))


def test_the_best_model_is_kept_and_a_checkpoint_knows_of_it_before_the_one_before_goes(tmp_path):
    it = learner(tmp_path, ["applied"] * 8, evaluation_every=2, export_every=4)
    it.session.held_out = [right(n) for n in (2, 0, 1, 0, 1)]
    it.train()
    assert models_of(tmp_path) == ["best-step-000004", "step-000004", "step-000008"]
    written = [e[1] for e in it.session.log if e[0] in ("save_pretrained", "save")]
    assert written == [
        "best-step-000002.partial",
        "step-000004.partial",
        "best-step-000004.partial",
        "step-000008.partial",
        8,
    ]


def test_the_best_model_before_stays_until_a_checkpoint_knows_of_the_evaluation(tmp_path):
    it = learner(tmp_path, ["applied"] * 6, evaluation_every=2, checkpoint_every=3)
    it.session.held_out = [right(n) for n in (0, 1, 2)]
    it.trainer.engine.save, saved = (
        (lambda folder, state, also: saved.append((state["step"], models_of(tmp_path)))),
        [],
    )
    it.train()
    both = ["best-step-000002", "best-step-000004"]
    assert saved == [(3, both[:1]), (6, both)]
    assert models_of(tmp_path) == both[1:]


def test_an_evaluation_whose_model_is_gone_does_not_keep_others_from_being_the_best(tmp_path):
    it = learner(tmp_path, ["applied"] * 6, evaluation_every=2, checkpoint_every=1)
    it.session.held_out = [right(n) for n in (0, 2, 1)]
    learn = it.learn
    it.learn = lambda: (shutil.rmtree(tmp_path / "models") if it.trainer.step == 3 else None, learn())
    it.train()
    assert models_of(tmp_path) == ["best-step-000004"]


def test_the_evaluation_at_the_end_writes_and_deletes_no_model(tmp_path):
    it = learner(tmp_path, ["applied"] * 4, evaluation_every=2)
    it.session.held_out = [right(n) for n in (0, 1, 2)]
    it.train()
    assert models_of(tmp_path) == ["best-step-000002"]


@pytest.mark.parametrize(
    ("at_the_end", "left"), [(2, []), (1, ["best-step-000002"]), (0, ["best-step-000002"])]
)
def test_no_other_one_stays_if_the_evaluation_at_the_end_is_the_best(tmp_path, at_the_end, left):
    it = learner(tmp_path, ["applied"] * 4, evaluation_every=2)
    it.session.held_out = [right(n) for n in (0, 1, at_the_end)]
    it.train()
    it.checkpoints.write_last_model()
    assert models_of(tmp_path) == left
    assert ("save_pretrained", "model") in it.session.log


def test_a_resumed_run_deletes_models_of_steps_that_it_does_again(tmp_path):
    it = learner(tmp_path, ["applied"] * 4, evaluation_every=2, export_every=1)
    it.session.held_out = [right(n) for n in (0, 1, 1)]
    it.train()
    it.trainer.step, it.evaluations.records = 1, it.evaluations.records[:1]
    it.trainer.report.rewind = lambda step: None
    it.checkpoints.rewind()
    assert models_of(tmp_path) == ["step-000001"]


def described(it):
    """Have the models of a run described in a file, and return what each one was told."""
    told = []

    def describe(folder, name, facts):
        (folder / "README.md").write_text(name)
        told.append((name, facts["steps"], [e["step"] for e in facts["evaluations"]], facts["ended_by"]))

    it.describe = describe
    return told


def test_each_model_is_described_when_it_is_written_with_the_results_so_far(tmp_path):
    it = learner(tmp_path, ["applied"] * 4, evaluation_every=2, export_every=2)
    it.session.held_out, told = [right(n) for n in (0, 1, 1)], described(it)
    it.train()
    it.checkpoints.write_last_model()
    assert told == [
        ("step-000002", 2, [0], "the run goes on"),
        ("best-step-000002", 2, [0, 2], "the run goes on"),
        # The evaluation of a step comes after its model.
        ("step-000002", 2, [0, 2], "the run goes on"),
        ("step-000004", 4, [0, 2], "the run goes on"),
        ("step-000004", 4, [0, 2, 4], "all steps done"),
        ("model", 4, [0, 2, 4], "all steps done"),
    ]
    assert [path.parent.name for path in sorted(tmp_path.rglob("README.md"))] == [
        "model", "best-step-000002", "step-000002", "step-000004",
    ]  # fmt: skip


def test_a_model_that_cannot_be_described_stays_and_the_run_goes_on(tmp_path, caplog):
    it = learner(tmp_path, ["applied"] * 2, evaluation_tasks=0, export_every=1)

    def full(folder, name, facts):
        raise OSError(28, "No space left on device")

    it.describe = full
    it.train()
    assert models_of(tmp_path) == ["step-000001", "step-000002"]
    assert "no model card: [Errno 28] No space left on device" in caplog.text


def test_no_best_model_is_kept_where_nobody_wants_it(tmp_path):
    it = learner(tmp_path, ["applied"] * 4, evaluation_every=2, keep_best=False)
    it.train()
    assert models_of(tmp_path) == []


class Behind(Unpublished):
    """A publisher that announces a version only when somebody waits for it, or when the next one comes."""

    def __init__(self):
        super().__init__()
        self.held, self.failure = None, None

    def publish(self, version, weights, *, announce, line=()):
        self.settle()
        self.held = lambda: Unpublished.publish(self, version, weights, announce=announce, line=line)

    def settle(self):
        self.check()
        if self.held is not None:
            self.held()
            self.held = None

    def check(self):
        if self.failure is not None:
            raise self.failure


def behind(tmp_path, outcomes, **settings):
    it = learner(tmp_path, outcomes, **settings)
    it.trainer.publisher = Behind()
    return it


def test_a_version_is_announced_behind_the_next_step_and_the_last_one_before_the_learner_leaves(tmp_path):
    it = behind(tmp_path, ["applied"] * 2, evaluation_tasks=0)
    it.train()
    events = [entry[:2] for entry in it.session.log if entry[0] in ("announce", "commit", "confirm_commits")]
    assert events == [
        ("commit", 1), ("announce", 1), ("commit", 2), ("announce", 2), ("confirm_commits", 2),
    ]  # fmt: skip
    assert it.trainer.publisher.announced == it.trainer.version == 2


def test_in_lockstep_a_version_is_announced_before_tasks_are_put(tmp_path):
    it = behind(tmp_path, ["applied"] * 2, evaluation_tasks=0)
    it.session.awaits_versions = True
    it.train()
    events = [entry[:2] for entry in it.session.log if entry[0] in ("announce", "refill")]
    assert events == [("announce", 1), ("refill", 1), ("announce", 2)]


def test_an_evaluation_waits_until_its_version_is_announced(tmp_path):
    it = behind(tmp_path, ["applied"] * 2, evaluation_every=1)
    it.train()
    events = [entry[-1] for entry in it.session.log if entry[0] in ("announce", "evaluate")]
    assert events == [0, 1, 1, 2, 2]


def test_a_publication_that_fails_ends_the_learner_while_it_waits_for_data(tmp_path):
    it = behind(tmp_path, ["applied"] * 2, evaluation_tasks=0)

    def collect(*, step, version):
        if step == 0:
            return [Unit("u", "g", [make_trajectory("t")])]
        it.trainer.publisher.failure = OSError("No space left on device")
        it.session.while_waiting()
        raise AssertionError("the learner goes on waiting")

    it.session.collect = collect
    with pytest.raises(OSError, match="No space left"):
        it.train()


def test_the_learner_stands_until_the_copy_and_says_when_the_version_was_announced(tmp_path):
    it = behind(tmp_path, ["applied"] * 2, evaluation_tasks=0)
    it.trainer.publisher.stood_s, it.trainer.publisher.announced_s = 0.5, None
    it.train()
    assert [line["learner/publish_seconds"] for _, line in it.trainer.report.lines] == [0.5, 0.5]
    assert not any("learner/announce_seconds" in line for _, line in it.trainer.report.lines)
    assert it.trainer.totals.publish_seconds >= 1.0
    again = behind(tmp_path, ["applied"], evaluation_tasks=0)
    again.trainer.publisher.announced_s = 2.0
    again.train()
    assert again.trainer.report.lines[0][1]["learner/announce_seconds"] == 2.0


def test_heartbeats_say_what_the_learner_trained_and_how_long_it_waited(tmp_path):
    it = learner(tmp_path, ["applied"] * 2, evaluation_tasks=0)
    assert it.trainer.pace == ()
    it.train()
    told, totals = dict(it.trainer.pace), it.trainer.totals
    assert told["trained_tokens_total"] == totals.trained_tokens > 0
    assert told["idle_seconds_total"] == totals.wait_seconds
    assert 0 < told["busy_seconds_total"] <= totals.step_seconds
