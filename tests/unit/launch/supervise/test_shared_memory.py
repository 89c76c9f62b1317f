"""Shared memory that killed runs have left is removed; shared memory of living runs stays."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.errors import ConfigError
from launch.supervise import shared_memory
from protocol.files import YOUNG_S


@pytest.fixture
def shm(tmp_path, monkeypatch):
    root = tmp_path / "shm"
    root.mkdir()
    for module in ("launch.supervise.shared_memory", "learner.run_files"):
        monkeypatch.setattr(f"{module}.SHARED_MEMORY", root)
    return root


def weights(run_dir):
    folder = shared_memory.weights_folder(run_dir)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"w")
    return folder


def test_a_held_folder_stays_and_goes_when_its_owner_does(shm, tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    with shared_memory.hold_folder(mine):
        kept, left = weights(mine), weights(theirs)
        # The owner's lock went with its process.
        left.with_name(left.name + ".owner").write_text(str(theirs))
        assert shared_memory.sweep(shm) == [left]
        assert kept.is_dir()
        assert not left.exists()
        assert not left.with_name(left.name + ".owner").exists()
    assert not kept.with_name(kept.name + ".owner").exists()


def test_a_folder_nobody_signed_goes_after_a_day(shm, tmp_path):
    folder = weights(tmp_path / "by-hand")
    now = time.time()
    assert shared_memory.sweep(shm, now=now) == []
    assert shared_memory.sweep(shm, now=now + shared_memory.UNOWNED_S + 60) == [folder]


def test_staged_files_go_with_their_generator(shm):
    """Its process may be one that cannot be seen from here, in a container that shares the memory."""
    script = (
        "import sys, time, pathlib\n"
        "from protocol.files import HeldFolder\n"
        "print(HeldFolder(pathlib.Path(sys.argv[1]), 'offbeat-stage-run-generator-0-').path, flush=True)\n"
        "sys.stdin.read()\n"
    )
    run = [sys.executable, "-c", script, str(shm)]
    process = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    staged = Path(process.stdout.readline().strip())
    later = time.time() + 2 * YOUNG_S
    assert shared_memory.sweep(shm, now=later) == []
    process.kill()
    process.communicate(timeout=60)
    assert shared_memory.sweep(shm, now=time.time()) == [], (
        "a folder may be so young that it is not locked yet"
    )
    assert shared_memory.sweep(shm, now=later) == [staged]


def test_a_run_that_starts_while_another_sweeps_keeps_its_folder(shm, tmp_path, monkeypatch):
    """Its owner's file is older than its lock, and the sweep may come in between."""
    run_dir = tmp_path / "run"
    folder = weights(run_dir)
    opened = shared_memory.open_private_file
    swept = []

    def open_and_be_swept(path):
        descriptor = opened(path)
        if not swept:
            swept.append(shared_memory.sweep(shm))
        return descriptor

    monkeypatch.setattr(shared_memory, "open_private_file", open_and_be_swept)
    with shared_memory.hold_folder(run_dir):
        assert swept == [[folder]], "what was left of an earlier run goes"
        kept = weights(run_dir)
        assert kept.with_name(kept.name + ".owner").exists()
        assert shared_memory.sweep(shm, now=time.time() + 1e9) == []
        assert kept.is_dir()


def test_what_is_not_ours_stays(shm):
    (shm / "psm_1234").mkdir()
    # This folder has its own lock.
    (shm / "offbeat-cache-spell-0").mkdir()
    (shm / "offbeat-file").write_text("x")
    assert shared_memory.sweep(shm, now=time.time() + 1e9) == []
    assert len(list(shm.iterdir())) == 3


def test_a_killed_owner_holds_nothing(shm, tmp_path):
    script = (
        "import os, signal, sys, pathlib\n"
        "import learner.run_files as files, launch.supervise.shared_memory as memory\n"
        "files.SHARED_MEMORY = memory.SHARED_MEMORY = pathlib.Path(sys.argv[1])\n"
        "with memory.hold_folder(pathlib.Path(sys.argv[2])):\n"
        "    memory.weights_folder(pathlib.Path(sys.argv[2])).mkdir()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(shm), str(tmp_path / "run")], timeout=60)
    folder = shared_memory.weights_folder(tmp_path / "run")
    assert folder.is_dir()
    assert shared_memory.sweep(shm) == [folder]
    assert list(shm.iterdir()) == []


def test_a_link_that_another_user_has_planted_is_not_followed(shm, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    path = shared_memory.weights_folder(tmp_path / "run")
    path.with_name(path.name + ".owner").symlink_to(precious)
    with pytest.raises(ConfigError, match="is a link of user"), shared_memory.hold_folder(tmp_path / "run"):
        pass
    assert precious.read_text() == "keep"


def test_what_other_users_plant_stops_no_sweep(shm, tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.mkdir()
    (shm / "offbeat-linked-0").symlink_to(target)
    (shm / "offbeat-linked-0.owner").symlink_to(target / "owner")
    os.mkfifo(shm / "offbeat-pipe-0.owner")
    (shm / "offbeat-theirs-0").mkdir()
    (shm / "offbeat-theirs-0.owner").write_text("theirs")
    monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    unlink = Path.unlink

    def refused(path, **options):
        if path.name.endswith(".owner"):
            raise PermissionError(1, "Operation not permitted")
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", refused)
    assert shared_memory.sweep(shm, now=time.time() + 1e9) == []
    assert (shm / "offbeat-theirs-0").is_dir()
    assert list(target.iterdir()) == []
