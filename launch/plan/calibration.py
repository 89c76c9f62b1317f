"""`offbeat plan RUN_FILE --calibrate SECONDS`: runs the real system for a while and measures its rates."""

import contextlib
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launch import run_folder
from launch.commands.journal import export
from launch.errors import LaunchError, NoAnswer, TooSlow
from launch.plan.observations import Observations, Probe, probe, read, turn_lengths
from launch.plan.rates import MeasuredRates
from launch.plan.simulation import WARM_UP_STEPS, setting_of
from launch.processes import stop
from launch.run_file.sections import RunConfig
from launch.run_folder import http_keys, prepare_keys
from launch.supervise import shared_memory
from launch.supervise.broker_status import Poller, fetch
from launch.supervise.crew import Crew
from launch.supervise.health import BROKER
from launch.supervise.panel import Panel
from launch.supervise.posts import LEARNER
from launch.supervise.summary import read_metrics
from launch.supervise.supervisor import Interrupt, await_broker, prepare_model
from protocol.messages.peers import GeneratorInfo

LOOK_S = 0.5
LEAST_STEPS = 8
PATIENCE = 5
"""Longest wait for `LEAST_STEPS`, as a multiple of the seconds asked for."""
LEARNER_END_S = 60.0
PROBE_SHARE = 1 / 15
"""Share of the seconds asked for that the probe spends on each number of requests."""
MANY_STEPS = 1_000_000
MOST_PROMPTS = 512


def calibrate(config: RunConfig, seconds: float, panel: Panel) -> MeasuredRates:
    """Measure the rates of the system that a run file describes, on this machine.

    Raises:
        RoleFailed: a process ended with an error.
        TooSlow: fewer than `LEAST_STEPS` learner steps were done in `PATIENCE` times the seconds, the warm-up
            took too long, or no trajectory ended.
    """
    config = for_measuring(config)
    setting, interrupt = setting_of(config), Interrupt()
    folder = run_folder.create(config, resume=False, note=panel.note)
    with contextlib.ExitStack() as held:
        held.enter_context(run_folder.claim(folder))
        held.enter_context(shared_memory.hold_folder(folder))
        config = run_folder.with_ports(config)
        run_folder.save_config(config, folder / run_folder.CONFIG)
        panel.note(f"run folder {folder}")
        prepare_model(config, folder, panel, interrupt)
        crew = Crew(config, folder, note=panel.note)
        try:
            return _Calibration(config, folder, crew, panel, interrupt).measure(seconds, setting.sync)
        finally:
            crew.stop()


def for_measuring(config: RunConfig) -> RunConfig:
    """Return the run without evaluations, and with limits so high that only the calibration ends it."""
    learner = config.learner.model_copy(
        update={"steps": MANY_STEPS, "evaluation_tasks": 0, "evaluation_every": 0, "evaluation": {}}
    )
    run = config.run.model_copy(update={"name": f"{config.run.name}-calibration", "max_minutes": 24 * 60.0})
    return config.model_copy(update={"learner": learner, "run": run})


