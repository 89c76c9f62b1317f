"""Test the environment that the roles of one machine get, given its cores and threads."""

from pathlib import Path

import pytest

from launch.processes import role_environment
from launch.run_file.load import check
from launch.supervise.posts import crowded


def run(mode="async", learner=1, generator=1, count=1, **settings):
    return check(
        {
            "run": {"name": "crowd", "mode": mode},
            "model": {"path": "model"},
            "env": {"name": "calculator"},
            "learner": {"threads": learner},
            "generator": {"threads": generator, "count": count, **settings},
        },
        "a test",
    )


@pytest.mark.parametrize(
    ("config", "cores", "expected"),
    [
        (run(), 2, False),
        (run(learner=2), 2, True),
        (run(learner=2, generator=2), 4, False),
        (run(generator=2, count=2), 4, True),
        (run("sync", learner=2, generator=2), 2, False),  # learner and generator take turns
        (run("sync", generator=2, count=2), 2, True),  # two generators compute at the same time
        # The generator runs elsewhere.
        (run(learner=2, generator=2, backend="http", url="http://127.0.0.1:1"), 2, False),
    ],
)
def test_threads_are_counted_where_they_compute_at_a_time(config, cores, expected):
    assert crowded(config, cores) is expected


def test_waiting_threads_sleep_where_cores_are_few(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert role_environment(2, local_model=True, crowded=True)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in role_environment(2, local_model=True)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="needs a host without the driver's file")
def test_deepspeed_is_told_of_the_cpu_unless_the_user_names_gpus(monkeypatch):
    """A learner on GPUs refuses to start with this variable, so it must not come from here."""
    for chosen, expected in (("", "cpu"), ("0,1", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert role_environment(2, local_model=True).get("DS_ACCELERATOR") == expected


def test_what_the_user_has_set_wins(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "OMP_WAIT_POLICY" not in role_environment(2, local_model=True, crowded=True)
