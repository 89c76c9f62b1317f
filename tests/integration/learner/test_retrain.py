"""Retraining a run from its journal gives bit-equal weights. The engine is real, the rollouts are not."""

import dataclasses
import json
import queue
from zlib import crc32

import numpy as np
import pytest

import learner.retrain
from broker.config import JournalConfig
from broker.core.records import Committed, LearnerJoined, Published, TasksPut, encode_event
from broker.journal.journal import Journal
from broker.journal.writer import Kind, pack_segment
from launch.commands import retrain as recording
from launch.commands.retrain import same_weights
from launch.commands.tokens import TrainedTokens, export_trained, token_file
from launch.view.inspector import Words
from learner.annotation_files import read_index
from learner.annotations import AnnotationLog
from learner.curriculum import Curriculum
from learner.errors import CannotRetrain
from learner.intake.session import BrokerSession
from learner.intake.waiting_families import WaitingFamilies
from learner.metrics import Report
from learner.process import DELIVERY_UNITS
from learner.replay.table import replay_table
from learner.retrain import Unpublished, retrain
from learner.run import TrainingRun
from learner.run_files import find_start
from learner.settings.learner import LearnerConfig
from learner.trainer import Trainer
from learner.update.engine import TrainingEngine
from protocol import names
from protocol.codec import MINOR, decode, encode_arrays, encode_delivery
from protocol.messages.episodes import Commit, Deliver, Dropped, Held, PutTasks, Reward, Segment, Turn
from protocol.messages.peers import Hello, PublishWeights, Welcome
from tests.integration.learner.tiny_qwen3 import VOCAB
from tests.methods import METHODS as METHODS_OF_ENGINE
from tests.methods import OWN

SEED = 5
PROMPT, WINDOW = 3, 4
COMMON = {
    "group_size": 2,
    "batch_trajectories": 8,
    "max_policy_lag": 2,
    "steps": 8,
    "evaluation_tasks": 0,
    "micro_batch_tokens": 64,
    "checkpoint_every": 3,
    "start_timeout_s": 20.0,
    "data_timeout_s": 20.0,
}
METHODS = {
    "groups": {"replay": {"rule": "uniform", "share": 0.5, "max_policy_lag": 6}},
    "groups_with_adapters": {
        "replay": {"rule": "uniform", "share": 0.5, "max_policy_lag": 6},
        "lora": {"rank": 4},
    },
    "lane": {"lane": {"members": 2, "target_entropy": 3.0}, "algorithm": {"surrogate": {"kind": "clip"}}},
    "hints": {"family": {"kind": "hint", "shares": [0.5, 1.0]}, "max_policy_lag": 4},
    "verdicts": {
        "family": {"kind": "verdict", "reward": "score", "readers": 2, "from_version": 1},
        "max_policy_lag": 4,
    },
    "judgements": {
        "family": {"kind": "judge", "answers": 2, "reference": "absent", "highest": 1.0},
        "group_size": 4,
        "max_policy_lag": 4,
    },
    "proposals": {
        "selection": {"kind": "population", "instructions": ["a", "b", "c"], "prune_every": 1},
        "family": {"kind": "propose", "every": 1},
        "max_policy_lag": 4,
    },
    "own_formulas": {
        "algorithm": {key: METHODS_OF_ENGINE["own"][key] for key in ("surrogate", "corrections", "advantage")},
        "reward": {"own": {"kind": f"{OWN}:as_given"}},
        "replay": {"rule": "uniform", "share": 0.5, "max_policy_lag": 6},
    },
    "windows_with_own_formulas": {
        "train_on": "windows",
        "algorithm": {
            "advantage": {"kind": "gae", "discount": 1.0, "trace": 0.95, "ignored_tail": 1},
            "critic": {"model": "head"},
            "surrogate": {"kind": f"{OWN}:by_length"},
            "corrections": [{"kind": f"{OWN}:truncated"}],
        },
    },
    "windows": {
        "train_on": "windows",
        "algorithm": {
            "advantage": {"kind": "gae", "discount": 1.0, "trace": 0.95, "ignored_tail": 1},
            "critic": {"model": "head", "target": "monte_carlo", "clip_low": 0.5, "clip_high": 0.6},
        },
    },
}  # fmt: skip


JUDGED = {"verdicts": "family/flawed_share", "judgements": "family/judged"}
"""Methods whose judgements are not trained, with a metric of what they say."""


