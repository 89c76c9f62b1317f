"""The script of `offbeat completion`, in the shells that are here."""

import shutil
import subprocess

import pytest

from launch.arguments import GROUPS, parser
from launch.cli import main
from launch.completion import SHELLS, script, words_of


def completed(*words):
    """Return what bash offers behind these words."""
    typed = " ".join(f"'{word}'" for word in words)
    code = f"""{script(parser(), "bash", ("spell_backward", "bapo"))}
COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _offbeat
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=30, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_offers_commands_options_actions_choices_and_recipes():
    assert completed("offbeat", "tra") == {"train"}
    assert {"--resume", "--in-process"} <= completed("offbeat", "train", "--")
    assert completed("offbeat", "train", "spell_b") == {"spell_backward"}
    assert completed("offbeat", "keys", "ma") == {"make"}
    assert completed("offbeat", "completion", "fi") == {"fish"}
    assert "--watch" not in completed("offbeat", "train", "--")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_takes_its_script(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "spell_backward" in text
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    subprocess.run([shell, "-n", "/dev/stdin"], input=text, text=True, check=True, timeout=30)


def test_every_command_is_completed():
    commands = {entry.command for entry in words_of(parser())}
    assert {name for names in GROUPS.values() for name in names} <= commands
