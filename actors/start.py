"""How an episode begins that the learner asked for because of an earlier one: with a note behind its prompt. Pure."""

from collections.abc import Sequence
from typing import cast

from actors.errors import ActorError
from envs.base import ChatMessage


def with_note(messages: Sequence[ChatMessage], note: str) -> list[ChatMessage]:
    """Return the first messages of an episode with a note behind the text of the last one, after an empty line.

    Args:
        messages: what the environment's ``reset`` returned.
        note: `Task.note`; "" leaves the messages as they are.

    Raises:
        ActorError: there is a note, and the last message is the assistant's, or there is no message.

    Example:
        >>> with_note([{"role": "user", "content": "What is 17 + 25?"}], "Begin with 7 + 5.")
        [{'role': 'user', 'content': 'What is 17 + 25?\\n\\nBegin with 7 + 5.'}]
    """
    if not note:
        return list(messages)
    if not messages or messages[-1]["role"] == "assistant":
        raise ActorError(
            "the task has a note, but the first prompt does not end with a message that it can follow"
        )
    last = cast(ChatMessage, {**messages[-1], "content": f"{messages[-1]['content']}\n\n{note}"})
    return [*messages[:-1], last]
