"""Compares the words that a family puts behind a prompt with the room for them. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence

from launch.preflight.trial import Prompt
from launch.run_file.sections import RunConfig

_PLACE = re.compile(r"\{\w+\}")


def no_room_for_notes(
    config: RunConfig, prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]]
) -> Iterator[str]:
    """Yield the refusal of a note whose words alone leave no room for an answer behind the longest prompt.

    Args:
        config: with the family.
        prompts: first prompts that were tried; those of evaluations have no note.
        encode: turns text into tokens.
    """
    note = getattr(config.learner.family, "note", "")
    longest = max((p for p in prompts if p.split == "train"), key=lambda p: p.tokens, default=None)
    if not note or longest is None:
        return
    words, sampling = len(encode("\n\n" + _PLACE.sub("", note))), config.learner.sampling
    if longest.tokens < sampling.context_tokens <= longest.tokens + words:
        needed = longest.tokens + words + 2 * sampling.max_turn_tokens
        yield (
            f"learner.sampling.{sampling.context_setting} is {sampling.context_tokens}, prompt included, but "
            f"{longest.task} has {longest.tokens} tokens and the words of learner.family.note {words}, which leaves "
            f"no room for an answer; raise it, and generator.max_model_len, to {needed} or more, or shorten the note"
        )
