"""Compares the words that a family puts behind a prompt with the room for them. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence

from launch.preflight.trial import Prompt
from launch.run_file.family_rules import quoted_answers
from launch.run_file.sections import RunConfig

_PLACE = re.compile(r"\{\w+\}")


def no_room_for_notes(
    config: RunConfig, prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]]
) -> Iterator[str]:
    """Yield the refusal of a note that leaves no room for an answer behind the longest prompt.

    The answers in a note are taken to be as long as one turn may be.

    Args:
        config: with the family.
        prompts: first prompts that were tried; those of evaluations have no note.
        encode: turns text into tokens.
    """
    family, sampling = config.learner.family, config.learner.sampling
    notes = {name: getattr(family, name, "") for name in ("note", "reflection")}
    longest = max((p for p in prompts if p.split == "train"), key=lambda p: p.tokens, default=None)
    if not any(notes.values()) or longest is None:
        return
    words, name = max((len(encode("\n\n" + _PLACE.sub("", note))), name) for name, note in notes.items())
    quoted = quoted_answers(family) * sampling.max_turn_tokens
    if longest.tokens < sampling.context_tokens <= longest.tokens + words + quoted:
        needed = longest.tokens + words + quoted + sampling.max_turn_tokens
        yield (
            f"learner.sampling.{sampling.context_setting} is {sampling.context_tokens}, prompt included, but "
            f"{longest.task} has {longest.tokens} tokens, the words of learner.family.{name} {words}, and the answers "
            f"in it up to {quoted}, which leaves no room for an answer; raise it, and generator.max_model_len, to "
            f"{needed} or more, or shorten the note"
        )
