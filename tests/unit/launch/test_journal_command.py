"""Test `offbeat journal`: what it prints of a journal, which damage it finds, what it exports."""

import json

import msgspec
import numpy as np
import pytest

from broker.core.records import Committed, GroupClosed, TasksPut, encode_event
from broker.journal.writer import DeadLetter, Kind, file_name, pack_dead_letter, pack_segment
from launch.arguments import EXPORT_FORMATS, JOURNAL_KINDS
from launch.cli import main
from protocol.codec import encode_arrays
from protocol.messages.episodes import Reward, Segment, Task, Turn
from tests.journals import DEADLINE_S, begin, small


def segment(trajectory, index, tokens, *, offset=0, status="unfinished", more=None, **fields):
    """Return the parts of a SEGMENT record; ``more`` are further arrays."""
    ids = np.arange(offset, offset + tokens)
    task = trajectory.rpartition(".")[0]
    message = Segment(
        trajectory_id=trajectory,
        task_id=task,
        group_id=task.rpartition(".")[0],
        group_size=2,
        index=index,
        offset=offset,
        tokens=tokens,
        action_tokens=tokens - 1,
        status=status,
        env="game",
        **fields,
    )
    arrays = {
        "token_ids": ids.astype("<i4"),
        "action_mask": (ids > 0).astype("u1"),
        "logp_behaviour": (-ids / 3).astype("<f4"),
        "policy_version": np.full(tokens, 7, "<i4"),
        **(more or {}),
    }
    return pack_segment(*encode_arrays(message, arrays)[1:])


@pytest.fixture
def run(tmp_path):
    """Yield the folder of a run whose broker is at work."""
    folder = tmp_path / "run"
    task = Task(task_id="1g7.3", env="game", group_id="1g7", group_size=2)
    with begin(folder / "journal", small(keep_bytes=0)) as journal:
        journal.append(Kind.EVENT, encode_event(TasksPut(tasks=[task])))
        journal.rotate(msgspec.msgpack.encode({"type": "snapshot", "segments": []}))
        assert journal.sync(DEADLINE_S)
        journal.retain([])
        one = journal.append(
            Kind.SEGMENT, *segment("1g7.3.0", 0, 5, turns=[Turn(0, 0, 2, False), Turn(1, 2, 5, True)])
        )
        journal.append(Kind.SEGMENT, *segment("1g8.0.0", 0, 4, status="finished"))
        saved = {"type": "snapshot", "segments": [[["1g7.3.0", 0], one, 99, False]]}
        journal.rotate(msgspec.msgpack.encode({"type": "snapshot", "segments": []}))
        journal.rotate(msgspec.msgpack.encode(saved))
        end = segment(
            "1g7.3.0", 1, 3, offset=5, status="finished",
            turns=[Turn(1, 5, 8, True)], rewards=[Reward("answer", 1, 0.5)],
        )  # fmt: skip
        journal.append(Kind.SEGMENT, *end)
        journal.append(Kind.EVENT, encode_event(Committed(epoch=1, step=4, trained=["1g7"])))
        journal.append(Kind.EVENT, encode_event(GroupClosed(group_id="1g8")))
        letter = DeadLetter(
            peer="actor-0", code="malformed", reason="no map", frames=[b"OB\x03\x00", b"\xc1"]
        )
        journal.append(Kind.DEAD, pack_dead_letter(letter))
        assert journal.sync(DEADLINE_S)
        yield folder


def said(capsys, *arguments, code=0):
    """Run `offbeat journal`. Return the lines it printed."""
    assert main(["journal", *map(str, arguments)]) == code
    return capsys.readouterr().out.splitlines()


def test_ls_lists_files_and_which_are_needed(run, capsys):
    lines = [line.split() for line in said(capsys, "ls", run)]
    assert lines[0] == ["FILE", "BYTES", "SNAPSHOT", "EVENT", "SEGMENT", "DEAD", "FIRST", "LAST", "NEEDED"]
    names = [file_name(number) for number in (2, 3, 4)]
    sizes = [str((run / "journal" / name).stat().st_size) for name in names]
    assert lines[1:4] == [
        [names[0], sizes[0], "1", "0", "2", "0", "1", "3", "yes"],
        [names[1], sizes[1], "1", "0", "0", "0", "4", "4", "no"],
        [names[2], sizes[2], "1", "2", "1", "1", "5", "9", "yes"],
    ]
    assert lines[4] == f"3 files, {sum(map(int, sizes))} bytes, others deleted".split()


