"""Test which epoch, lineage and step a learner process begins with."""

import errno
import os
from pathlib import Path

import pytest

from learner import checkpoint_files
from learner.errors import CheckpointError
from learner.run_files import Start, find_start, next_epoch
from learner.update import checkpoint
from learner.update.adaptive import AdaptiveState


def put_state(folder, name, *, step, lineage):
    state = checkpoint.capture(
        ranks=2,
        dtype="bfloat16",
        updates=0,
        optimizer_steps=0,
        adaptive=AdaptiveState(dual=0.0, entropy_coefficient=0.0),
        client={"step": step, "curriculum": {"lineage": lineage}},
    )
    checkpoint.write_state(folder, name, 0, state)


def put_checkpoint(run_dir, *, step, lineage):
    folder = run_dir / "checkpoints"
    checkpoint_files.write_whole(
        folder, step, lambda name: put_state(folder, name, step=step, lineage=lineage)
    )


def begin(run_dir, *, resume=True, lockstep=False):
    return find_start(run_dir, resume=resume, lockstep=lockstep)


def test_a_first_learner_begins_a_lineage(tmp_path):
    it = begin(tmp_path, resume=False)
    assert it == Start(epoch=1, lineage=1)
    assert not it.continues


def test_a_learner_that_resumes_continues_its_checkpoint_s_lineage(tmp_path):
    begin(tmp_path, resume=False)
    put_checkpoint(tmp_path, step=12, lineage=1)
    for epoch in (2, 3):
        it = begin(tmp_path)
        assert it == Start(epoch=epoch, lineage=1, step=12, restores=True, again=True)
        assert it.continues


def test_without_a_checkpoint_it_begins_again_in_the_same_lineage_and_says_so(tmp_path, caplog):
    begin(tmp_path, resume=False)
    assert begin(tmp_path) == Start(epoch=2, lineage=1, step=0, again=True)
    assert "no checkpoint" in caplog.text
    assert "beginning again at step 0, lineage 1" in caplog.text
    put_checkpoint(tmp_path, step=4, lineage=1)
    assert begin(tmp_path).lineage == 1


def test_in_lockstep_each_process_begins_a_lineage(tmp_path):
    begin(tmp_path, resume=False, lockstep=True)
    assert begin(tmp_path, lockstep=True).lineage == 2
    put_checkpoint(tmp_path, step=4, lineage=2)
    it = begin(tmp_path, lockstep=True)
    assert (it.lineage, it.step, it.restores, it.continues) == (3, 4, True, False)


def test_a_learner_that_does_not_resume_begins_a_lineage_and_so_does_one_with_an_earlier_checkpoint(tmp_path):
    begin(tmp_path, resume=False)
    put_checkpoint(tmp_path, step=4, lineage=1)
    assert begin(tmp_path, resume=False) == Start(epoch=2, lineage=2)
    it = begin(tmp_path)
    assert (it.lineage, it.step) == (3, 4), "the broker has let go of lineage 1"


def test_a_moved_run_folder_keeps_its_lineage(tmp_path):
    put_checkpoint(tmp_path, step=4, lineage=7)
    (tmp_path / "epoch").write_text("9")
    assert begin(tmp_path).lineage == 7


def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_none(tmp_path):
    put_checkpoint(tmp_path, step=4, lineage=1)
    (tmp_path / "checkpoints" / "step00000004" / "offbeat-rank0.msgpack").write_bytes(b"\x81")
    with pytest.raises(CheckpointError, match=r"offbeat-rank0.*no other checkpoint; start anew"):
        begin(tmp_path)


def test_a_checkpoint_of_a_program_that_knew_no_lineages_is_refused(tmp_path):
    put_checkpoint(tmp_path, step=4, lineage=1)
    folder = tmp_path / "checkpoints"
    state = checkpoint.read_state(folder, "step00000004", 0, dtype="bfloat16")
    state.client["curriculum"].clear()
    checkpoint.write_state(folder, "step00000004", 0, state)
    (folder / "step00000004" / "checksums.json").unlink()
    with pytest.raises(CheckpointError, match="says nothing of 'lineage'"):
        begin(tmp_path)


