"""The ranks of a learner by hand end with the exit code of the error that ended the learner on any host."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import errors
from launch.processes import Ranks, free_port

RANK = """
import sys
from pathlib import Path
import torch.distributed as dist
from launch import errors as exit_codes

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    exit_codes.leave_note(Path(sys.argv[1]), "learner", int(sys.argv[2]), "Diverged: at step 3")
    sys.exit(int(sys.argv[2]))
dist.barrier()
"""
"""The first rank ends with an error, and the second one loses its connection."""
ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240


@pytest.mark.parametrize("code", [errors.FINAL, pytest.param(errors.FAILED, marks=pytest.mark.soak)])
def test_all_hosts_end_with_the_code_of_the_rank_that_failed(tmp_path, code):
    (tmp_path / "rank.py").write_text(RANK)
    rendezvous = f"127.0.0.1:{free_port()}"
    started = []
    try:
        for node in (0, 1):
            torchrun = Ranks(1, 2, node, rendezvous).torchrun()[3:]
            program = [*torchrun, "--", str(tmp_path / "rank.py"), str(tmp_path), str(code)]
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "launch.by_hand", str(tmp_path), *program],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        said = [process.communicate(timeout=TIMEOUT_S)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait(TIMEOUT_S)
    assert [process.returncode for process in started] == [code, code], "\n".join(said)
    assert ("learner: it ended for good: Diverged: at step 3" in said[1]) == (code == errors.FINAL)
