"""Test that a library that one thread never leaves fails its users with the reason, and not for ever."""

import pytest

from envs.errors import EnvError, ServiceFailed
from envs.gym.textworld import STUCK, LibraryLock


@pytest.mark.parametrize(
    ("inside_s", "error"), [(1.0, ServiceFailed), (STUCK * 10.0, ServiceFailed), (21.0, EnvError)]
)
def test_who_waits_is_not_at_fault_until_the_holder_is_stuck(inside_s, error):
    now = [0.0]
    lock = LibraryLock("TextWorld", clock=lambda: now[0])
    with lock.held("game1", 10.0):
        now[0] = inside_s
        # The lock is not free, so the wait is as long as the test lets it be.
        lock._lock = type(
            "Taken", (), {"acquire": lambda self, timeout: False, "release": lambda self: None}
        )()
        with pytest.raises(EnvError) as failed, lock.held("game2", 10.0):
            pass
    assert type(failed.value) is error
    assert "game1" in str(failed.value)
    assert "TextWorld" in str(failed.value)
