"""`offbeat check` and `offbeat train` refuse what cannot work before anything is started."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from launch import errors
from launch.arguments import GROUPS, parser
from launch.cli import main

ROOT = Path(__file__).parents[3]


def offbeat(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "launch.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


def complaints(done):
    """Return what a command wrote to stderr, without the lines by which a slow machine is told what takes long."""
    patience = ("checking the model", "trying whether vLLM")
    return [line for line in done.stderr.splitlines() if not line.startswith(patience)]


@pytest.mark.parametrize("recipe", ["calculator", "tppo", "remix"])
def test_a_shipped_recipe_passes_the_check(recipe):
    """A unit test covers `check` on the other recipes."""
    done = offbeat("check", str(ROOT / "recipes" / f"{recipe}.toml"))
    assert (done.returncode, complaints(done)) == (0, [])
    assert "ok" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.name=calculatr"], "did you mean 'calculator'"),
        (["env.params.family=spel_backward"], "nearest: spell_backward"),
        (["env.params.family=coin_flip"], "accepts junk"),
        (["env.params.sead=1"], "does not take params"),
        (["learner.group_size=7"], "not a multiple"),
    ],
)
def test_a_mistake_ends_the_command_and_leaves_nothing(overrides, words, tmp_path):
    recipe = str(ROOT / "recipes" / "spell_backward.toml")
    done = offbeat("train", recipe, f"run.dir={tmp_path}/runs", *overrides)
    assert done.returncode == errors.FINAL
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_roles_by_hand_need_fixed_ports():
    done = offbeat("broker", str(ROOT / "recipes" / "spell_backward.toml"))
    assert done.returncode == 65
    assert "broker.endpoint=tcp://127.0.0.1:5755" in done.stderr


def test_overrides_may_stand_before_and_behind_options():
    recipe = str(ROOT / "recipes" / "spell_backward.toml")
    done = offbeat("actor", recipe, "run.mode=sync", "--name", "a", "learner.steps=0")
    assert done.returncode == 65
    assert "learner.steps" in done.stderr, "the last override was read"
    assert offbeat("actor", recipe, "--nam", "a", "--wrong").returncode == 2


def test_recipes_are_listed_and_printed():
    done = offbeat("recipes")
    assert (done.returncode, complaints(done)) == (0, [])
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[1:]}
    assert set(rows) == {path.stem for path in (ROOT / "recipes").rglob("*.toml")}
    assert "critic, windows" in rows["tppo"]
    assert "2506.15050" in rows["tppo"]


def test_a_printed_recipe_is_a_run_file(tmp_path):
    one = offbeat("recipes", "bapo")
    assert "docs/recipes/staleness.md#bapo" in one.stdout
    assert 'family = "spell_backward"' in one.stdout, "merged"
    path = tmp_path / "copy.toml"
    path.write_text(one.stdout)
    done = offbeat("check", str(path))
    assert (done.returncode, complaints(done)) == (0, [])


@pytest.mark.parametrize(("arguments", "code"), [(["bappo"], 1), (["bapo", "learner.steps=3"], 2)])
def test_recipes_takes_one_name(arguments, code):
    done = offbeat("recipes", *arguments)
    assert done.returncode == code
    assert ("did you mean 'bapo'" if code == 1 else "unrecognized") in done.stderr


@pytest.mark.parametrize("command", ["recipes", "status"])
def test_what_has_no_run_file_takes_no_overrides(command):
    done = offbeat(command, *(["bapo"] if command == "recipes" else ["a_run"] * (command == "status")), "a=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unrecognized arguments: a=1" in done.stderr


def test_a_verb_of_the_release_before_says_its_new_name_and_works(tmp_path):
    done = offbeat("replay", str(tmp_path))
    assert done.returncode == 1
    assert "offbeat replay is called offbeat retrain now" in done.stderr
    assert "is no run folder" in done.stderr


def test_help_shows_every_command_once_in_groups_and_the_daily_ones_first(capsys):
    made = parser()
    (commands,) = [a for a in made._actions if isinstance(a, argparse._SubParsersAction)]
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(commands.choices)
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    places = [said.index(f"\n  {name} ") for names in GROUPS.values() for name in names]
    assert places == sorted(places)
    assert "offbeat train spell_backward learner.steps=20" in said
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "for example spell_backward" in " ".join(capsys.readouterr().out.split())