def test_an_epoch_is_on_the_disk_before_it_is_used(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    assert (next_epoch(tmp_path), next_epoch(tmp_path)) == (1, 2)
    assert synced == [str(tmp_path / "epoch.partial"), str(tmp_path)] * 2


def test_a_checkpoint_that_found_no_room_leaves_none_taken_and_the_one_before_in_force(tmp_path):
    put_checkpoint(tmp_path, step=10, lineage=1)
    folder = tmp_path / "checkpoints"

    def write(name):
        (folder / name).mkdir()
        (folder / name / "half").write_bytes(b"x" * 1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoint_files.write_whole(folder, 20, write)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step00000010"]
    assert begin(tmp_path).step == 10


def test_a_damaged_checkpoint_is_refused_with_the_file_and_the_step_to_go_back_to(tmp_path):
    begin(tmp_path, resume=False)
    put_checkpoint(tmp_path, step=10, lineage=1)
    put_checkpoint(tmp_path, step=20, lineage=1)
    folder = tmp_path / "checkpoints"
    shard = folder / "step00000020" / "offbeat-rank0.msgpack"
    whole = shard.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    cure = r"go back to the checkpoint of step 10 with `offbeat train RUN_FILE --resume --from 10`$"
    for damage, said in ((bytes(flipped), "BLAKE3 hash"), (whole + b"x", "bytes, .* were written")):
        shard.write_bytes(damage)
        with pytest.raises(CheckpointError, match=rf"offbeat-rank0.*: damaged \(.*{said}.*{cure}"):
            begin(tmp_path)
    (folder / "step00000020" / "checksums.json").write_text("{")
    with pytest.raises(CheckpointError, match=rf"checksums.json: damaged .*{cure}"):
        begin(tmp_path)
    assert (tmp_path / "epoch").read_text() == "1", "no learner has begun with it"


def test_of_two_checkpoints_of_a_step_the_whole_one_helps_if_the_other_is_damaged(tmp_path):
    """The second is written after an evaluation: at the end of most runs these are the only two."""
    begin(tmp_path, resume=False)
    for _ in range(2):
        put_checkpoint(tmp_path, step=20, lineage=1)
    folder = tmp_path / "checkpoints"
    assert checkpoint_files.find(folder, 20) == "step00000020-1"
    (folder / "step00000020-1" / "checksums.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"damaged .*go back to .* step 20 with .*--from 20"):
        begin(tmp_path)
    checkpoint_files.step_back(folder, 20)
    assert checkpoint_files.latest_name(folder) == "step00000020"
    assert begin(tmp_path).step == 20


def test_what_a_kill_leaves_of_a_checkpoint_is_not_taken_for_one(tmp_path):
    """A kill may come when the state of rank 0 is written, and before the checksums are."""
    begin(tmp_path, resume=False)
    put_checkpoint(tmp_path, step=10, lineage=1)
    folder = tmp_path / "checkpoints"

    def killed(name):
        put_state(folder, name, step=20, lineage=1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint_files.write_whole(folder, 20, killed)
    assert sorted(checkpoint_files.kept(folder)) == [10]
    with pytest.raises(CheckpointError, match="no checkpoint of step 20"):
        checkpoint_files.step_back(folder, 20)
    assert begin(tmp_path).step == 10
    put_checkpoint(tmp_path, step=20, lineage=1)
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step00000010", "step00000020"]
    assert begin(tmp_path).step == 20


def test_a_mark_that_a_kill_left_behind_the_next_checkpoint_means_nothing(tmp_path, monkeypatch):
    begin(tmp_path, resume=False)
    put_checkpoint(tmp_path, step=10, lineage=1)
    put_checkpoint(tmp_path, step=20, lineage=1)
    folder = tmp_path / "checkpoints"
    checkpoint_files.step_back(folder, 10)
    lineage = begin(tmp_path).lineage

    unlink = Path.unlink

    def killed(path, missing_ok=False):
        if path.name == checkpoint_files.STEPPED_BACK:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            put_checkpoint(tmp_path, step=15, lineage=lineage)
    it = begin(tmp_path)
    assert (it.step, it.lineage, it.stepped_back) == (15, lineage, False)


def test_a_checkpoint_without_checksums_is_of_an_earlier_version_and_accepted(tmp_path, caplog):
    put_checkpoint(tmp_path, step=10, lineage=1)
    (tmp_path / "checkpoints" / "step00000010" / "checksums.json").unlink()
    assert begin(tmp_path).step == 10
    assert "has no checksums" in caplog.text


def test_going_back_is_a_new_lineage_until_the_next_checkpoint_even_over_restarts(tmp_path):
    begin(tmp_path, resume=False)
    put_checkpoint(tmp_path, step=10, lineage=1)
    put_checkpoint(tmp_path, step=20, lineage=1)
    folder = tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 15 .* there are steps 10, 20"):
        checkpoint_files.step_back(folder, 15)
    checkpoint_files.step_back(folder, 10)
    for epoch in (2, 3):
        it = begin(tmp_path)
        assert (it.step, it.epoch, it.lineage, it.stepped_back) == (10, epoch, epoch, True)
    put_checkpoint(tmp_path, step=20, lineage=3)
    assert sorted(checkpoint_files.kept(folder)) == [10, 20]
    it = begin(tmp_path)
    assert (it.step, it.lineage, it.stepped_back) == (20, 3, False)
