"""The supervisor keeps a run of stand-in processes alive whatever dies, and ends it if nothing helps."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from launch import errors, run_folder
from launch.errors import FolderInUse, NothingTrained, RoleFailed
from launch.run_file.load import check
from launch.supervise.crew import OTHERS_STOP_S, Crew, read_state
from launch.supervise.supervisor import Interrupt, end, how_it_ended, prepare_model, supervise
from learner import checkpoint_files
from protocol.wanted import FILE, Wanted

FAKE = Path(__file__).with_name("fake_role.py")
ROOT = Path(__file__).parents[3]
DEADLINE_S = 300.0


class Silent:
    """A panel that only keeps notes, and an interrupt that never comes."""

    asked = False
    again = False
    word = "Ctrl-C"

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    def joined(self, sentences, all_joined):
        self.notes += sentences

    def stage(self, text, seconds):
        pass

    def update(self, *arguments, **named):
        pass

    def heard(self, answer):
        pass


class Job:
    """A supervised run. The supervisor runs in the main thread, because its children die with the thread."""

    def __init__(self, folder, **supervisor):
        # A busy machine may give a process no turn for seconds. Tests of silence name its limits.
        supervisor = {"silence_s": 100.0, "computing_silence_s": 200.0} | supervisor
        settings = {"model": {"path": "none"}, "env": {"name": "calculator"}, "supervisor": supervisor}
        settings["actor"] = {"count": 1}
        self.folder, self.panel, self.errors = folder, Silent(), []
        self.config = run_folder.with_ports(check(settings, "test"))
        folder.mkdir()
        run_folder.save_config(self.config, folder / run_folder.CONFIG)
        self.over, self.wait_for = False, ("learner", "generator-0", "actor-0")
        self.crew = Crew(self.config, folder, note=self.panel.note)

    def run(self, *script, **start):
        """Supervise while a second thread plays the script; the script's end lets the learner finish."""
        actor = threading.Thread(target=self._play, args=script)
        actor.start()
        try:
            supervise(
                self.crew, self.config, self.folder, self.panel, self.panel, **{"resume": False, **start}
            )
        finally:
            self.over = True
            actor.join(DEADLINE_S)
            self.crew.stop()
        assert self.errors == []

    def _play(self, *script):
        try:
            self.until(lambda: all(self.beats(name) for name in self.wait_for))
            for step in script:
                step(self)
        except AssertionError as error:
            self.errors.append(error)
        (self.folder / "enough").touch()

    def until(self, condition, deadline_s=DEADLINE_S):
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, f"not in time; notes: {self.panel.notes}"
            time.sleep(0.05)

    def beats(self, name):
        path = self.folder / "beats" / name
        return path.exists() and time.time() - path.stat().st_mtime < 1.0

    def starts(self, name):
        lines = (self.folder / "starts").read_text().splitlines()
        return [line for line in lines if line.split()[0] == name]

    def pid(self, name):
        return next(post.child.process.pid for post in self.crew.posts if post.name == name)


def sent(number, name, times=1):
    """Return a script's step: send a signal, then wait until the process has been replaced."""

    def step(job):
        for _ in range(times):
            known, pid = len(job.starts(name)), job.pid(name)
            os.kill(pid, number)
            job.until(lambda pid=pid: job.pid(name) != pid)
            job.until(lambda known=known: len(job.starts(name)) > known)
            if name != "broker":
                job.until(lambda: job.beats(name))
            time.sleep(0.5)

    return step


@pytest.fixture
def job(tmp_path, monkeypatch):
    def command(role, run_dir, *arguments, ranks=None):
        return [sys.executable, str(FAKE), role, str(run_dir), *arguments]

    monkeypatch.setattr("launch.supervise.crew.command_of_role", command)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return lambda **supervisor: Job(tmp_path / "run", **supervisor)


