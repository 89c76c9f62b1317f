"""Test programs of a model in real bubblewrap: right ones get their credit, and hostile ones get and harm nothing."""

import asyncio
import os
import time
from pathlib import Path

import pytest

from envs.scoring.program_tests import read_cases
from envs.scoring.programs import Limits, Programs
from tests.bubblewrap import needs_bubblewrap

pytestmark = needs_bubblewrap

PATIENT = Limits(60.0, 120.0)
"""More than a busy machine needs."""
SHORT = Limits(0.3, 0.6)
"""For programs that do not end."""
SQUARES = [{"input": "2\n", "output": "4"}, {"input": "3\n", "output": "9"}]
SQUARE = "print(int(input()) ** 2)"
CALLS = ["assert square(2) == 4", "assert square(3) == 9"]
FUNCTION = "def square(x):\n    return x * x"


@pytest.fixture(scope="module")
def programs():
    programs = Programs(workers=2)
    yield programs
    programs.close_now()


def tried(programs, program, tests, limits=PATIENT, **how):
    return asyncio.run(programs.test(program, read_cases(tests), limits, within_s=300.0, **how))


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        (SQUARE, SQUARES, 2),
        ("print(4)", SQUARES, 1),
        ("import sys\nprint(sum(map(int, sys.stdin)))\nsys.exit(0)", [{"input": "1\n2\n", "output": "3"}], 1),
        ("print(4)\nraise ValueError", SQUARES, 0),
        (FUNCTION, CALLS, 2),
        ("class Solution:\n    def square(self, x):\n        return {3: 9}.get(x)", CALLS, 1),
        (FUNCTION, {"fn_name": "square", "inputs": [[2], [3]], "outputs": [4, [9]]}, 2),
        ("def pairs(n):\n    yield from ((i, i) for i in range(n))", [
            {"call": "pairs", "args": [2], "expected": [[0, 0], [1, 1]]}
        ], 1),
        ("def order(xs):\n    xs.sort()", ["xs = [2, 1]\norder(xs)\nassert xs == [1, 2]"], 1),
        ("class Stack(list):\n    pass\nclass Box:\n    def __init__(self, x):\n        self.x = x\n"
         "    def twice(self):\n        return Box(2 * self.x)", [
            "assert Box(2).twice().x == 4",
            "try:\n    Box()\nexcept TypeError:\n    pass\nelse:\n    assert False",
            "assert isinstance(Box(1), Box)",
        ], 3),
        ("import threading\nprint(4)", SQUARES, 1),
    ],
)  # fmt: skip
def test_a_program_gets_the_tests_that_it_passes(programs, program, tests, passed):
    verdict = tried(programs, program, tests)
    assert verdict.passed == passed, verdict
    assert bool(verdict.why) == (passed < verdict.tests)


def test_without_partial_credit_nothing_is_tried_behind_a_failure(programs):
    verdict = tried(programs, "print(0)", SQUARES, all_or_none=True)
    assert (verdict.passed, verdict.why) == (0, "test 0: it printed '0\\n', expected '4'")


def test_the_text_before_the_program_is_its_own_and_the_imports_are_the_tests_too(programs):
    before = "from math import isclose\nclass Node:\n    def __init__(self, x):\n        self.x = x"
    cases = read_cases(["assert isclose(first(Node(3)), 3)"], before=before)
    program = "def first(node):\n    return node.x\ndef isclose(*args):\n    return True"
    assert asyncio.run(programs.test(program, cases, PATIENT, within_s=300.0)).passed == 1
    wrong = "def first(node):\n    return 0\ndef isclose(*args):\n    return True"
    assert asyncio.run(programs.test(wrong, cases, PATIENT, within_s=300.0)).passed == 0