def test_show_prints_records_one_per_line(run, capsys):
    lines = said(capsys, "show", run)
    assert [line.split()[:2] for line in lines[:4]] == [
        ["1", "SNAPSHOT"], ["2", "SEGMENT"], ["3", "SEGMENT"], ["4", "SNAPSHOT"]
    ]  # fmt: skip
    assert lines[1].split(maxsplit=2)[2] == "1g7.3.0[0]  5 tokens (4 sampled)  unfinished  train game"
    assert (
        lines[5].split(maxsplit=2)[2] == "1g7.3.0[1]  3 tokens (2 sampled)  finished  reward 0.5  train game"
    )
    assert lines[6].split(maxsplit=3)[2:] == ["committed", '{"epoch": 1, "step": 4, "trained": ["1g7"]}']
    assert lines[8].split(maxsplit=2)[2] == "actor-0  malformed  no map"
    assert len(lines) == 9


@pytest.mark.parametrize(
    ("filters", "numbers"),
    [
        (["--trajectory", "1g7.3.0"], [2, 6, 7]),
        (["--trajectory", "1g8.0.0"], [3, 8]),
        (["--trajectory", "1g8"], [3, 8]),
        (["--trajectory", "nobody"], []),
        (["--kind", "event"], [7, 8]),
        (["--kind", "segment", "--limit", "1"], [6]),
        (["--kind", "segment", "--trajectory", "1g7.3.0"], [2, 6]),
        (["--limit", "2"], [8, 9]),
        (["--limit", "0"], []),
    ],
)
def test_show_filters(run, capsys, filters, numbers):
    assert [int(line.split()[0]) for line in said(capsys, "show", run, *filters)] == numbers


def test_show_prints_dead_letters_with_their_frames(run, capsys):
    assert [line.strip() for line in said(capsys, "show", run, "--dead")] == [
        "9  actor-0  malformed: no map", r"4 bytes: b'OB\x03\x00'", r"1 bytes: b'\xc1'"
    ]  # fmt: skip


def test_show_says_when_a_dead_letter_is_cut(tmp_path, capsys):
    letter = DeadLetter(peer="a", code="malformed", reason="no map", frames=[b"x"], nbytes=70_000)
    with begin(tmp_path / "journal") as journal:
        journal.append(Kind.DEAD, pack_dead_letter(letter))
    assert said(capsys, "show", tmp_path, "--dead")[-1].strip() == "cut, the message had 70000 bytes"


def test_verify(run, capsys):
    assert said(capsys, "verify", run)[-1].endswith("bytes, whole")
    path = run / "journal" / file_name(2)
    data = bytearray(path.read_bytes())
    data[200] ^= 4
    path.write_bytes(data)
    lines = said(capsys, "verify", run, code=1)
    assert lines[0].startswith(f"damaged: {file_name(2)}, byte ")
    assert lines[-1].endswith("bytes, damaged")
    assert "LOST" in "".join(said(capsys, "show", run))


def test_verify_says_what_is_still_being_written(run, capsys):
    path = run / "journal" / file_name(4)
    with open(path, "ab") as file:
        file.write(b"\xf5OBr")
    assert said(capsys, "verify", run)[0].startswith("torn end, which the broker is still writing")


def test_verify_finds_a_newest_file_that_is_shorter_than_the_disk_had_it_or_missing(run, capsys):
    path = run / "journal" / file_name(4)
    path.write_bytes(path.read_bytes()[:-30])
    assert "were written" in said(capsys, "verify", run, code=1)[0]
    path.unlink()
    assert said(capsys, "verify", run, code=1)[0].startswith(f"damaged: {file_name(4)}, byte 0: missing")


def test_verify_lists_what_a_repair_has_set_aside(run, capsys):
    (run / "journal" / "journal-00000005.damaged").write_bytes(b"12345")
    lines = said(capsys, "verify", run)
    assert lines[0] == "set aside by a repair: journal-00000005.damaged, 5 bytes"
    assert lines[-1].endswith("bytes, whole")


def test_verify_finds_that_the_only_file_is_missing(tmp_path, capsys):
    begin(tmp_path / "journal").close()
    (tmp_path / "journal" / file_name(1)).unlink()
    assert said(capsys, "verify", tmp_path, code=1) == [
        f"damaged: {file_name(1)}, byte 0: missing, the newest; how many records is not known (0 records, 39 bytes)",
        f"{tmp_path / 'journal'}: 0 files, 0 bytes, damaged",
    ]
    assert said(capsys, "accept-loss", tmp_path)[0].startswith(f"accepted: {file_name(1)}")


def test_accept_loss(tmp_path, capsys):
    with begin(tmp_path / "journal") as journal:
        journal.append(Kind.EVENT, b"\xc0")
        assert main(["journal", "accept-loss", str(tmp_path)]) == 1
        assert "in use by another broker" in capsys.readouterr().err
        journal.rotate(b"\x80")
    assert said(capsys, "accept-loss", tmp_path) == ["nothing is damaged"]
    (tmp_path / "journal" / file_name(1)).unlink()
    (line,) = said(capsys, "accept-loss", tmp_path)
    assert line.startswith(f"accepted: {file_name(1)}, byte 0: missing")
    begin(tmp_path / "journal").close()
    assert said(capsys, "verify", tmp_path, code=1)[0].startswith("damaged, and accepted")


