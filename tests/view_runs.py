"""Run folders for tests of the viewer: the broker's own state writes their journals, without processes."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models

from broker.config import BrokerConfig, JournalConfig
from broker.core.records import Committed, Delivered, LearnerJoined, Leased, Published, Released, TasksPut
from broker.core.state import BrokerState
from broker.journal.journal import Journal
from broker.output_commit import JournalStore, snapshot
from launch.run_file.load import check
from protocol.codec import encode_arrays
from protocol.messages.episodes import Reward, Segment, Task, Turn, TurnTime
from protocol.messages.peers import Hello

BOUND = 2
CLOCK = 1_800_000_000.0
VOCABULARY = {"<bos>": 0, "Ġ2": 1, "+": 2, "Ġ=": 3, "4": 4, "5": 5, "<eos>": 6, "<tool>": 7}


class Maker:
    """Writes a run folder: settings, tokenizer, and a journal through the broker's own state.

    Args:
        folder: run folder, which is made.
        settings: sections of the run file over those here.
        journal: settings of the journal.
    """

    def __init__(self, folder, *, name="made", env="sums", seed=0, journal=None, settings=None):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.env, self.rng = folder, env, np.random.default_rng(seed)
        data = {"model": {"path": "m"}, "env": {"name": "calculator"}, "run": {"name": name}}
        data |= {
            "learner": {"max_policy_lag": BOUND, "steps": 9, "batch_trajectories": 4, "group_size": 2}
        } | (settings or {})
        (folder / "config.json").write_text(check(data, "test").model_dump_json(indent=1))
        (folder / "model").mkdir(exist_ok=True)
        tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<bos>"))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "model" / "tokenizer.json"))
        self.now = CLOCK
        config = journal or JournalConfig(min_free_bytes=0, sync_interval_s=0.05)
        self.journal = Journal.open(folder / "journal", run=folder.name, config=config)
        self.store = JournalStore(self.journal, 1 << 30, wall_clock=self._tick)
        self.state = BrokerState(BrokerConfig(), self.store, BOUND)
        self.version, self.step, self.count = 0, 0, 0
        self.metrics = []
        self.state.record(
            LearnerJoined(hello=Hello(role="learner", peer="learner", incarnation=1, epoch=1, lineage=1)), 0.0
        )

    def _tick(self):
        self.now += 0.1
        return self.now

    def group(
        self,
        size=2,
        *,
        rewards=None,
        versions=None,
        answers=None,
        purpose="train",
        tag="",
        texts=None,
        **changes,
    ):
        """Put a group of tasks and play them; return their trajectory ids."""
        number, self.count = self.count, self.count + 1
        group = f"1g{number}" if purpose == "train" else f"1eval-{tag}-{changes.pop('task', number)}"
        names = [f"{group}.{i}" for i in range(size)] if purpose == "train" else [group]
        tasks = [
            Task(task_id=name, env=self.env, group_id=group, group_size=len(names), member=i, purpose=purpose)
            for i, name in enumerate(names)
        ]
        self.state.record(TasksPut(tasks=tasks), 0.0)
        for i, name in enumerate(names):
            self.state.record(Leased(task_id=name, lease_id=f"l{number}-{i}", actor="actor-0"), 0.0)
        for i, name in enumerate(names):
            self.play(
                name,
                group,
                len(names),
                purpose=purpose,
                reward=float(self.rng.integers(0, 4)) / 4 if rewards is None else rewards[i],
                versions=[self.version] * 3 if versions is None else versions[i],
                **changes,
            )
        return [f"{name}.0" for name in names]

    def play(
        self,
        task,
        group,
        size,
        *,
        reward,
        versions,
        purpose="train",
        status="finished",
        error="",
        reward_name="score",
        stop="stop",
        tools=0.5,
        correct=None,
        env=None,
        extra=None,
        back=1,
    ):
        """Send the segment of one trajectory: a prompt of four tokens, an answer, an observation, an answer."""
        n, m = len(versions), 2
        action = [False] * 4 + [True] * n + [False] + [True] * m
        ids = [0, 1, 2, 1, *self.rng.integers(3, 7, n).tolist(), 7, *self.rng.integers(3, 7, m).tolist()]
        version = np.array([-1] * 4 + versions + [-1] + [versions[-1]] * m, np.int32)
        logp = np.where(action, -self.rng.random(len(ids)), 0.0)
        turns = [
            Turn(0, 0, 4, False),
            Turn(1, 4, 4 + n, True),
            Turn(2, 4 + n, 5 + n, False, back),
            Turn(3, 5 + n, 5 + n + m, True),
        ]
        segment = Segment(
            trajectory_id=f"{task}.0",
            task_id=task,
            group_id=group,
            group_size=size,
            index=0,
            offset=0,
            tokens=len(ids),
            action_tokens=n + m,
            status=status,
            stop_reason=stop,
            env=env or self.env,
            purpose=purpose,
            version_min=min(versions),
            version_max=max(versions),
            turns=turns,
            rewards=[]
            if status == "failed"
            else [Reward(reward_name, 1, reward / 2), Reward(reward_name, 3, reward / 2)],
            generator="generator-0",
            error=error,
            extra=({} if correct is None else {"correct": correct}) | (extra or {}),
            times=[TurnTime(1, 0.2, 1.0, tools), TurnTime(3, 0.1, 0.3, 0.0)],
        )
        arrays = {
            "token_ids": np.array(ids, np.int32),
            "action_mask": np.array(action, np.uint8),
            "logp_behaviour": logp.astype(np.float32),
            "policy_version": version,
        }
        _, header, body = encode_arrays(segment, arrays)
        from protocol.codec import decode_segment

        self.state.store_segment(decode_segment(header), bytes(header), body, 0.0)

    def train(self, *, drop=(), publish=True):
        """Deliver all units that are ready, commit them, and publish a version. Write a line of metrics."""
        trained, dropped = [], []
        while (unit := self.state.deliveries.next()) is not None:
            self.state.record(Delivered(unit_id=unit.unit_id, epoch=1), 0.0)
            (dropped if unit.purpose == "eval" or unit.group_id in drop else trained).append(unit.unit_id)
        self.step += bool(trained)
        version = self.version if trained else -1
        self.state.record(
            Committed(epoch=1, step=self.step, trained=trained, dropped=dropped, version=version), 0.0
        )
        if publish and trained:
            self.version += 1
            self.state.record(Published(epoch=1, version=self.version, manifest="m"), 0.0)
        if trained:
            self.line(**{"learner/loss": 0.5, "rollout/return_mean": self.step / 10})
        self.journal.flush()
        self.state.take_notices()

    def line(self, **metrics):
        """Write a line of metrics.jsonl, with the ledger of now."""
        ledger = self.state.ledger
        row = {
            "step": self.step,
            "time": self.now,
            "learner/policy_version": float(self.version),
            "learner/policy_lag_max_versions": float(min(BOUND, self.version)),
            "learner/wait_seconds": 0.5,
            "learner/step_seconds": 1.5,
            "learner/publish_seconds": 0.1,
            "learner/idle_share": 0.05,
            "generator/idle_share": 0.4,
            "generator/tokens_total": float(ledger.stored.action_tokens + 7),
            "broker/ledger_stored_tokens": float(ledger.stored.tokens),
            "broker/ledger_held_tokens": float(ledger.held_tokens),
            **{
                f"broker/ledger_{name}_tokens": float(tally.tokens) for name, tally in ledger.outcomes.items()
            },
            **metrics,
        }
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def checkpoint(self):
        """Release what is committed, as a checkpoint does."""
        self.state.record(Released(epoch=1, step=self.step), 0.0)

    def new_file(self):
        """Have the journal go on in a new file."""
        self.journal.rotate(snapshot(self.state, self.store))

    def close(self):
        """Close the journal as the broker's end does."""
        self.journal.close()
        return self.folder


def small_run(folder: Path, **settings) -> Path:
    """Make a run of three steps: trained, uniform, failed and held trajectories, evaluations, and stale tokens."""
    maker = Maker(folder, **settings)
    maker.group(purpose="eval", tag="before 0", task=0, rewards=[0.25], correct=False)
    maker.train()
    uniform = maker.group(4, rewards=[0.5] * 4)
    maker.group(4, rewards=[0.0, 0.25, 0.5, 1.0])
    maker.train(drop={uniform[0].rpartition(".")[0].rpartition(".")[0]})
    maker.group(2, rewards=[0.0, 1.0], versions=[[0, 0, 1], [1, 1, 1]])
    maker.train()
    maker.group(2, rewards=[0.75, 1.0])
    maker.train()
    # Three versions behind: a part of it is masked.
    maker.group(2, rewards=[0.0, 0.5], versions=[[0, 0, 2], [2, 2, 2]], tools=3.0)
    maker.train()
    maker.group(purpose="eval", tag="after 4", task=0, rewards=[1.0], correct=True)
    maker.train()
    maker.group(2, rewards=[0.0, 0.0], status="failed", error="KeyError: 'x'")
    maker.group(2)
    return maker.close()