ESCAPES = {
    "starts processes": "import os\ntry:\n    while True: os.fork()\nexcept OSError: print('no')",
    "starts threads": (
        "import threading\ntry:\n while True: threading.Thread(target=input).start()\nexcept RuntimeError: print('no')"
    ),
    "fills the disk": (
        "made = 0\nfor f in ('/x', '/tmp/x', '/dev/shm/x', '/dev/x', '/var/tmp/x', 'x'):\n"
        " try: open(f, 'wb').write(bytes(1 << 20)); made += 1\n except OSError: pass\nprint('no' if not made else made)"
    ),
    "fills the kernel's memory": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "made = [libc.shmget(0, 1 << 20, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600)]\n"
        "try: made.append(os.memfd_create('x'))\nexcept OSError: pass\n"
        "print('no' if made == [-1, -1, -1] else made)"
    ),
    "reads /proc": (
        "import os\ntry: print(os.listdir('/proc/1'))\n"
        "except OSError: print('no' if not os.path.exists('/proc/self') else 1)"
    ),
    "reads the memory of its parent": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.ptrace.restype = ctypes.c_long\n"
        "print('no' if libc.ptrace(16, os.getppid(), 0, 0) == -1 and libc.process_vm_readv(os.getppid(), 0, 0, 0, 0, 0)"
        " == -1 else 1)"
    ),
    "kills its parent": (
        "import os, signal\nfor pid in (os.getppid(), 1, -1, 0):\n"
        " try: os.kill(pid, 9)\n except OSError: continue\n print(pid)\nprint('no')"
    ),
    "reaches the network": (
        "import socket\ntry: socket.socket(); print('yes')\nexcept OSError: print('no')"
    ),
    "takes more memory than it may": "try: bytes(1 << 30); print('yes')\nexcept MemoryError: print('no')",
    "raises its limits": (
        "import resource\ntry: resource.setrlimit(resource.RLIMIT_NPROC, (9, 9)); print('yes')\n"
        "except (OSError, ValueError): print('no')"
    ),
    "makes namespaces": "import ctypes\nprint('no' if ctypes.CDLL(None).unshare(0x10000000) == -1 else 'yes')",
    "opens many files": (
        "import os\ntry:\n for i in range(999): os.open('/dev/null', 0)\n print('yes')\nexcept OSError: print('no')"
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", ESCAPES.values(), ids=ESCAPES.keys())
def test_a_program_that_breaks_out_is_refused_by_the_kernel(programs, program):
    verdict = tried(programs, program, [{"input": "", "output": "no"}])
    assert verdict.passed == 1, verdict


def test_a_program_sees_no_file_of_the_user(programs, tmp_path):
    secret = tmp_path / "train.jsonl"
    secret.write_text("the answers")
    here = Path(__file__).resolve()
    for path in (
        secret,
        here,
        here.parents[3] / "pyproject.toml",
        Path("/etc/passwd"),
        Path("/root/.bashrc"),
    ):
        program = f"import os\nprint('no' if not os.path.exists({str(path)!r}) else 'yes')"
        assert tried(programs, program, [{"input": "", "output": "no"}]).passed == 1, path
    names = (
        "import os\nprint('no' if not any('KEY' in n or 'PYTHONPATH' == n for n in os.environ) else 'yes')"
    )
    os.environ["OFFBEAT_TEST_KEY"] = "secret"
    try:
        assert tried(programs, names, [{"input": "", "output": "no"}]).passed == 1
    finally:
        del os.environ["OFFBEAT_TEST_KEY"]


ENDLESS = {
    "never ends": "while True: pass",
    "sleeps": "import time\ntime.sleep(600)",
    "prints for ever": "while True: print('4')",
    "prints errors for ever": "import sys\nwhile True: sys.stderr.write('x' * 999)",
    "closes its output and goes on": "import os\nos.close(1)\nos.close(2)\nwhile True: pass",
    "ignores signals": (
        "import signal\nfor s in range(1, 32):\n try: signal.signal(s, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nwhile True: pass"
    ),
}


@pytest.mark.parametrize("program", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_program_without_end_is_ended(programs, program):
    began = time.monotonic()
    verdict = tried(programs, program, SQUARES, SHORT)
    assert verdict.passed == 0
    assert time.monotonic() - began < 200
    assert tried(programs, f"{FUNCTION}\n{program}", CALLS, SHORT).passed == 0


FORGERIES = {
    "equals everything": (
        "class Any:\n def __eq__(s, o): return True\n def __ne__(s, o): return False\n def __sub__(s, o): return 0\n"
        " def __contains__(s, o): return True\n def __float__(s): return 4.0\ndef square(x): return Any()"
    ),
    "ends well at once": "import os\nos._exit(0)",
    "ends when it is called": "import os\ndef square(x): os._exit(0)",
    "replaces built-in functions": "import builtins as b\nb.abs = b.len = lambda *a: 0\ndef square(x): return 0",
    "defines names of the tests": "def abs(x): return 0\ndef AssertionError(*a): pass\ndef square(x): return 0",
    "writes to every descriptor": (
        'import os, struct\nd = b\'{"why": "", "gone": false}\'\nfor i in range(64):\n'
        " try:\n  for _ in range(9): os.write(i, struct.pack('<I', len(d)) + d)\n except OSError: pass\n"
        "def square(x): return 0"
    ),
    "answers with numbers that are none": "def square(x): return float('nan')",
    "answers with a class of int": (
        "class I(int):\n def __eq__(s, o): return True\n __hash__ = int.__hash__\ndef square(x): return I(1)"
    ),
    "replaces the way back": (
        "import sys\nm = sys.modules['__main__']\nm._answer = lambda *a: {'value': 4}\nm.packed = lambda *a: 4"
    ),
    "looks for the tests": (
        "import gc\ndef square(x):\n found = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
        " return found[0]['expected'] if found else 0"
    ),
    "raises": "def square(x): raise SystemExit(0)",
}
GUARDED = [
    "assert square(2) == 4",
    "assert abs(square(3) - 9) < 1e-6",
    "import math\nassert math.isclose(square(5), 25.0)",
    "assert square(7) in (49,) and 49 in [square(7)]",
]


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_program_cannot_forge_a_result(programs, program):
    tests = GUARDED[1:] if "m._answer" in program else GUARDED
    calls = {"fn_name": "square", "inputs": [[3], [9]], "outputs": [9, 81]}
    for attempt in (tests, calls, SQUARES):
        assert tried(programs, program, attempt, Limits(1.0, 2.0)).passed == 0


def test_no_hostile_program_harmed_a_worker(programs):
    """The last test: all of these ran in two workers, which were never started again."""
    counters = programs.counters
    assert counters.programs > 0
    assert (counters.program_restarts, counters.program_tampered) == (0, 0)
    assert tried(programs, FUNCTION, CALLS).passed == 2


def test_many_programs_run_at_a_time_and_keep_their_own_results(programs):
    async def main():
        jobs = [(SQUARE, SQUARES, 2), ("print(9)", SQUARES, 1), (FUNCTION, CALLS, 2), ("", CALLS, 0)] * 4
        verdicts = await asyncio.gather(
            *(
                programs.test(program, read_cases(tests), PATIENT, within_s=300.0)
                for program, tests, _ in jobs
            )
        )
        assert [verdict.passed for verdict in verdicts] == [passed for _, _, passed in jobs]

    asyncio.run(main())
