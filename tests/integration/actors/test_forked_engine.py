"""An engine that is forked off a generator ends with it, and keeps its signals to itself."""

import json
import signal
import subprocess
import sys

PROGRAM = """
import asyncio, ctypes, json, os, signal
from actors.generator.vllm_engine.plugin import PARENT, prepare_forks

PR_GET_PDEATHSIG = 2
os.environ[PARENT] = str(os.getpid())


def forked():
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        end = ctypes.c_int()
        ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(end))
        signal.raise_signal(signal.SIGTERM)
        os.write(write, str(end.value).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(read, 9))


async def main():
    came = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, came.append, "SIGTERM")
    ends_by = []
    for prepare in (lambda: None, prepare_forks, prepare_forks):
        prepare()
        ends_by.append(forked())
    # What a child has written for the loop is there by now, so it is read in the next steps.
    for _ in range(5):
        await asyncio.sleep(0)
    print(json.dumps([ends_by, len(came)]))

asyncio.run(main())
"""


def test_a_fork_ends_with_its_generator_and_its_signals_stay_its_own():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ends_by, came = json.loads(done.stdout)
    assert ends_by == [0, signal.SIGKILL, signal.SIGKILL]
    # Until Python 3.12 the loop takes the signal of a fork that was not prepared for its own.
    assert came == (1 if sys.version_info < (3, 12) else 0)


ORPHAN = """
import os, time
from actors.generator.vllm_engine.plugin import PARENT, prepare_forks

generator = os.getpid()
os.environ[PARENT] = str(generator)


def outlive():
    while os.getppid() == generator:
        time.sleep(0.001)


os.register_at_fork(after_in_child=outlive)
prepare_forks()
if os.fork() == 0:
    os.write(1, b"alive")
os._exit(0)
"""


def test_a_fork_whose_generator_dies_before_it_can_ask_for_its_end_ends():
    # This waits for the fork, too, which has the pipe.
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
