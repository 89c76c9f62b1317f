"""Count the files and functions that a segment enters from the broker's socket to its gradient, and a setting's files.

    python -m benchmarks.way [--functions] [--json FILE]

The setting is small and fixed, so that figures compare over time: four segments of 12 tokens, one group, one
micro-batch, a model of a quarter of a million parameters, one process. Two ways are counted by a profiler on a real
learner step, up to the call of `optimizer.step` and up to the end of `TrainingEngine.update`, which reports on it:

- "with sockets": an actor's link sends the segments to the broker's ROUTER socket; broker, journal and actor share one
  event loop, the learner's link and step have threads as in a run. What goes on beside the segments is left out
  (`BESIDE`): ticks, heartbeats, watches of keys and files, syncs, and the refilling of the task queue.
- "without sockets": the `Dispatcher` with its journal gets the frames, `Intake.receive` the deliveries.

Only the six product folders count, and only functions with a name of their own.

A third count is of files that know `learner.algorithm.surrogate.low` on its way from the run file to the formula: those
that declare the field or a section around it, those with a function that gets the run file's settings while they are
loaded, those that read the section or the field in an update, and the file of the formula that gets the number.
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from torch.optim.optimizer import register_optimizer_step_pre_hook

from broker.config import BrokerConfig
from broker.core.dispatch import Dispatcher
from broker.journal.journal import Journal
from broker.output_commit import JournalStore, OutputCommit
from broker.service import Service
from launch.model import make_tokenizer, save_tokenizer
from launch.run_file.load import load
from launch.run_file.sections import RunConfig
from learner.curriculum import Curriculum
from learner.intake.intake import Intake
from learner.intake.session import BrokerSession
from learner.metrics import Report
from learner.process import join
from learner.retrain import Unpublished
from learner.settings.algorithm import AlgorithmConfig
from learner.settings.learner import LearnerConfig
from learner.settings.surrogates import ClipSurrogate
from learner.trainer import Trainer
from learner.trajectory import Trajectory
from learner.update.engine import TrainingEngine
from learner.update.report import UpdateReport
from learner.warmstart import make_tiny_model
from protocol.codec import AnyMessage, Frames, decode, encode, encode_arrays, encode_delivery
from protocol.messages.episodes import (
    Deliver,
    DeliveryCredit,
    LeaseTask,
    PutTasks,
    Reward,
    Segment,
    TaskCredit,
    Turn,
)
from protocol.messages.peers import Hello, PublishWeights
from protocol.session import Progress
from protocol.sockets import AsyncLink

ROOT = Path(__file__).parents[1]
ROLES = ("protocol", "broker", "actors", "learner", "launch", "envs")
SETTINGS = {"group_size": 4, "batch_trajectories": 4, "micro_batch_tokens": 200, "max_policy_lag": 4}
TOKENS, ACTIONS = 12, 6
PATIENCE_S = 60.0
BESIDE = frozenset(
    {
        "OutputCommit.tick",
        "OutputCommit._look_after_files",
        "Writer._work",
        "Service._look_at_keys",
        "Session.due",
        "HandshakeWatch.look",
        "HandshakeWatch.reconnected",
        "BrokerSession.refill",
        "Intake.close_overdue",
        "Intake.drop_stale",
        "SignalWatch.look",
    }
)
"""Functions that run beside the way of a segment; they and what they call are not counted."""
LOW = 0.21875
"""Value of the setting whose way is counted; nothing else has it."""


class Way:
    """The files and functions that were entered between `begin` and `end`, in all threads, in their order.

    Threads count if they were started inside of `watching`.
    """

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}
        self.before_step = 0
        """Number of functions that were entered before the optimizer's first step."""
        self._counting = False
        self._prefix = f"{ROOT}/"

    @property
    def files(self) -> list[str]:
        """Files that were entered, relative to the project."""
        return sorted({path for path, _ in self.functions})

    @property
    def files_before_step(self) -> list[str]:
        """Files that were entered before the optimizer's first step."""
        return sorted({path for path, _ in islice(self.functions, self.before_step)})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Install the profiler in this thread and in those that it starts."""
        threading.setprofile(self._entered)
        sys.setprofile(self._entered)
        steps = register_optimizer_step_pre_hook(lambda *_: self._step())
        try:
            yield
        finally:
            steps.remove()
            self._counting = False
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self) -> None:
        self._counting = True

    def end(self) -> None:
        self._counting = False

    def _step(self) -> None:
        self.before_step = self.before_step or len(self.functions)

    def _entered(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not self._counting or event != "call" or not code.co_filename.startswith(self._prefix):
            return
        path = code.co_filename.removeprefix(self._prefix)
        if path.partition("/")[0] not in ROLES or code.co_name.startswith("<"):
            return
        key = path, code.co_qualname
        if key not in self.functions and not _is_beside(frame):
            self.functions[key] = None


def by_role(files: list[str]) -> str:
    """Return the number of files in each folder of the project, in words."""
    counts = Counter(path.partition("/")[0] for path in files)
    return ", ".join(f"{role} {count}" for role, count in sorted(counts.items()))


def _is_beside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_qualname in BESIDE:
            return True
        frame = frame.f_back
    return False


class CountedEngine(TrainingEngine):
    """A training engine behind whose update the way ends."""

    way: Way

    def update(self, trajectories: Sequence[Trajectory], *, current_version: int) -> UpdateReport:
        try:
            return super().update(trajectories, current_version=current_version)
        finally:
            self.way.end()


def write_model(folder: Path) -> str:
    """Write a random model of a quarter of a million parameters. Return its folder."""
    save_tokenizer(make_tokenizer(list("abcdefghijklmnopqrstuvwxyz")), folder, max_length=64)
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    make_tiny_model(folder, files, layers=2, intermediate_size=192)
    return str(folder)


def segment_of(lease: LeaseTask, reward: float) -> Frames:
    """Return the only segment of a leased task: six tokens of prompt and six that version 0 sampled."""
    task, prompt = lease.task, TOKENS - ACTIONS
    header = Segment(
        trajectory_id=f"{task.task_id}.{lease.attempt}",
        task_id=task.task_id,
        group_id=task.group_id,
        group_size=task.group_size,
        index=0,
        offset=0,
        tokens=TOKENS,
        action_tokens=ACTIONS,
        status="finished",
        purpose=task.purpose,
        version_min=0,
        version_max=0,
        turns=[Turn(0, 0, prompt, False), Turn(1, prompt, TOKENS, True)],
        rewards=[Reward("score", 1, reward)],
    )
    arrays = {
        "token_ids": np.arange(TOKENS, dtype="<i4") + 3,
        "action_mask": np.array([0] * prompt + [1] * ACTIONS, "u1"),
        "logp_behaviour": np.full(TOKENS, -3.0, "<f4"),
        "policy_version": np.zeros(TOKENS, "<i4"),
    }
    return encode_arrays(header, arrays)


def without_sockets(folder: Path, config: LearnerConfig | None = None, *, watch: bool = True) -> Way:
    """Count the way from `Dispatcher.handle` to the end of the update; unless ``watch``, only go it."""
    way, config = Way(), config or LearnerConfig.model_validate(SETTINGS)
    engine = CountedEngine(config, model=write_model(folder / "model"), total_steps=10, seed=5)
    engine.way = way
    curriculum = Curriculum("e", config)
    intake = Intake(curriculum, filter_uniform=False)
    broker = BrokerConfig(endpoint="tcp://127.0.0.1:5555", http="127.0.0.1:5556")
    journal = Journal.open(folder / "journal", run="way", config=broker.journal)
    store = JournalStore(journal, broker.journal.max_bytes)
    dispatcher = Dispatcher(broker, run="way", max_policy_lag=4, now=0.0, boot="1", store=store)

    def handle(peer: str, frames: Frames) -> list[Any]:
        return dispatcher.handle(peer, decode(frames)[0], list(frames[1:]), 0.0)

    handle("learner", encode(Hello(role="learner", peer="learner", incarnation=1, epoch=1)))
    handle("learner", encode(DeliveryCredit(units=100)))
    handle("actor", encode(Hello(role="actor", peer="actor", incarnation=1)))
    handle("actor", encode(TaskCredit(tasks=100)))
    handle("learner", encode(PublishWeights(epoch=1, version=0, manifest="v0")))
    said = handle("learner", encode(PutTasks(tasks=curriculum.refill(version=0, lockstep=False))))
    leases = [action.message for action in said if isinstance(action.message, LeaseTask)][:4]
    frames = [segment_of(lease, float(i % 2)) for i, lease in enumerate(leases)]
    with way.watching() if watch else nullcontext():
        way.begin()
        sent = [action for each in frames for action in handle("actor", each)]
        for action in sent:
            if isinstance(action.message, Deliver):
                message, rest = decode(encode_delivery(action.message, action.frames))
                intake.receive(message, [bytes(each) for each in rest])
        units = intake.take_batch(8)
        report = engine.update([t for unit in units for t in unit.trajectories], current_version=0)
    journal.close()
    engine.close()
    assert report.applied
    return way


def with_sockets(folder: Path) -> Way:
    """Count the way from the broker's ROUTER socket to the end of the update."""
    way, config = Way(), LearnerConfig.model_validate(SETTINGS)
    engine = CountedEngine(config, model=write_model(folder / "model"), total_steps=10, seed=5)
    engine.way = way
    with way.watching():
        asyncio.run(_play(folder, way, config, engine))
    engine.close()
    return way


