"""Exit codes say whether a restart could help."""

import pytest

import actors.errors
import broker.errors
import envs.errors
import launch.errors
import learner.errors
import protocol.errors
from broker.errors import BindRefused
from launch import errors
from launch.errors import ConfigError
from launch.role import exit_with_code
from protocol.errors import LASTING, LinkDown, NotAdmitted

FINAL = {
    "launch.errors.ConfigError",
    "launch.errors.HeadGone",
    "launch.errors.ModelRefused",
    "actors.errors.ModelNotLoaded",
    "broker.errors.JournalError",
    "learner.errors.CheckpointError",
    "learner.errors.BrokerRefused",
    "learner.errors.NothingToLearn",
    "learner.errors.NoData",
    "learner.errors.Diverged",
    "learner.errors.HostsDiffer",
    "learner.errors.LoraError",
    "learner.errors.ModelUnusable",
    "learner.errors.NoisyModel",
    "learner.errors.RoutesUnknown",
    "learner.errors.FormulaError",
    "learner.errors.SamplerDiffers",
    "learner.errors.StaleTokens",
    "learner.errors.ReplayStateError",
    "learner.errors.ReplayConfigError",
    "protocol.errors.AddressRefused",
    "protocol.errors.GpuUnusable",
    "protocol.errors.KeysUnusable",
    "protocol.errors.NameTaken",
    "protocol.errors.NotAdmitted",
    "envs.errors.UnknownEnv",
    "envs.errors.RefusedFamily",
    "envs.errors.NoConfinement",
}
TREES = (actors.errors, broker.errors, envs.errors, launch.errors, learner.errors, protocol.errors)


def test_the_errors_that_another_start_would_only_repeat():
    found = {
        f"{tree.__name__}.{name}"
        for tree in TREES
        for name, kind in vars(tree).items()
        if isinstance(kind, type) and kind.__module__ == tree.__name__ and getattr(kind, "final", False)
    }
    assert found == FINAL


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
def test_every_error_is_drawn_in_its_tree(tree):
    own = {
        name
        for name, kind in vars(tree).items()
        if isinstance(kind, type) and kind.__module__ == tree.__name__
    }
    assert {name for name in own if name not in tree.__doc__} == set()


def test_an_error_below_a_final_one_is_final_too():
    class Narrow(ConfigError):
        pass

    assert errors.exit_code(Narrow("x")) == errors.FINAL
    assert errors.exit_code(LinkDown("x")) == errors.FAILED


def test_a_note_lives_until_the_next_start(tmp_path):
    assert errors.read_note(tmp_path, "learner") is None
    errors.leave_note(tmp_path, "learner", errors.FINAL, "diverged\nat step 3")
    assert errors.read_reason(tmp_path, "learner") == "diverged at step 3"
    assert errors.read_note(tmp_path, "learner") == errors.FINAL
    errors.clear_note(tmp_path, "learner")
    errors.clear_note(tmp_path, "learner")
    assert errors.read_note(tmp_path, "learner") is None


def test_the_first_note_stays_unless_a_final_error_follows(tmp_path):
    for code, reason, expected in (
        (errors.FAILED, "lost a file", "lost a file"),
        (errors.FAILED, "lost the connection to rank 0", "lost a file"),
        (errors.FINAL, "diverged", "diverged"),
        (errors.FAILED, "lost the connection to rank 0", "diverged"),
    ):
        errors.leave_note(tmp_path, "learner", code, reason)
        assert errors.read_reason(tmp_path, "learner") == expected
    assert errors.read_note(tmp_path, "learner") == errors.FINAL


def test_a_port_in_use_is_one_line_and_the_reason_in_the_note(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        exit_with_code(BindRefused("broker.http is taken"), tmp_path, "broker")
    assert ended.value.code == errors.FAILED
    assert capsys.readouterr().err == "broker: broker.http is taken\n"
    assert errors.read_reason(tmp_path, "broker") == "broker.http is taken"
    assert errors.read_note(tmp_path, "broker") == errors.FAILED


@pytest.mark.parametrize("code", LASTING)
@pytest.mark.parametrize("own_keys", [True, False])
def test_a_process_that_the_broker_does_not_admit_stays_away_unless_its_next_start_has_another_key(
    tmp_path, capsys, code, own_keys
):
    with pytest.raises(SystemExit) as ended:
        exit_with_code(NotAdmitted("no such key", code), tmp_path, "actor-0", own_keys=own_keys)
    healed = own_keys and code == "wrong_key"
    assert ended.value.code == (errors.FAILED if healed else errors.FINAL)
    assert capsys.readouterr().err == "actor-0: no such key\n"