def test_export_as_json_lines(run, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert said(capsys, "export", run, "--out", out) == [
        f"{out}: 2 trajectories (2 complete), 3 segments, 12 tokens"
    ]
    one, two = map(json.loads, out.read_text().splitlines())
    assert (one["trajectory_id"], one["status"]) == ("1g7.3.0", "finished")
    assert one["token_ids"] == list(range(8))
    assert one["action_mask"] == [0] + [1] * 7
    assert np.array_equal(np.float32(one["logp_behaviour"]), (-np.arange(8) / 3).astype("f4"))
    assert one["policy_version"] == [7] * 8
    assert one["turns"] == [
        {"index": 0, "start": 0, "end": 2, "action": False, "back": 1},
        {"index": 1, "start": 2, "end": 8, "action": True, "back": 1},
    ]
    assert one["rewards"] == [{"name": "answer", "turn": 1, "value": 0.5}]
    assert one["complete"]
    assert two["token_ids"] == [0, 1, 2, 3]
    assert list(tmp_path.glob("*.partial*")) == []


def test_export_as_safetensors(run, tmp_path, capsys):
    safetensors = pytest.importorskip("safetensors.numpy")
    out = tmp_path / "out.safetensors"
    said(capsys, "export", run, "--out", out, "--format", "safetensors", "--trajectory", "1g7.3.0")
    tensors = safetensors.load_file(out)
    names = ("token_ids", "action_mask", "logp_behaviour", "policy_version")
    assert set(tensors) == {f"1g7.3.0/{index}/{name}" for index in (0, 1) for name in names}
    assert tensors["1g7.3.0/1/token_ids"].tolist() == [5, 6, 7]
    assert tensors["1g7.3.0/1/logp_behaviour"].dtype == np.float32
    assert tensors["1g7.3.0/0/action_mask"].tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(("dtype", "expert"), [("<u1", 255), ("<i2", 300)])
def test_export_of_experts(tmp_path, capsys, dtype, expert):
    safetensors = pytest.importorskip("safetensors.numpy")
    rows = {"routed_token": np.arange(3, dtype="<i4"), "routed_experts": np.full(6, expert, dtype)}
    with begin(tmp_path / "run" / "journal", small(keep_bytes=0)) as journal:
        journal.append(Kind.SEGMENT, *segment("1g7.3.0", 0, 3, status="finished", more=rows))
        assert journal.sync(DEADLINE_S)
        for kind in EXPORT_FORMATS:
            said(capsys, "export", tmp_path / "run", "--out", tmp_path / kind, "--format", kind)
    tensors = safetensors.load_file(tmp_path / "safetensors")
    assert tensors["1g7.3.0/0/routed_experts"].dtype == np.dtype(dtype)
    assert tensors["1g7.3.0/0/routed_experts"].tolist() == [expert] * 6
    assert tensors["1g7.3.0/0/routed_token"].tolist() == [0, 1, 2]
    assert json.loads((tmp_path / "jsonl").read_text())["routed_experts"] == [expert] * 6


def test_an_incomplete_trajectory_says_so(run, tmp_path, capsys):
    (run / "journal" / file_name(2)).rename(run / "journal" / "journal-00000002.released")
    out = tmp_path / "out.jsonl"
    said(capsys, "export", run, "--out", out)
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["complete"], line["segments"], line["offset"]) == (False, [1], 5)
    assert line["token_ids"] == [5, 6, 7]


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.jsonl"
    out.write_text("before")

    def fails(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    said(capsys, "export", run, "--out", out, code=1)
    monkeypatch.undo()
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["ls", "nowhere"], "nowhere/journal: no journal there; name the folder of a run"),
        (["export", "{run}", "--out", "x", "--trajectory", "nobody"], "has no trajectory 'nobody'"),
        (["export", "{run}", "--out", "no/such/folder"], "--out no/such/folder: No such file"),
    ],
)
def test_errors_name_the_cure(run, capsys, arguments, text):
    assert main(["journal", *(word.format(run=run) for word in arguments)]) == 1
    assert text in capsys.readouterr().err


def test_arguments_agree_with_what_they_choose():
    assert {kind.upper() for kind in JOURNAL_KINDS} == {kind.name for kind in Kind}
    assert EXPORT_FORMATS == ("jsonl", "safetensors")
    with pytest.raises(SystemExit):
        main(["journal", "ls", "run", "learner.steps=3"])
