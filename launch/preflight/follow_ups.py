"""Checks before any role starts that the model's chat template can go on behind an answer."""

from collections.abc import Iterator, Sequence

from actors.errors import ActorError
from actors.render import Renderer
from envs.base import ChatMessage, ToolSchema
from launch.errors import ConfigError

_QUESTION: ChatMessage = {"role": "user", "content": "Question"}


def check_follow_ups(
    renderer: Renderer, seen: Sequence[ChatMessage], tools: Sequence[ToolSchema]
) -> list[str]:
    """Try the messages that may follow an answer. Return remarks on the template.

    Args:
        renderer: tokenizer and chat template of the model.
        seen: messages with which the environment answered; empty if it ended the episode.
        tools: schemas of the environment's tools. With tools, their results are tried, too.

    Raises:
        ConfigError: a second turn could not be rendered, or would not keep the tokens of the first.
    """
    remarks: list[str] = []
    if tools and (name := tools[0]["function"]["name"]) not in renderer.text([_QUESTION], tools):
        remarks.append(
            f"the chat template leaves out the tools, for example {name!r}; describe them in the prompt, with the form "
            "of a call"
        )
    if tools and renderer.calls.reader == "nobody":
        remarks.append(
            f"nobody reads the tool calls that the chat template writes, which begin with {renderer.calls.mark!r}: "
            "each of them reaches the environment as one that cannot be read; pip install 'offbeat[renderers]' brings "
            "readers for more models"
        )
    for messages in _follow_ups(seen, tools):
        try:
            remark = renderer.check_follow_up(messages, tools)
        except ActorError as error:
            raise ConfigError(f"env: the second turn of an episode: {error}") from None
        if remark and remark not in remarks:
            remarks.append(remark)
    return remarks


def _follow_ups(seen: Sequence[ChatMessage], tools: Sequence[ToolSchema]) -> Iterator[Sequence[ChatMessage]]:
    if seen:
        yield seen
    for count in (1, 2) if tools else ():
        name = tools[0]["function"]["name"]
        yield [
            {"role": "tool", "content": "0", "name": name, "tool_call_id": f"call{number:05d}"}
            for number in range(count)
        ]