def test_whoever_is_killed_comes_back_and_the_learner_resumes(job):
    run = job()
    run.run(*(sent(signal.SIGKILL, name) for name in ("broker", "learner", "generator-0", "actor-0")))
    assert run.crew.restarts == {"broker": 1, "learner": 1, "generator": 1, "actor": 1}
    first, second = run.starts("learner")
    assert "--resume" not in first
    assert "--resume" in second
    minutes = [float(line.split()[-1]) for line in (first, second)]
    assert 0 < minutes[1] < minutes[0] == 60.0, "the time limit is the run's, not each learner's"
    assert "Killed (signal 9)" in run.crew.restart_reasons[0]


@pytest.mark.parametrize(("path", "started"), [("someone/model", True), (str(ROOT), False)])
def test_a_model_of_the_hub_is_downloaded_once_before_the_roles_start(tmp_path, monkeypatch, path, started):
    def command(role, run_dir):
        return [sys.executable, "-c", f"print('INFO model: {role} is there')"]

    monkeypatch.setattr("launch.supervise.supervisor.command_of_role", command)
    panel = Silent()
    config = check({"model": {"path": path}, "env": {"name": "calculator"}}, "test")
    prepare_model(config, tmp_path, panel, panel)
    assert panel.notes == (["model: model is there"] if started else [])


