"""A run folder that cannot be made, or lies on a disk that is nearly full, is refused before anything starts."""

import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import run_folder
from launch.cli import main
from launch.errors import COME_BACK, ConfigError, FolderInUse, exit_code
from launch.run_file.load import check
from launch.run_folder import newest_begun, nothing_left, what_changed
from launch.supervise.supervisor import await_folder
from learner.run_files import BEGAN, next_epoch


def config(tmp_path, directory="runs", **journal):
    return check(
        {
            "run": {"name": "exp", "dir": str(tmp_path / directory)},
            "model": {"path": "some/model"},
            "env": {"name": "calculator"},
            "broker": {"journal": journal},
        },
        "run.toml",
    )


@pytest.fixture
def places(tmp_path):
    (tmp_path / "afile").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    return ["afile/mine", "/proc/x", *([] if os.getuid() == 0 else ["closed"])]


def test_a_folder_that_cannot_be_written_is_refused_by_check_and_at_creation(tmp_path, places):
    for directory in places:
        for attempt in (
            run_folder.check_place,
            lambda c: run_folder.create(c, resume=False),
            run_folder.join,
        ):
            ports = {"endpoint": "tcp://127.0.0.1:5755", "http": "127.0.0.1:5756"}
            settings = config(tmp_path, directory)
            settings = settings.model_copy(update={"broker": settings.broker.model_copy(update=ports)})
            with pytest.raises(ConfigError, match=r"^run\.dir: cannot write in .* \(.*\); choose a folder"):
                attempt(settings)


