"""Test that too little memory is told from other ends of a process, with the setting to change."""

import signal
import subprocess
import sys

import pytest

from launch import processes
from launch.processes import Child, tail
from launch.supervise import posts
from launch.supervise.posts import Post, how_it_ended, too_little_memory

DESIRED = (
    "ValueError: Free memory on device cuda:0 (20/80 GiB) is less than desired GPU memory utilization (0.5"
)
CACHE = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
LONG = "ValueError: 2.0 GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB)"


@pytest.mark.parametrize(
    ("role", "line", "cure"),
    [
        ("learner", "torch.OutOfMemoryError: CUDA out of memory.", "learner.micro_batch_tokens"),
        ("learner", "RuntimeError: [enforce fail at alloc_cpu.cpp] can't allocate memory", "zero_stage = 3"),
        (
            "learner",
            "OSError: [Errno 28] No space left on device: '/dev/shm/offbeat-run'",
            "learner.keep_versions",
        ),
        ("generator", "torch.OutOfMemoryError: CUDA out of memory.", "generator.max_num_seqs"),
        ("generator", DESIRED, "generator.gpu_memory_utilization, or give the engine a GPU of its own"),
        ("generator", CACHE, "generator.kv_cache_mb"),
        ("judge", LONG, "generator.max_model_len"),
    ],
)
def test_the_cure_names_the_setting_of_the_role(role, line, cure):
    log = f"INFO started\n{line}\nTraceback (most recent call last):\nRuntimeError: failed"
    # An engine ends in a process of its own, and what its generator says of it names no cause.
    said = too_little_memory(role, "" if role == "learner" else "RuntimeError: engine core failed", log)
    assert cure in said
    assert line[:60] in said


def test_other_ends_and_the_memory_of_user_code_are_none():
    assert too_little_memory("learner", "", "RuntimeError: shapes do not match") == ""
    assert too_little_memory("actor", "", "MemoryError") == ""
    assert too_little_memory("learner", "OSError: [Errno 28] No space left on device: '/home/runs'", "") == ""
    logged = "evaluation is repeated: the reward raised MemoryError in rewards.py:3"
    assert too_little_memory("learner", "LinkDown: no answer from the broker", logged) == ""
    assert too_little_memory("learner", "every episode fails: MemoryError in rewards.py:3", logged) == ""


def test_what_an_earlier_process_wrote_does_not_count(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text("torch.OutOfMemoryError\n")
    begin = log.stat().st_size
    with open(log, "a") as more:
        more.write("fine\n")
    assert tail(log, begin=begin) == "fine"
    child = Child("learner", [], subprocess.Popen([sys.executable, "-c", ""]), log, begin)
    child.process.wait()
    assert child.own_tail(60) == "fine"


@pytest.mark.parametrize(("kills", "said"), [(3, False), (4, True)])
def test_a_kill_by_a_kernel_without_memory_is_named(tmp_path, monkeypatch, kills, said):
    killed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    monkeypatch.setattr(posts, "oom_kills", lambda: kills)
    post = Post("generator-0", 1, child=Child("generator-0", [], killed, tmp_path / "log", oom_kills=3))
    assert ("the host ran out of memory" in how_it_ended(post, tmp_path)) is said


def test_the_kernel_counts_its_kills():
    assert processes.oom_kills() >= 0