def test_who_shares_a_gpu_with_a_generator_starts_when_it_has_joined(job, monkeypatch):
    monkeypatch.setattr("launch.placement.torch_uses_gpus", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    run = job()
    (run.folder / "generator-0.mute").touch()
    run.wait_for = ("actor-0",)

    def join(job):
        job.until(lambda: (job.folder / "starts").exists() and job.starts("generator-0"))
        assert not job.starts("learner")
        assert "learner: shares a GPU with generator-0, and starts when they have joined" in job.panel.notes
        (job.folder / "generator-0.mute").unlink()
        job.until(lambda: job.beats("learner"))

    run.run(join)
    assert len(run.starts("learner")) == 1


@pytest.mark.parametrize("name", ["broker", "learner", "generator-0", "actor-0"])
def test_whoever_is_stopped_is_found_and_replaced(job, name):
    """How soon, unit tests of the watchdog say: the limit counts, and no other process is taken for a silent one."""
    run = job(silence_s=7.0)
    run.run(sent(signal.SIGSTOP, name))
    (why,) = [why for why in run.crew.restart_reasons if why.startswith(f"{name} hung: ")]
    assert why.startswith(f"{name} hung: ")


def test_a_generator_that_stands_still_with_work_is_replaced(job):
    run = job()

    def stall(job):
        (job.folder / "generator-0.stall").touch()
        job.until(lambda: any("starting it again" in note for note in job.panel.notes))
        (job.folder / "generator-0.stall").unlink()

    run.run(stall)
    assert any("work without progress" in why for why in run.crew.restart_reasons)


def test_an_error_that_would_come_again_ends_the_run_at_once(job):
    run = job()

    def diverge(job):
        (job.folder / "learner.end").write_text(str(errors.FINAL))
        job.until(lambda: job.over)

    with pytest.raises(RoleFailed, match="learner ended with code 65") as failure:
        run.run(diverge)
    assert len(run.starts("learner")) == 1
    assert errors.exit_code(failure.value) == errors.FINAL


def test_the_note_of_a_rank_counts_where_torchrun_hides_its_code(job):
    run = job()

    def diverge(job):
        errors.leave_note(job.folder, "learner", errors.FINAL)
        (job.folder / "learner.end").write_text("1")
        job.until(lambda: job.over)

    with pytest.raises(RoleFailed, match="learner ended with code 1"):
        run.run(diverge)
    assert len(run.starts("learner")) == 1


def test_too_little_memory_ends_the_run_at_once_with_the_setting_to_change(job):
    run = job()

    def starve(job):
        with open(job.folder / "logs" / "learner.log", "a") as log:
            log.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
        (job.folder / "learner.end").write_text("1")
        job.until(lambda: job.over)

    with pytest.raises(
        RoleFailed, match=r"too little memory \(torch.OutOfMemoryError.* learner.micro_batch_tokens"
    ):
        run.run(starve)
    assert len(run.starts("learner")) == 1


def test_a_process_that_always_fails_ends_the_run_with_its_log(job):
    run = job(max_restarts=2)

    def break_it(job):
        (job.folder / "actor-0.end").write_text("7")
        job.until(lambda: job.over)

    with pytest.raises(RoleFailed, match=r"actor-0 has been started 2 times again.*ended with code 7.*log"):
        run.run(break_it)
    assert len(run.starts("actor-0")) == 3


def test_a_run_whose_folder_was_given_to_another_machine_is_killed_and_writes_nothing_more(job):
    run = job()

    def takes_over(job):
        (job.folder / "lock").write_text("process 7 on gone7\nanother boot")
        job.until(lambda: job.over)

    with pytest.raises(FolderInUse, match=r"in use by process 7 on gone7: .* the run goes on there") as found:
        run.run(takes_over)
    assert errors.exit_code(found.value) == errors.COME_BACK
    assert not any(post.running for post in run.crew.posts)
    # As the other machine has found it: the learner was not asked for a checkpoint, and nobody is said to leave.
    state = read_state(run.folder)["processes"]
    assert not any(process["leaving"] for process in state.values())
    assert (run.folder / "lock").read_text().startswith("process 7 on gone7")


def test_a_broker_that_cannot_start_ends_the_run_at_once(job):
    run = job()
    (run.folder / "broker.end").write_text("1")
    with pytest.raises(RoleFailed, match="broker ended with code 1"):
        supervise(run.crew, run.config, run.folder, run.panel, run.panel, resume=False)
    assert len(run.starts("broker")) == 1
    assert not run.crew.running("learner")


def test_an_engine_starts_a_run_again_that_a_signal_has_ended_before_its_roles_were_there(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for number, code in ((signal.SIGTERM, errors.COME_BACK), (signal.SIGINT, None)):
        interrupt = Interrupt()
        interrupt._signal(number, None)
        early = interrupt.early()
        assert isinstance(early, KeyboardInterrupt) if code is None else errors.exit_code(early) == code


def deaf(job):
    """Let every role of the run ignore SIGTERM from now on."""
    (job.folder / "deaf").touch()


def test_an_interrupt_before_the_learner_has_joined_ends_the_run_at_once(job):
    run = job()
    (run.folder / "learner.mute").touch()

    def interrupt(job):
        job.panel.asked = True
        job.until(lambda: job.over)

    run.wait_for = ("generator-0", "actor-0")
    with pytest.raises(NothingTrained, match="Ctrl-C before the learner had joined"):
        run.run(interrupt)


def test_a_second_interrupt_kills_everything_at_once_and_names_it(job):
    run = job()

    def twice(job):
        deaf(job)
        job.panel.again = True
        began = time.monotonic()
        job.killed = end(job.crew, job.panel, job.panel.note)
        job.seconds = time.monotonic() - began
        (job.folder / "result.json").write_text("{}")

    run.run(twice)
    assert run.seconds < 0.8 * OTHERS_STOP_S, "who is waited for gets this long"
    assert set(run.killed) == set(run.crew.names)
    assert any(note.startswith("killing broker, learner") for note in run.panel.notes)


def test_an_orderly_stop_says_who_is_waited_for(job, monkeypatch):
    monkeypatch.setattr("launch.supervise.health.LEARNER_STOP_S", 4.0)
    run = job()

    def stop(job):
        (job.folder / "learner.deaf").touch()
        job.killed = end(job.crew, job.panel, job.panel.note)
        (job.folder / "result.json").write_text("{}")

    run.run(stop)
    assert run.killed == ["learner"]
    assert "waiting up to 4 s for learner to end; a second Ctrl-C kills all at once" in run.panel.notes


def test_a_learner_that_does_not_exit_after_its_result_is_killed(job, monkeypatch):
    monkeypatch.setattr("launch.supervise.health.LEARNER_EXIT_S", 1.0)
    run = job()
    run.run(lambda job: (job.folder / "result.json").write_text("{}") and job.until(lambda: job.over))
    assert any("has not ended within 1 s after its result" in note for note in run.panel.notes)
    assert len(run.starts("learner")) == 1


def test_how_a_run_ended_is_said_in_the_users_words(tmp_path):
    (tmp_path / "result.json").write_text('{"ended_by": "SIGTERM", "steps": 3}')
    assert how_it_ended(tmp_path, SimpleNamespace(word="Ctrl-C")) == "Ctrl-C"


@pytest.mark.parametrize(("word", "code"), [("Ctrl-C", errors.FAILED), ("SIGTERM", errors.COME_BACK)])
def test_an_engine_starts_a_run_again_that_a_signal_has_ended_before_its_first_step(tmp_path, word, code):
    (tmp_path / "result.json").write_text('{"ended_by": "SIGTERM", "steps": 0}')
    with pytest.raises(NothingTrained, match=f"before the first step: {word}") as ended:
        how_it_ended(tmp_path, SimpleNamespace(word=word))
    assert errors.exit_code(ended.value) == code


def test_a_weights_server_that_does_not_answer_is_named_and_replaced(job):
    run = job(silence_s=3.0, computing_silence_s=6.0)
    settings = run.config.model_copy(
        update={"weights": run.config.weights.model_copy(update={"http": "127.0.0.1:1"})}
    )
    run.config, run.crew = settings, Crew(settings, run.folder, note=run.panel.note)
    run.run(lambda job: job.until(lambda: len(job.starts("weights")) > 1))
    assert any(note.startswith("weights has not answered for") for note in run.panel.notes)
    assert any("weights hung: it has not answered for" in why for why in run.crew.restart_reasons)


def test_a_run_goes_back_to_an_earlier_checkpoint_once_even_if_its_learner_dies_at_once(job):
    run = job()
    checkpoints = run.folder / "checkpoints"

    def write(name):
        (checkpoints / name).mkdir(parents=True)
        state = {"client": {"step": int(name[4:12]), "curriculum": {"lineage": 1}}}
        (checkpoints / name / checkpoint_files.RANK_0).write_bytes(msgspec.msgpack.encode(state))

    for step in (10, 20):
        checkpoint_files.write_whole(checkpoints, step, write)
    run.run(sent(signal.SIGKILL, "learner"), resume=True, from_step=10)
    assert checkpoint_files.latest_name(checkpoints) == "step00000010"
    assert checkpoint_files.stepped_back(checkpoints)
    for start in run.starts("learner"):
        assert "--resume" in start
        assert "--from" not in start, "a learner that goes back again would undo later steps"


def test_a_run_grows_and_shrinks_while_it_goes_on(job):
    run = job()

    def write(generators, actors):
        (run.folder / FILE).write_text(Wanted(generators, actors).to_json())

    def scale(job):
        write(3, 2)
        job.until(lambda: all(map(job.beats, ("generator-2", "actor-1"))))
        write(1, 0)
        job.until(lambda: not any(map(job.beats, ("generator-1", "generator-2", "actor-0", "actor-1"))))
        job.until(lambda: job.crew.names == ["broker", "learner", "generator-0"])
        job.until(lambda: job.beats("generator-0"))
        write(2, 1)
        job.until(lambda: all(map(job.beats, ("generator-1", "actor-0"))))

    run.run(scale)
    assert run.crew.restarts["generator"] == 0, "who was to leave is not started again as if it had died"
    assert "1 generators are wanted: draining generator-1, generator-2" in run.panel.notes
    assert len(run.starts("generator-0")) == 1
