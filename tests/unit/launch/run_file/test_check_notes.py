"""`offbeat check` refuses a note whose words leave no room for an answer."""

import pytest

from launch.preflight.environment import Prompt, no_room_for_notes
from launch.run_file.load import METHODS_FOLDER, load, run_files

PROMPTS = [Prompt("train", 3, 11), Prompt("train", 4, 7), Prompt("heldout", 0, 40)]
IGRPO = run_files(METHODS_FOLDER)["igrpo"]


@pytest.mark.parametrize("tokens", [48, 61, 73])
def test_words_behind_the_longest_prompt_leave_no_room(tokens):
    """48 characters and the two line ends before them are 50 tokens, behind 11 of a prompt; a draft has up to 12."""
    config = load(IGRPO, [f"learner.sampling.max_trajectory_tokens={tokens}", "generator.max_model_len=128"])
    words = len("\n\n" + config.learner.family.note) - len("{draft}")
    (line,) = no_room_for_notes(config, PROMPTS, list)
    assert (
        f"max_trajectory_tokens is {tokens}, prompt included, but the first prompt of train task 3 has 11"
        in line
    )
    assert (
        f"the words of learner.family.note {words}, and the answers in it up to 12, which leaves no room"
        in line
    )
    assert f"to {11 + words + 2 * 12} or more, or shorten the note" in line


def test_a_note_with_room_and_a_family_without_note_are_left_alone():
    assert not list(no_room_for_notes(load(IGRPO), PROMPTS, list))
    for name in ("arpo-branch", "grpo"):
        assert not list(no_room_for_notes(load(run_files(METHODS_FOLDER)[name]), PROMPTS, list))
    assert not list(no_room_for_notes(load(IGRPO), [], list))


@pytest.mark.parametrize("tokens", [480, 1820])
def test_the_words_that_ask_for_a_reflection_need_room_too(tokens):
    words = "x" * 1800 + "{attempt}"
    settings = [f"learner.sampling.max_trajectory_tokens={tokens}", "generator.max_model_len=4096"]
    config = load(run_files(METHODS_FOLDER)["r3l"], [*settings, f'learner.family.reflection="{words}"'])
    (line,) = no_room_for_notes(config, PROMPTS, list)
    assert "the words of learner.family.reflection 1802, and the answers in it up to" in line


FAMILIES = [
    "igrpo",
    "ghpo",
    "scaf-grpo",
    "urpo",
    "dyna-mind",
    "r3l",
    "agent-r",
    "xrpo-seeding",
    "icpo",
    "fapo",
    "inspo",
    "inspo-proposals",
]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_shipped_demos_have_room_for_their_notes(name):
    """A character is a token of the shipped tiny models, but for the words that all prompts begin with."""
    config = load(run_files(METHODS_FOLDER)[name])
    longest = [Prompt("train", 0, 12)]
    assert not list(no_room_for_notes(config, longest, list))
    assert config.generator.max_model_len >= config.learner.sampling.max_trajectory_tokens
