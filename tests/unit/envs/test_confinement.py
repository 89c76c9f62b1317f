"""Test the rights that a scorer's processes give up, in processes that are forked for the test."""

import ctypes
import os
import re
from pathlib import Path

import pytest

from envs.scoring import confinement
from envs.scoring.confinement import WORKER_CALLS, filter_program, give_up_rights, refuse_calls

USER_NAMESPACE = 0x10000000

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def in_child(check):
    """Return the exit code of ``check``, called in a forked process; 99 if it raises."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = check()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def unshare():
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(USER_NAMESPACE)


@pytest.mark.parametrize("may_fork", [True, False])
def test_no_user_namespace_can_be_made_any_more(may_fork):
    def check():
        give_up_rights(may_fork=may_fork)
        return 0 if unshare() == 0 else 7

    if in_child(lambda: 0 if refuse_calls(()) or os.geteuid() else 1) == 1:
        pytest.skip("this kernel or processor has no filter for system calls")
    assert in_child(check) == 7


def test_a_process_may_start_others_only_where_answers_need_it():
    def forks(may_fork):
        def check():
            give_up_rights(may_fork=may_fork)
            try:
                child = os.fork()
            except BlockingIOError:
                return 7
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            return 0

        return in_child(check)

    assert (forks(True), forks(False)) == (0, 7)


def test_others_of_its_user_cannot_open_its_memory():
    def check():
        give_up_rights(may_fork=True)
        try:
            os.close(os.open(f"/proc/{os.getpid()}/mem", os.O_RDWR))
        except PermissionError:
            pass
        else:
            return 1
        child = os.fork()
        if child == 0:
            try:
                os.open(f"/proc/{os.getppid()}/mem", os.O_RDWR)
            except PermissionError:
                os._exit(0)
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert in_child(check) == 0


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_filter_is_whole_instructions_with_jumps_inside(machine):
    program = filter_program(WORKER_CALLS, *confinement._MACHINES[machine])
    assert len(program) % 8 == 0
    count = len(program) // 8
    for at in range(count):
        code, if_true, if_false = program[at * 8], program[at * 8 + 2], program[at * 8 + 3]
        if code in (0x15, 0x35, 0x45):
            assert at + 1 + max(if_true, if_false) < count
    assert program[-8:] == bytes([6, 0, 0, 0, 0, 0, 0xFF, 0x7F])


def test_the_numbers_are_this_kernels():
    header = "/usr/include/asm-generic/unistd.h"
    if not os.path.exists(header):
        pytest.skip(f"{header} is not installed")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", Path(header).read_text()))
    for name, (_, generic) in confinement._CALLS.items():
        assert int(numbers[name]) == generic, name