class _Calibration:
    """One calibration, from the first process to the rates."""

    def __init__(
        self, config: RunConfig, folder: Path, crew: Crew, panel: Panel, interrupt: Interrupt
    ) -> None:
        self._config, self._folder, self._crew = config, folder, crew
        self._panel, self._interrupt = panel, interrupt
        self._keys = prepare_keys(config, folder)
        self._http_keys = http_keys(config, self._keys)
        self._starts: dict[str, float] = {}

    def measure(self, seconds: float, sync: bool) -> MeasuredRates:
        self._start()
        warm_up = WARM_UP_STEPS + self._config.max_policy_lag
        self._until(warm_up, deadline_s=self._config.learner.start_timeout_s)
        self._panel.note(f"measuring for {seconds:g} s")
        seen = self._watch(seconds)
        self._panel.note(f"{len(seen.lines)} steps in {seen.seconds:.1f} s; asking the generator alone")
        info = self._generator()
        self._end_training()
        seen.episodes = self._episodes(seen.stored_before, seen.stored_before + seen.sampled)
        seen.starts = self._starts
        found = self._probe(info, seen, max(1.0, seconds * PROBE_SHARE))
        return read(
            seen,
            found,
            setting_of(self._config),
            run=f"{self._config.run.name.removesuffix('-calibration')}, {datetime.now(UTC):%Y-%m-%d}",
            machine=f"{platform.machine()}, {seen.cores} cores",
        )

    def _start(self) -> None:
        self._crew.start([BROKER], resume=False)
        poller = Poller(self._config.broker.http, self._http_keys)
        try:
            await_broker(self._crew, poller, self._interrupt)
        finally:
            poller.close()
        self._crew.start([name for name in self._crew.names if name != BROKER], resume=False)
        self._panel.note(f"started {', '.join(self._crew.names)}")

    def _look(self) -> dict[str, Any]:
        """Return the broker's status. A process that has ended is an error here and is not started again."""
        if self._interrupt.asked:
            raise KeyboardInterrupt
        for post in self._crew.posts:
            if post.child is not None and not post.running:
                raise self._crew.failed(post.name)
        try:
            status = fetch(self._config.broker.http, keys=self._http_keys)
        except NoAnswer as error:
            raise LaunchError(f"calibration: the broker does not answer: {error}") from None
        self._crew.start_next([peer["name"] for peer in status["peers"]])
        return status

    def _until(self, steps: int, deadline_s: float) -> None:
        """Wait until this many learner steps are done. Record on the way when each role joined."""
        began = time.monotonic()
        while len(self._lines()) < steps:
            for peer in self._look()["peers"]:
                self._starts.setdefault(peer["role"], time.monotonic() - began)
            if time.monotonic() - began > deadline_s:
                raise TooSlow(
                    f"calibration: {len(self._lines())} of {steps} steps of the warm-up in {deadline_s:g} s; look at "
                    f"{self._folder / 'logs'}, or make learner.batch_trajectories smaller"
                )
            time.sleep(LOOK_S / 5)

    def _watch(self, seconds: float) -> Observations:
        """Observe the run from the end of one step to the end of a later one, at least ``seconds`` apart."""
        first, began = self._next_step(), time.monotonic()
        status = self._look()
        stored = _stored(status)
        cores = len(os.sched_getaffinity(0))
        seen = Observations(0.0, [], before=first[-1], sampled=0.0, stored_before=stored, cores=cores)
        while True:
            seen.generators.append(_gauges(status, "generator"))
            seen.actors.append(_gauges(status, "actor"))
            time.sleep(LOOK_S)
            passed, steps = time.monotonic() - began, len(self._lines()) - len(first)
            if passed >= seconds and steps >= LEAST_STEPS:
                break
            if passed > PATIENCE * seconds:
                raise TooSlow(
                    f"calibration: {steps} learner steps in {passed:.0f} s, needed are {LEAST_STEPS}; give --calibrate "
                    f"more seconds than {seconds:g}"
                )
            status = self._look()
        last = self._next_step()
        seen.seconds = time.monotonic() - began
        status = self._look()
        seen.generators.append(_gauges(status, "generator"))
        seen.sampled = _stored(status) - stored
        seen.lines = last[len(first) :]
        return seen

    def _next_step(self) -> list[dict[str, Any]]:
        """Wait for the end of the next step. Return all lines so far."""
        before = len(self._lines())
        while len(lines := self._lines()) == before:
            self._look()
            time.sleep(LOOK_S / 50)
        return lines

    def _lines(self) -> list[dict[str, Any]]:
        try:
            lines = read_metrics(self._folder)
        except json.JSONDecodeError:
            # The learner is still writing the last line, so read again.
            return self._lines()
        return [line for line in lines if "learner/step_seconds" in line and "learner/policy_version" in line]

    def _generator(self) -> GeneratorInfo:
        peer = next(peer for peer in self._look()["peers"] if peer["role"] == "generator")
        return GeneratorInfo(
            peer=peer["name"], endpoint=peer["endpoint"], policy_version=peer["policy_version"] or 0
        )

    def _end_training(self) -> None:
        """End the learner, then the actors. The broker and the generators keep running."""
        self._crew.ask_learner_to_end()
        deadline = time.monotonic() + LEARNER_END_S
        while self._crew.running(LEARNER) and time.monotonic() < deadline:
            time.sleep(LOOK_S / 5)
        leaving = [p.child for p in self._crew.posts if p.name.startswith("actor-") and p.child is not None]
        stop(leaving, patience_s=self._config.actor.drain_timeout_s + 10.0)

    def _episodes(self, first: float, last: float) -> list[dict[str, Any]]:
        """Return the training episodes that the journal holds for the time that was measured.

        Lengths change as the policy learns, so episodes from before and after would not fit the other
        measurements.

        Args:
            first: action tokens that the broker had stored when the measurement began.
            last: action tokens that it had stored when the measurement ended.
        """
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "episodes.jsonl"
            export(self._folder / run_folder.JOURNAL, out, "jsonl")
            episodes = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        ends = itertools.accumulate(sum(turn_lengths(e)) for e in episodes)
        within = [e for e, end in zip(episodes, ends, strict=True) if first <= end <= last]
        usable = [e for e in within if e["complete"] and e["purpose"] == "train" and e["status"] != "failed"]
        if not (found := [e for e in usable if turn_lengths(e)]):
            raise TooSlow(
                "calibration: no trajectory ended while it was measured; give --calibrate more seconds"
            )
        return found

    def _probe(self, info: GeneratorInfo, seen: Observations, seconds: float) -> Probe:
        config = self._config
        prompts = []
        for episode in seen.episodes[-MOST_PROMPTS:]:
            start = next(turn["start"] for turn in episode["turns"] if turn["action"])
            prompts.append(episode["token_ids"][:start])
        return probe(
            info,
            "actor-0",
            self._keys,
            prompts,
            most=min(config.generator.max_num_seqs, config.actor.count * config.actor.concurrent_episodes),
            room=min(config.generator.max_model_len, config.learner.sampling.max_trajectory_tokens),
            seconds=seconds,
        )


def _gauges(status: Mapping[str, Any], role: str) -> list[Mapping[str, float]]:
    return [peer["gauges"] for peer in status["peers"] if peer["role"] == role and peer["gauges"]]


def _stored(status: Mapping[str, Any]) -> float:
    return float(status["ledger"]["stored"]["action_tokens"])