def read(token_ids):
    """Return the text of an answer, in which every fourth token is a number, 0 or 1."""
    return " ".join("word" if token % 4 else str(token % 8 // 4) for token in token_ids)


class System:
    """Broker, actors and generators in one. It samples at once, at recent versions, and keeps the journal."""

    def __init__(self, folder, config):
        self.rng, self.config = np.random.default_rng(0), config
        self.journal = Journal.open(folder, run="r", config=JournalConfig())
        self.deliver = DELIVERY_UNITS[config.train_on]
        self.session, self.inbox = self, self
        self.version, self.minor = 0, MINOR
        self.known: set[str] = set()
        self.groups: dict[str, list] = {}
        self.units: dict[str, tuple] = {}
        """Frames and tasks of each unit by unit id, in the order in which the units became ready."""
        self.committed: dict[str, int] = {}
        self.queue: list = []
        self.joined = True

    @property
    def policy_version(self):
        return self.version

    def rejoin(self):
        """Answer the join at the end of the run: the broker holds no committed unit."""
        self.queue += [None, (Held(task_ids=[]), [])]

    @property
    def welcome(self):
        return Welcome(run="r", epoch=0, heartbeat_s=1.0, policy_version=self.version)

    def join(self, begin):
        hello = Hello(
            role="learner",
            peer="learner",
            incarnation=begin.epoch,
            epoch=begin.epoch,
            lineage=begin.lineage,
            step=begin.step,
            deliver=self.deliver,
        )
        self.record_event(LearnerJoined(hello=hello))
        self.committed = {unit: step for unit, step in self.committed.items() if step <= begin.step}
        back = [unit for unit in self.units if unit not in self.committed]
        held = sorted({task for unit in back for task in self.units[unit][1]})
        self.queue = [None, (Held(task_ids=held), []), *(self.units[unit][0] for unit in back)]

    def record_event(self, event):
        self.journal.append(Kind.EVENT, encode_event(event))

    def send(self, message, join=None):
        match message:
            case PutTasks(tasks=tasks):
                self.record_event(TasksPut(tasks=tasks))
                for task in tasks:
                    self.put(task)
            case Commit():
                self.committed |= dict.fromkeys([*message.trained, *message.dropped], message.step)
                self.record_event(
                    Committed(
                        epoch=message.epoch,
                        step=message.step,
                        trained=message.trained,
                        dropped=message.dropped,
                        replayed_tokens=message.replayed_tokens,
                        version=message.version,
                    )
                )
            case PublishWeights(version=version, line=line):
                self.version = version
                self.record_event(Published(epoch=message.epoch, version=version, manifest="m", line=line))

    def put(self, task):
        if task.task_id in self.known:
            if not any(
                task.task_id in tasks for unit, (_, tasks) in self.units.items() if unit not in self.committed
            ):
                name = task.group_id if self.deliver == "group" else task.task_id
                over = Dropped(unit_id=name, group_id=task.group_id, trajectories=1, reason="over")
                self.queue.append((over, []))
            return
        self.known.add(task.task_id)
        segments = self.rollout(task)
        if self.deliver == "segment":
            for index, stored in enumerate(segments):
                self.ready(f"{task.task_id}.0/{index}", [stored], [task.task_id], index + 1 == len(segments))
            return
        group = self.groups.setdefault(task.group_id, [])
        group.append((task.task_id, segments))
        if len(group) == task.group_size:
            order = self.rng.permutation(len(group))
            members = [stored for place in order for stored in group[place][1]]
            self.ready(task.group_id, members, [name for name, _ in group])

    def ready(self, unit_id, segments, tasks, complete=True):
        for stored in segments:
            self.journal.append(Kind.SEGMENT, *pack_segment(*stored))
        head = Deliver(unit_id=unit_id, segments=len(segments), complete=complete)
        self.units[unit_id] = decode(encode_delivery(head, segments)), tasks
        self.queue.append(self.units[unit_id][0])

    def rollout(self, task):
        """Return the segments of one trajectory: a prompt and some windows of actions."""
        windows = int(self.rng.integers(1, 4))
        version = max(0, self.version - int(self.rng.integers(0, 4)))
        segments = []
        for index in range(windows):
            begin = 0 if index == 0 else PROMPT + WINDOW * index
            end = PROMPT + WINDOW * (index + 1)
            actions = np.arange(begin, end) >= PROMPT
            last = index + 1 == windows
            head = Segment(
                trajectory_id=f"{task.task_id}.0",
                task_id=task.task_id,
                group_id=task.group_id,
                group_size=task.group_size,
                temperature=task.sampling.temperature,
                index=index,
                offset=begin,
                tokens=end - begin,
                action_tokens=WINDOW,
                status="finished" if last else "unfinished",
                turns=[
                    *([Turn(0, 0, PROMPT, False)] if index == 0 else []),
                    Turn(1, max(begin, PROMPT), end, True),
                ],
                rewards=[Reward("score", 1, float(self.rng.integers(0, 2)))] if last else [],
                extra={"hints": ["solution"]} if last and self.config.family else {},
            )
            token_ids = self.rng.integers(0, VOCAB, end - begin).astype(np.int32)
            if index == 0:
                token_ids[:PROMPT] = self.prompt(task)
            arrays = {
                "token_ids": token_ids,
                "action_mask": actions.astype(np.uint8),
                "logp_behaviour": np.where(actions, -3.0 + self.rng.random(end - begin), 0).astype(
                    np.float32
                ),
                "policy_version": np.where(actions, version, -1).astype(np.int32),
            }
            segments.append(tuple(bytes(frame) for frame in encode_arrays(head, arrays)[1:3]))
        return segments

    def prompt(self, task):
        """Return the tokens of a prompt. Of a family they are alike, but for a note, which old actors leave out."""
        family = self.config.family and names.group_index(task.group_id)
        if family is None:
            return self.rng.integers(0, VOCAB, PROMPT)
        noted = crc32(task.note.encode()) if self.rng.random() < 0.7 else 0
        return np.random.default_rng([family, noted]).integers(0, VOCAB, PROMPT)

    def get_nowait(self):
        if not self.queue:
            raise queue.Empty
        return self.queue.pop(0)

    def get(self, timeout):
        return self.get_nowait()

    def end(self):
        self.journal.flush()
        self.journal.close()


class Killed(BaseException):
    """Exception that stands for the death of the process."""


def learn(system, folder, config, model, *, resume=False, kill_at=None):
    """Run one learner process of a run. Return the learner."""
    begin = find_start(folder, resume=resume, lockstep=False)
    engine = TrainingEngine(config, model=model, total_steps=config.steps, seed=SEED)
    system.join(begin)
    curriculum = Curriculum("e", config, begin.epoch, lineage=begin.lineage)
    session = BrokerSession(
        system, curriculum, config, lockstep=False, stop_reason=lambda: "", step=begin.step
    )
    trainer = Trainer(
        config,
        folder,
        engine,
        session,
        Unpublished(),
        Report(folder),
        replay=replay_table(config),
        # The learners of `retrain` have none, so equal weights say that annotations change no weight.
        annotations=AnnotationLog(folder, mib=64, floats="float32"),
        seed=SEED,
    )
    it = TrainingRun(trainer, session)
    if config.family is not None:
        session.intake.families = WaitingFamilies(config.family, curriculum, read, SEED)
    if kill_at:
        commit = session.commit

        def until(groups, *, step, **more):
            commit(groups, step=step, **more)
            if groups and step == kill_at:
                raise Killed

        session.commit = until
    try:
        it.start_from(begin)
        it.train(continues=begin.continues)
        engine.save_pretrained(folder / "model")
    except Killed:
        pass
    finally:
        it.trainer.report.close()
        it.trainer.annotations.close()
        engine.close()
    return it


@pytest.fixture(params=sorted(METHODS))
def run(request, tmp_path, model, monkeypatch):
    """Return a function that plays a run of one or two learner processes; it returns folder and settings."""
    # The model has no tokenizer.
    monkeypatch.setattr(learner.retrain, "decoder_of_judgements", lambda config, model: read)

    def play(*, kill_at=None):
        config = LearnerConfig.model_validate(COMMON | METHODS[request.param])
        folder = tmp_path / "run"
        folder.mkdir()
        system = System(folder / "journal", config)
        it = learn(system, folder, config, model, kill_at=kill_at)
        if kill_at:
            it = learn(system, folder, config, model, resume=True)
        system.end()
        assert it.trainer.step == config.steps
        counts = it.session.intake.counts
        assert counts.total("stale") or counts.total("uniform")
        assert config.replay is None or it.trainer.totals.replayed_tokens
        annotated = [step.step for step, _ in read_index(folder)]
        assert annotated == list(range(1, config.steps + 1)), "each step once, also those done again"
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        if metric := JUDGED.get(request.param):
            assert counts.total("judgement")
            assert sum(step.get(metric, 0.0) > 0 for step in steps) > 2
        if request.param == "proposals":
            assert counts.total("proposal")
            assert any(step.get("selection/proposed_share", 0.0) > 0 for step in steps)
        assert request.param != "hints" or (counts.total("unhinted") and counts.total("without_note"))
        return folder, config

    return play


def train_again(folder, config, model, out, last=None, tokens=None):
    recorded = recording.read_recording(folder / "journal")
    steps = recorded.steps(last or recorded.last)
    return retrain(config, model=model, seed=SEED, steps=steps, out=out, tokens=tokens)


def test_two_replays_and_the_run_itself_have_the_same_weights(run, model, tmp_path):
    folder, config = run()
    for name in ("one", "two"):
        assert train_again(folder, config, model, tmp_path / name) == config.steps
        assert same_weights(tmp_path / name, folder / "model")
    assert train_again(folder, config, model, tmp_path / "half", last=4) == 4
    assert not same_weights(tmp_path / "half", folder / "model")


def test_a_run_whose_learner_was_killed_is_replayed_as_it_went_on(run, model, tmp_path):
    folder, config = run(kill_at=5)
    assert train_again(folder, config, model, tmp_path / "one") == config.steps
    assert same_weights(tmp_path / "one", folder / "model")


class Listening(TrainedTokens):
    """Writes tokens, and keeps what the learner had in its hands."""

    def __init__(self, writer):
        super().__init__(writer, Words(None))
        self.used = {}
        self.tokens = 0

    def step(self, step, version, trajectories, numbers, **more):
        super().step(step, version, trajectories, numbers, **more)
        self.tokens += len(numbers.place)
        owner = np.searchsorted(numbers.batch.starts, numbers.place, side="right") - 1
        values = {name: numbers.trained(name) for name in FLOATS}
        for i, (place, at) in enumerate(zip(numbers.place.tolist(), owner.tolist(), strict=True)):
            key = step, trajectories[at].trajectory_id, place - int(numbers.batch.starts[at])
            # A trajectory may be twice in a batch, as itself and replayed.
            self.used.setdefault(key, []).append({name: values[name][i] for name in FLOATS})


FLOATS = (
    "logp_behaviour",
    "logp_proximal",
    "logp_current",
    "ratio",
    "correction",
    "weight",
    "advantage",
    "entropy",
)


@pytest.mark.parametrize("run", ["groups", "windows"], indirect=True)
def test_tokens_are_what_the_learner_used_bit_for_bit(run, model, tmp_path):
    folder, config = run(kill_at=5)
    with token_file(tmp_path / "again.jsonl") as writer:
        listening = Listening(writer)
        train_again(folder, config, model, tmp_path / "again", tokens=listening)
    again = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    assert {row["step"] for row in again} == set(range(1, config.steps + 1))
    found = {}
    for row in again:
        if row["logp_current"] is not None:
            key = row["step"], row["trajectory"], row["position"]
            found.setdefault(key, []).append({name: np.float32(row[name]) for name in FLOATS})
    assert found.keys() == listening.used.keys()
    assert sum(map(len, found.values())) == listening.tokens > 100
    for key, used in listening.used.items():
        for one, other in zip(used, found[key], strict=True):
            assert all(one[name].tobytes() == other[name].tobytes() for name in FLOATS), key
    assert {row["masked"] for row in again if row["logp_current"] is None} <= {"lag", "method"}
    assert all(
        row["lag"] > config.max_policy_lag for row in again if row["masked"] == "lag" and not config.replay
    )
    # The run itself kept equal numbers, through a kill.
    said = export_trained(folder, tmp_path / "kept.jsonl")
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert f"{len(kept)} tokens of " in said
    of_steps = [row | {"weight": None, "env": ""} for row in kept if row["step"] is not None]
    expected = [row | {"weight": None, "env": "", "version": 0} for row in again]
    order = lambda row: (row["step"], row["trajectory"], row["position"], str(row["advantage"]))  # noqa: E731
    # The learner places versions of undone steps on its newest line, the journal has them as they were sampled.
    assert sorted((row | {"version": 0} for row in of_steps), key=order) == sorted(expected, key=order)
    outcomes = {row["outcome"] for row in kept if row["step"] is None}
    # What a learner dropped behind its checkpoint, and could not say why before it was killed, is just "dropped".
    assert outcomes <= {"uniform", "stale", "waiting", "context", "trained", "dropped"}
    assert outcomes & {"uniform", "stale"}


def test_other_settings_that_would_train_other_units_are_found(run, model, tmp_path):
    folder, config = run()
    recorded = recording.read_recording(folder / "journal")
    steps = list(recorded.steps(2))
    with pytest.raises(CannotRetrain, match="step 1 is not recorded, the next one that is is 2"):
        retrain(config, model=model, seed=SEED, steps=steps[1:], out=tmp_path / "gap")
    units = [unit for unit in steps[0].units if unit.deliver.unit_id != steps[0].trained[0]]
    short = [dataclasses.replace(steps[0], units=units)]
    with pytest.raises(CannotRetrain, match=r"step 1: \d of the \d units that were trained cannot be"):
        retrain(config, model=model, seed=SEED, steps=short, out=tmp_path / "short")
