"""Test what `benchmarks.gpu` prints: ratios, missing figures, steps that fail, and a machine without a GPU."""

import json
import logging
from subprocess import PIPE, TimeoutExpired
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import program
from benchmarks.gpu.setting import ModelShape, make_batch_of, operations
from benchmarks.report import ROOT, Figure, table
from launch.run_file.load import load
from launch.run_file.rules import contradictions


def test_ratios_are_of_repetitions_that_took_turns():
    figure = Figure("step", "s", [1.0, 4.0, 2.0], "plain", [1.0, 2.0, 8.0])
    assert figure.ratio == 1.0
    assert "| step | s | 2 [1, 4] | plain | 2 [1, 8] | 1.00 |" in table([figure])


def test_what_was_not_measured_is_missing_and_not_zero():
    figure = Figure("peak memory", "GB", [], "plain", [])
    assert figure.ratio is None
    assert "| peak memory | GB |  | plain |  |  |" in table([figure])


def test_operations_are_six_per_parameter_and_token_and_half_of_the_attention():
    shape = ModelShape(vocabulary=10, width=8, layers=3, heads=2, kv_heads=1, head_dim=4, inner=16)
    # Two products of 2 operations for each head, its width and pair of positions; both passes are three forward ones;
    # half of the pairs are masked.
    attention = 3 * 2 * 4 * (6 * 6) * (2 * 2) * 3 / 2
    assert operations(shape, 100, tokens=6, length=6) == pytest.approx(6 * 100 * 6 + attention)


def test_a_batch_has_rows_of_the_length_and_whole_groups():
    batch = make_batch_of(256, 32, 300)
    assert len(batch) == 8
    assert {len(t.token_ids) for t in batch} == {32}
    assert all(t.action_tokens == 24 for t in batch)


def test_a_machine_without_a_gpu_is_told_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO):
        program.main(["--out", str(tmp_path)])
    assert caplog.messages == [program.NO_GPU]


def test_a_step_that_fails_takes_nothing_from_the_others(tmp_path, monkeypatch, caplog):
    turns = []

    class Process:
        """A step that fails if it is "publish". It does nothing before its turn."""

        def __init__(self, command, *, stdout, **named):
            self.step = command[command.index("--steps") + 1]
            turns.append(f"{self.step} waits")

        def kill(self):
            turns.append(f"{self.step} is no more")

        def wait(self):
            pass

        def communicate(self, line, timeout):
            turns.append(self.step)
            self.returncode = int(self.step == "publish")
            if self.returncode:
                (tmp_path / "publish.log").write_text("OutOfMemoryError: CUDA out of memory")
            else:
                (tmp_path / f"{self.step}.json").write_text(
                    '[{"name": "copy", "unit": "GB/s", "values": [2.0]}]'
                )

    # Only the program's own: others run processes, too.
    own = SimpleNamespace(Popen=Process, PIPE=PIPE, TimeoutExpired=TimeoutExpired)
    monkeypatch.setattr(program, "subprocess", own)
    monkeypatch.setattr("benchmarks.report.commit", lambda: "c0ffee")
    arguments = ["--device", "cpu", "--tiny", "--steps", "publish", "ceilings", "--out", str(tmp_path)]
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit):
        program.main(arguments)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["results"]["failed"] == {"publish": "1: OutOfMemoryError: CUDA out of memory"}
    assert "| copy | GB/s | 2 |" in found["tables"]["figures"]
    assert "publish failed: 1: OutOfMemoryError: CUDA out of memory" in caplog.messages
    assert turns[:4] == ["publish waits", "ceilings waits", "publish", "ceilings"]
    assert turns[4:] == ["publish is no more", "ceilings is no more"]


def test_the_run_file_of_the_gpu_tests_is_right():
    config = load(ROOT / "tests" / "gpu" / "letters.toml")
    assert list(contradictions(config)) == []
    assert (config.learner.dtype, config.generator.dtype) == ("bfloat16", "bfloat16")