def test_check_on_the_command_line_refuses_it_without_a_traceback(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "some/model"\n[env]\nname = "calculator"\n[run]\ndir = "/proc/x"\n')
    assert main(["check", str(file)]) == 1
    assert capsys.readouterr().err.startswith("offbeat check: run.dir: cannot write in /proc/x (")


def test_the_check_leaves_nothing_behind(tmp_path):
    run_folder.check_place(config(tmp_path, "a/b/runs"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_nearly_full_is_refused_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 96 * 10**7, 4 * 10**7)
    )
    with pytest.raises(ConfigError, match=r"40\.0 MB free, but broker\.journal\.min_free_bytes is 67\.1 MB"):
        run_folder.check_place(config(tmp_path))
    run_folder.check_place(config(tmp_path, min_free_bytes=10**7))


def begun(tmp_path, folder, name, **learner):
    """Make a run folder in which a learner has begun, of a run of this name."""
    path = tmp_path / "runs" / folder
    path.mkdir(parents=True)
    (path / "epoch").write_text("1")
    settings = named(tmp_path, name, **learner)
    run_folder.save_config(run_folder.with_ports(settings), path / run_folder.CONFIG)
    return path


def named(tmp_path, name, seed=0, env="calculator", **learner):
    return check(
        {
            "run": {"name": name, "dir": str(tmp_path / "runs"), "seed": seed},
            "model": {"path": "some/model"},
            "env": {"name": env},
            "learner": learner,
        },
        "run.toml",
    )


def test_resume_takes_the_newest_folder_of_this_run_and_no_other_runs(tmp_path):
    begun(tmp_path, "exp", "exp")
    numbered = begun(tmp_path, "exp-2", "exp")
    other = begun(tmp_path, "exp-7", "exp-7")
    assert newest_begun(named(tmp_path, "exp")) == numbered
    assert newest_begun(named(tmp_path, "exp-7")) == other
    shutil.rmtree(tmp_path / "runs" / "exp")
    shutil.rmtree(numbered)
    with pytest.raises(
        ConfigError, match=r"no learner has begun .* \(exp-7 is of run 'exp-7'\); start without"
    ):
        newest_begun(named(tmp_path, "exp"))


def test_resume_goes_by_what_the_run_wrote_and_not_by_a_folders_time(tmp_path):
    first = begun(tmp_path, "exp", "exp")
    second = begun(tmp_path, "exp-2", "exp")
    for folder, at in ((first, "100.0"), (second, "200.0")):
        (folder / BEGAN).write_text(at)
    # A note in the older folder, and an epoch that a copy of the folder has written anew.
    (first / "notes.md").write_text("the better one?")
    os.utime(second, (1, 1))
    os.utime(second / "epoch", (1, 1))
    assert newest_begun(named(tmp_path, "exp")) == second


def test_a_learner_writes_when_it_began(tmp_path):
    before = time.time()
    next_epoch(tmp_path)
    assert before - 1 <= run_folder.began_at(tmp_path) <= time.time() + 1


def failed(tmp_path, folder="exp", name="exp"):
    """Make a run folder as a start leaves it that ends before its learner begins."""
    path = tmp_path / "runs" / folder
    for inside, text in {
        "keys/broker.secret": "k",
        "hosts/h1/lock": "",
        "logs/learner.log": "no GPU",
    }.items():
        (path / inside).parent.mkdir(parents=True, exist_ok=True)
        (path / inside).write_text(text)
    run_folder.claim(path).close()
    for file in (run_folder.CONFIG, run_folder.ASKED):
        run_folder.save_config(named(tmp_path, name), path / file)
    return path


def test_a_start_that_failed_before_its_learner_began_leaves_its_folder_to_the_next_one(tmp_path):
    """The scripts of engines wait for this folder, and tickets have its keys."""
    folder, said = failed(tmp_path), []
    for start in (1, 2):
        made = run_folder.create(named(tmp_path, "exp"), resume=False, note=said.append)
        assert made == failed(tmp_path) == folder
        aside = folder / f"failed-start-{start}"
        assert {path.name for path in aside.iterdir()} == {"logs", "config.json", "config-asked.json"}
        assert (aside / "logs" / "learner.log").read_text() == "no GPU"
        assert said[-1].endswith(f"ended before its learner had begun; its logs and files are in {aside}")
    assert (folder / "keys" / "broker.secret").read_text() == "k"
    assert (folder / "hosts" / "h1" / "lock").exists()
    # The next start was killed before it had written anything.
    for file in ("config.json", "config-asked.json", "logs/learner.log"):
        (folder / file).unlink()
    (folder / "logs").rmdir()
    assert run_folder.create(named(tmp_path, "exp"), resume=False, note=said.append) == folder
    assert len(said) == 2, "it has left nothing to speak of"


@pytest.mark.parametrize(
    "kept", ["epoch", "metrics.jsonl", "result.json", "config-broker.json", "lock", "name"]
)
def test_a_folder_of_anything_else_is_left_alone(tmp_path, kept):
    """A learner has begun in it, roles by hand may be at work, a run holds it, or it is of a different run."""
    folder = failed(tmp_path, name="exp" if kept != "name" else "other")
    if kept not in ("lock", "name"):
        (folder / kept).write_text("1")
    before = sorted(folder.rglob("*"))
    with run_folder.claim(folder) if kept == "lock" else nullcontext():
        made = run_folder.create(named(tmp_path, "exp"), resume=False)
    assert made == folder.with_name("exp-2")
    assert sorted(folder.rglob("*")) == before


def test_a_folder_that_no_start_has_made_is_left_alone(tmp_path):
    folder = tmp_path / "runs" / "exp"
    folder.mkdir(parents=True)
    (folder / "notes.md").write_text("mine")
    assert run_folder.create(named(tmp_path, "exp"), resume=False) == folder.with_name("exp-2")
    with pytest.raises(
        ConfigError, match=r"no start of run 'exp' has left.*; move it away, or choose another"
    ):
        run_folder.create(named(tmp_path, "exp"), resume=False, only=True)
    assert [path.name for path in folder.iterdir()] == ["notes.md"]


@pytest.mark.parametrize("only", [False, True])
def test_a_folder_with_nothing_of_a_run_is_taken(tmp_path, only):
    """A start was killed before it took the lock, or hosts that share the disk were there before the head."""
    folder, said = tmp_path / "runs" / "exp", []
    for inside in ("", "hosts/g-0", "keys"):
        (folder / inside).mkdir(parents=True, exist_ok=True)
        made = run_folder.create(named(tmp_path, "exp"), resume=False, only=only, note=said.append)
        assert (made, said) == (folder, [])


HOLDER = """
import socket, sys
from pathlib import Path
from launch import run_folder
if sys.argv[2]:
    socket.gethostname = lambda: sys.argv[2]
    run_folder.host_id = lambda: sys.argv[2]
lock = run_folder.claim(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held_by():
    """Let a real process hold a folder, on a machine of this name as far as it tells; "": on this one."""
    holders = []

    def hold(folder, host):
        words = [sys.executable, "-c", HOLDER, str(folder), host]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        holders.append(holder)
        assert holder.stdout.readline() == b"held\n"
        return holder

    yield hold
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_a_scripted_start_takes_no_folder_that_is_held_and_makes_no_other(tmp_path, held_by):
    folder = failed(tmp_path)
    holder = held_by(folder, "gone7")
    before = sorted(path for path in folder.rglob("*"))
    for _ in range(2):
        with pytest.raises(FolderInUse) as caught:
            run_folder.create(named(tmp_path, "exp"), resume=False, only=True)
        assert exit_code(caught.value) == COME_BACK, "the script tries again"
    said = str(caught.value)
    assert f"(process {holder.pid} on gone7, since 2" in said
    assert "NFS 4 frees the lock after its lease (90 s unless set otherwise), NFS 3 when the machine" in said
    assert said.endswith(f"if it never comes back, remove {folder}/lock")
    assert run_folder.holder(folder) == said
    assert sorted(path for path in folder.rglob("*")) == before
    assert [path.name for path in folder.parent.iterdir()] == ["exp"]
    # A person's start next to it has a folder of its own, as ever.
    assert run_folder.create(named(tmp_path, "exp"), resume=False) == folder.with_name("exp-2")

    holder.kill()
    holder.wait()
    assert run_folder.holder(folder) == ""
    assert run_folder.create(named(tmp_path, "exp"), resume=False, only=True) == folder


def test_the_cure_that_the_message_names_frees_a_lock_that_nobody_gives_back(tmp_path, held_by):
    folder = failed(tmp_path)
    held_by(folder, "gone7")
    (folder / "lock").unlink()
    assert run_folder.create(named(tmp_path, "exp"), resume=False, only=True) == folder


def test_a_process_of_this_machine_that_holds_a_folder_has_to_end_first(tmp_path, held_by):
    folder = failed(tmp_path)
    holder = held_by(folder, "")
    said = run_folder.holder(folder)
    assert f"(process {holder.pid} on {socket.gethostname()}, since 2" in said
    assert said.endswith("; it has to end first")
    assert "remove" not in said


def test_a_process_whose_folder_was_given_to_another_one_finds_out(tmp_path, held_by, monkeypatch):
    folder = failed(tmp_path)
    run_folder.refuse_other_holder(tmp_path / "not there")
    with run_folder.claim(folder):
        run_folder.refuse_other_holder(folder)
        with monkeypatch.context() as renamed:
            renamed.setattr("socket.gethostname", lambda: "another-name")
            run_folder.refuse_other_holder(folder)
        # The new holder has the lock, and has not written yet.
        (folder / "lock").write_text("")
        run_folder.refuse_other_holder(folder)
        # A file of the name `lock` is locked anew, as a server does that has dropped the lock of this machine.
        (folder / "lock").unlink()
        held_by(folder, "gone7")
        with pytest.raises(
            FolderInUse, match=r"in use by process \d+ on gone7: .* the run goes on there"
        ) as caught:
            run_folder.refuse_other_holder(folder)
    assert exit_code(caught.value) == COME_BACK


def test_a_scripted_start_waits_for_a_held_folder_for_a_bounded_time(tmp_path, held_by):
    folder, said = failed(tmp_path), []
    holder = held_by(folder, "gone7")
    interrupt = SimpleNamespace(asked=False, early=lambda: KeyboardInterrupt())
    with pytest.raises(FolderInUse, match="on gone7"):
        await_folder(folder, said.append, interrupt, patience_s=0.0)

    def free(words):
        said.append(words)
        holder.kill()
        holder.wait()

    await_folder(folder, free, interrupt, patience_s=600.0)
    assert [words.partition(":")[0] for words in said] == ["waiting 600 s at most"]
    held_by(folder, "gone7")
    interrupt.asked = True
    with pytest.raises(KeyboardInterrupt):
        await_folder(folder, said.append, interrupt, patience_s=600.0)


def test_a_file_system_without_locks_is_refused_with_its_cure(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(ConfigError, match=r"lock cannot be locked \(No locks available\); mount the file"):
        run_folder.claim(tmp_path)


def test_resume_takes_the_folder_that_is_named(tmp_path):
    first, _ = begun(tmp_path, "exp", "exp"), begun(tmp_path, "exp-2", "exp")
    settings = named(tmp_path, "exp")
    assert run_folder.create(settings, resume=first) == first
    with pytest.raises(ConfigError, match=r"--resume=.*: no learner has begun there"):
        run_folder.create(settings, resume=tmp_path)
    other = begun(tmp_path, "other", "other")
    with pytest.raises(ConfigError, match=r"a folder of run 'other', .* add run\.name=other"):
        run_folder.create(settings, resume=other)


@pytest.mark.parametrize("way", [".", "tb/..", "../latest"])
def test_a_named_folder_has_the_name_that_its_journal_knows(tmp_path, monkeypatch, way):
    """The roles call the run by the last part of the path, and a journal of another run is refused."""
    folder = begun(tmp_path, "exp-2", "exp")
    (folder / "tb").mkdir()
    (tmp_path / "runs" / "latest").symlink_to(folder)
    monkeypatch.chdir(folder)
    found = run_folder.create(named(tmp_path, "exp"), resume=Path(way))
    assert found.name == "exp-2"
    assert found.samefile(folder)


def test_a_change_of_the_experiment_is_refused_unless_it_is_accepted(tmp_path):
    folder = begun(tmp_path, "exp", "exp")
    other = named(tmp_path, "exp", seed=7, env="reasoning_gym")
    with pytest.raises(ConfigError) as caught:
        what_changed(other, folder, accepted=False)
    lines = str(caught.value).splitlines()
    assert [line.split(" is ")[0] for line in lines] == ["--resume: run.seed", "--resume: env.name"]
    assert all(line.endswith("or accept a different experiment with --changed") for line in lines)
    assert "changed since the last start: run.seed is 7, it was 0" in what_changed(
        other, folder, accepted=True
    )


@pytest.mark.parametrize(
    ("before", "now", "field"),
    [
        ({"kind": "hint"}, {"kind": "hint", "shares": [0.5]}, "learner.family.shares"),
        ({"kind": "hint"}, {"kind": "draft"}, "learner.family.kind"),
        ({"kind": "branch", "rollouts": 4}, {"kind": "branch", "rollouts": 2}, "learner.family.rollouts"),
        ({"kind": "hint"}, None, "learner.family"),
        (None, {"kind": "draft"}, "learner.family"),
    ],
)
def test_other_families_are_another_experiment(tmp_path, before, now, field):
    """Groups that were asked for would otherwise be judged by a rule that did not ask for them."""
    of = lambda family: {"family": family} if family else {}  # noqa: E731
    folder = begun(tmp_path, "exp", "exp", **of(before))
    assert what_changed(named(tmp_path, "exp", **of(before)), folder, accepted=False) == []
    with pytest.raises(ConfigError, match=rf"^--resume: {field} is .* when .* was begun") as caught:
        what_changed(named(tmp_path, "exp", **of(now)), folder, accepted=False)
    assert len([line for line in str(caught.value).splitlines() if field in line]) == 1
    assert what_changed(named(tmp_path, "exp", **of(now)), folder, accepted=True)


def test_a_setting_of_an_own_formula_that_only_one_start_had_is_a_change(tmp_path):
    """It has a default in the user's file, so its absence is a value."""
    own = lambda **keys: {"reward": {"own": {"kind": "my.py:f", **keys}}}  # noqa: E731
    folder = begun(tmp_path, "exp", "exp", **own(bonus=2.0))
    assert what_changed(named(tmp_path, "exp", **own(bonus=2.0)), folder, accepted=False) == []
    with pytest.raises(ConfigError, match=r"learner\.reward\.own\.bonus is null, it was 2\.0"):
        what_changed(named(tmp_path, "exp", **own()), folder, accepted=False)
    with pytest.raises(ConfigError, match=r"learner\.reward\.own\.top is 1, it was null"):
        what_changed(named(tmp_path, "exp", **own(bonus=2.0, top=1)), folder, accepted=False)


def test_other_changes_are_listed_and_the_former_settings_are_kept(tmp_path):
    folder = begun(tmp_path, "exp", "exp", optimizer={"lr": 3e-4})
    assert what_changed(named(tmp_path, "exp", optimizer={"lr": 3e-4}), folder, accepted=False) == []
    lines = what_changed(named(tmp_path, "exp", optimizer={"lr": 0.01}), folder, accepted=False)
    kept = folder / "config-until-step-0.json"
    assert lines == [
        "changed since the last start: learner.optimizer.lr is 0.01, it was 0.0003",
        f"the former settings are in {kept}",
    ]
    assert run_folder.load_config(kept).learner.optimizer.lr == 3e-4


def test_a_run_that_has_done_all_its_steps_says_so_when_it_is_resumed(tmp_path):
    folder = begun(tmp_path, "exp", "exp")
    config = named(tmp_path, "exp")
    assert nothing_left(config, folder) == "", "it has not ended"
    result = folder / "result.json"
    result.write_text(json.dumps({"steps": config.learner.steps - 1}))
    assert nothing_left(config, folder) == "", "it was ended early"
    result.write_text(json.dumps({"steps": config.learner.steps}))
    assert "nothing is left to train" in nothing_left(config, folder)
    result.write_text("{")
    assert nothing_left(config, folder) == ""