async def _play(folder: Path, way: Way, config: LearnerConfig, engine: CountedEngine) -> None:
    """Run a broker and an actor on this loop and one learner step in a thread."""
    endpoint = f"tcp://127.0.0.1:{_free_port()}"
    # Heartbeats go on beside the segments.
    broker = BrokerConfig(endpoint=endpoint, http="127.0.0.1:0", heartbeat_s=60.0)
    output_commit = OutputCommit.open(broker, "way", 4, folder / "journal")
    serving = asyncio.create_task(Service(broker, output_commit, None, None).run("127.0.0.1", 0))
    leases: asyncio.Queue[LeaseTask] = asyncio.Queue()

    def received(message: AnyMessage, _: list[bytes]) -> None:
        if isinstance(message, LeaseTask):
            leases.put_nowait(message)

    actor = AsyncLink(endpoint, Hello(role="actor", peer="actor", incarnation=1), received)
    await actor.joined(PATIENCE_S)
    actor.send(TaskCredit(tasks=100))
    link = await asyncio.to_thread(join, config, endpoint, "way", epoch=1, progress=Progress)
    session = BrokerSession(link, Curriculum("e", config), config, lockstep=False, stop_reason=lambda: "")
    report = Report(folder)
    trainer = Trainer(config, folder, engine, session, Unpublished(), report, seed=5)
    try:
        session.announce(PublishWeights(epoch=1, version=0, manifest="v0"))
        session.refill(step=0, version=0)
        first = [await asyncio.wait_for(leases.get(), PATIENCE_S) for _ in range(4)]
        # Its answer to the list of what the broker holds is the credit for deliveries.
        await asyncio.to_thread(session.receive_messages, 1.0)
        way.begin()
        for i, lease in enumerate(first):
            actor.send_frames(segment_of(lease, float(i % 2)))
        await asyncio.to_thread(trainer.learn)
        assert trainer.version == 1, "the step was not applied"
    finally:
        await asyncio.to_thread(session.close)
        await actor.close()
        report.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class SettingWay:
    """Files that know a setting on its way; see the description of this program."""

    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        """Why each file counts."""

    def note(self, path: str, why: str) -> None:
        path = path.removeprefix(f"{ROOT}/")
        if path.partition("/")[0] in ROLES:
            self.files.setdefault(path, why)

    @contextmanager
    def calls(self, why: str, knows: Any) -> Iterator[None]:
        """Note files whose functions are called with an argument for which ``knows`` returns True."""

        def entered(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event != "call" or not code.co_filename.startswith(f"{ROOT}/"):
                return
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(knows(frame.f_locals.get(name)) for name in arguments):
                self.note(code.co_filename, why)

        sys.setprofile(entered)
        try:
            yield
        finally:
            sys.setprofile(None)

    @contextmanager
    def reads(self, section: type, field: str) -> Iterator[None]:
        """Note files that read a field of a section."""
        plain: Any = section.__getattribute__

        def read(self_: Any, name: str) -> Any:
            if name == field:
                self.note(sys._getframe(1).f_code.co_filename, f"reads {section.__name__}.{field}")
            return plain(self_, name)

        section.__getattribute__ = read  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del section.__getattribute__


def setting(folder: Path) -> SettingWay:
    """Count the files that know `learner.algorithm.surrogate.low` from the run file to the formula."""
    found = SettingWay()
    for section in (RunConfig, LearnerConfig, AlgorithmConfig, ClipSurrogate):
        found.note(str(sys.modules[section.__module__].__file__), f"declares {section.__name__}")
    run_file = folder / "job.toml"
    lines = [f"{name} = {value}" for name, value in SETTINGS.items()]
    surrogate = f'[learner.algorithm.surrogate]\nkind = "clip"\nlow = {LOW}\n'
    run_file.write_text("\n".join(["[learner]", *lines, surrogate]), encoding="utf-8")
    with found.calls("gets the run file's settings", _holds_setting):
        config = load(run_file, ["env.name=spell_backward", "model.path=model"])
    with (
        found.reads(AlgorithmConfig, "surrogate"),
        found.reads(ClipSurrogate, "low"),
        found.calls("gets the number", lambda value: isinstance(value, float) and value == LOW),
    ):
        without_sockets(folder, config.learner, watch=False)
    return found


def _holds_setting(value: Any) -> bool:
    """Return whether a value is the number, or settings as they are read, which have it at its place."""
    for name in ("learner", "algorithm", "surrogate", "low"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return isinstance(value, float) and value == LOW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--functions", action="store_true", help="print the functions of each file")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    ways = {}
    for name, count in (("with sockets", with_sockets), ("without sockets", without_sockets)):
        with tempfile.TemporaryDirectory() as folder:
            ways[name] = way = count(Path(folder))
        for end, files, functions in (
            ("to optimizer.step", way.files_before_step, way.before_step),
            ("to the end of the update", way.files, len(way.functions)),
        ):
            print(f"{name}, {end}: {len(files)} files ({by_role(files)}), {functions} functions")
        for path in way.files:
            of_file = [function for found, function in way.functions if found == path]
            print(f"  {path} {len(of_file)}")
            if args.functions:
                print(*(f"    {function}" for function in of_file), sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        found = setting(Path(folder))
    print(f"learner.algorithm.surrogate.low: {len(found.files)} files")
    for path, why in found.files.items():
        print(f"  {path}: {why}")
    if args.json:
        figures = {
            name: {"files": way.files_before_step, "functions": way.before_step} for name, way in ways.items()
        }
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
