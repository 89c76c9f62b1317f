"""Compares the prompts of the tried tasks with the room for them and for an answer. Pure."""

from collections.abc import Iterator, Sequence

from launch.preflight.trial import Prompt
from launch.run_file.sections import RunConfig


def no_room(config: RunConfig, prompts: Sequence[Prompt], context: int | None) -> Iterator[str]:
    """Yield the refusal of prompts that leave no room for an answer; the longest is named."""
    sampling = config.learner.sampling
    most, longest = sampling.context_tokens, max(prompts, key=lambda p: p.tokens, default=None)
    if longest is None or longest.tokens < most:
        return
    needed = longest.tokens + sampling.max_turn_tokens
    others = [
        f"{field} (now {value})"
        for field, value in (
            ("generator.max_model_len", config.generator.max_model_len),
            ("learner.micro_batch_tokens", config.learner.micro_batch_tokens),
        )
        if value < needed
    ]
    where = f"{longest.task} has {longest.tokens} tokens"
    if context is not None and needed > context:
        yield f"{where}, and an answer needs {sampling.max_turn_tokens}, but the model takes {context}; shorten it"
        return
    yield (
        f"learner.sampling.{sampling.context_setting} is {most}, prompt included, but {where}, which leaves no room "
        f"for an answer; raise it{''.join(f' and {other}' for other in others)} to at least {needed}"
    )


def cut_answers(config: RunConfig, prompts: Sequence[Prompt]) -> Iterator[str]:
    """Yield a remark if prompts leave less room than the longest answer may take."""
    sampling = config.learner.sampling
    room = sampling.context_tokens - sampling.max_turn_tokens
    tight = [prompt for prompt in prompts if prompt.tokens > room]
    if tight:
        longest = max(tight, key=lambda prompt: prompt.tokens)
        yield (
            f"{longest.task} has {longest.tokens} tokens, so its answer is cut after "
            f"{sampling.context_tokens - longest.tokens} tokens, not after max_turn_tokens = "
            f"{sampling.max_turn_tokens}; learner.sampling.{sampling.context_setting} = "
            f"{longest.tokens + sampling.max_turn_tokens} would avoid that"
        )
