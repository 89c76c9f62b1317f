"""Test which families need bubblewrap, and how its command is found and built."""

import logging
import stat
from types import SimpleNamespace

import pytest

from envs.errors import EnvError, RefusedFamily, ScorerFailed
from envs.scoring.questions import ACCEPTS_JUNK, RUNS_ANSWERS, Family
from envs.scoring.scorer import Scorer
from envs.scoring.worker_process import PROCESS, Wrap, bubblewrap_command, scorer_process, ways_to_start


def composite(*names):
    return Family("composite", {"datasets": [{"name": name, "weight": 1.0, "config": {}} for name in names]})


def install(folder, script):
    """Install a program called bwrap into a folder."""
    folder.mkdir(exist_ok=True)
    program = folder / "bwrap"
    program.write_text(script)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.mark.parametrize("family", sorted(ACCEPTS_JUNK))
@pytest.mark.parametrize("wrapped", [False, True])
def test_families_that_accept_junk_are_refused(family, wrapped):
    for sandbox in ("auto", "bwrap", "process"):
        with pytest.raises(RefusedFamily, match=f"{family}.*junk"):
            ways_to_start(composite("chain_sum", family) if wrapped else Family(family), sandbox)


def test_a_sandbox_that_does_not_exist_is_refused():
    with pytest.raises(EnvError, match="sandbox = 'bwarp': use one of auto, bwrap, process"):
        ways_to_start(Family("spell_backward"), "bwarp")


@pytest.mark.parametrize(("share", "said"), [(0.0, "evaluate on"), (1.0, "train on"), (-0.5, "evaluate on")])
def test_a_share_that_holds_out_all_or_nothing_is_refused(share, said):
    with pytest.raises(EnvError, match=said):
        Family("spell_backward", heldout_share=share)


@pytest.mark.parametrize("name", sorted(RUNS_ANSWERS))
@pytest.mark.parametrize("wrapped", [False, True])
def test_families_that_run_answers_need_bubblewrap(name, wrapped, monkeypatch):
    family = composite("chain_sum", name) if wrapped else Family(name)
    assert family.runs_answers
    with pytest.raises(RefusedFamily, match="runs the answer as Python"):
        ways_to_start(family, "process")
    monkeypatch.setattr("shutil.which", lambda name: None)
    for sandbox in ("auto", "bwrap"):
        with pytest.raises(RefusedFamily, match="install bubblewrap"):
            ways_to_start(family, sandbox)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/bwrap")
    assert PROCESS not in ways_to_start(family, "auto")


def test_other_families_need_no_bubblewrap(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert not composite("chain_sum", "leg_counting").runs_answers
    assert ways_to_start(Family("chain_sum"), "auto") == [PROCESS]
    with pytest.raises(RefusedFamily, match="no bwrap on PATH"):
        ways_to_start(Family("chain_sum"), "bwrap")


@pytest.mark.parametrize(
    ("config", "said"),
    [({}, "must list the families"), ({"datasets": ["n_queens"]}, r"datasets\[0\] has no name")],
)
def test_a_composite_without_families_is_refused(config, said):
    with pytest.raises(EnvError, match=said):
        ways_to_start(Family("composite", config), "auto")


def test_bubblewrap_is_called_by_its_whole_path(tmp_path, monkeypatch):
    program = install(tmp_path / "bin", "#!/bin/sh\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "bin")
    for way in ways_to_start(Family("n_queens"), "bwrap"):
        assert bubblewrap_command(way, ["python"])[0] == str(program)


@pytest.mark.parametrize(("options", "disables"), [("--unshare-user", False), ("--disable-userns", True)])
def test_namespaces_inside_are_disabled_where_bubblewrap_can(tmp_path, options, disables):
    program = install(tmp_path, f"#!/bin/sh\necho '    {options}    text'\n")
    command = bubblewrap_command(Wrap("bwrap-userns", str(program)), ["python"])
    assert ("--disable-userns" in command) == disables
    assert "--disable-userns" not in bubblewrap_command(Wrap("bwrap", str(program)), ["python"])


BROKEN = "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"


@pytest.mark.parametrize("script", [BROKEN, "no program\0"], ids=["no permission", "no program"])
def test_auto_falls_back_with_a_warning_where_bubblewrap_does_not_start(
    tmp_path, monkeypatch, caplog, script
):
    program = install(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("envs.scoring.scorer.scorer_process", without_library)
    with caplog.at_level(logging.WARNING):
        assert Scorer(Family("chain_sum"), "auto").sandbox == "process"
    (warning,) = [record.message for record in caplog.records if record.name == "envs.scoring.scorer"]
    assert warning.startswith("scorer runs as process, because")
    assert ("No permissions to create new namespace" if script == BROKEN else str(program)) in warning


@pytest.mark.parametrize("family", ["chain_sum", "n_queens"])
def test_bubblewrap_that_does_not_start_is_one_clear_error(tmp_path, monkeypatch, family):
    install(tmp_path, BROKEN)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ScorerFailed, match=r"no scorer starts \(bwrap.*No permissions to create new namespace"
    ):
        Scorer(Family(family), "bwrap")


def without_library(family, way):
    """Start real bubblewrap, but take a plain process for started."""
    if way == PROCESS:
        return SimpleNamespace(opened={"opened": True}, pid=1)
    return scorer_process(family, way)
