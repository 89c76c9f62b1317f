"""Makes tokens, with a mask of what is learnt, of an environment's solutions and of files of conversations."""

import asyncio
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from actors.errors import ActorError
from actors.render import Renderer
from envs.base import ChatMessage, Suite
from envs.errors import EnvError
from envs.messages import message_of
from envs.registry import make_suite
from envs.rows.prompts import PromptMaker, check_characters, solution_of
from envs.rows.reading import DataRow, read_rows
from launch.errors import ConfigError
from launch.run_file.sections import RunConfig
from learner.given import Conversation
from learner.settings.given import Conversations

TOKENS, MASK = "token_ids", "action_mask"
"""Columns of a row that holds tokens, as `offbeat journal export` writes them."""
MESSAGES, PROMPT = "messages", "prompt"
EXPERT = "expert"
"""Key of `StepResult.info` with the text that an expert answered."""


def renderer_of(config: RunConfig, folder: str | Path) -> Renderer:
    """Return what renders conversations with a model's tokenizer and chat template.

    Args:
        folder: folder with both.

    Raises:
        ConfigError: one of them cannot be used.
    """
    special = config.model.special_tokens_in_messages
    try:
        return Renderer(Path(folder), config.model.template_args, special_in_messages=special)
    except ActorError as error:
        raise ConfigError(f"model.path: {error}") from None


def given_of(config: RunConfig, model: str | Path) -> list[Conversation]:
    """Return the conversations of `[learner.given]` or of a family, rendered for a model; none without these tables.

    Conversations without an answer, or longer than `learner.sampling.max_trajectory_tokens`, are left out.

    Args:
        model: folder with the tokenizer and the chat template.

    Raises:
        ConfigError: there is no conversation to learn from, or a row cannot be read; the text has file and line. Or the
            file has changed since the run was started, so that a step would get other conversations.
    """
    if config.learner.conversations is None:
        return []
    name, source = config.learner.conversations
    if source.content and hash_of_file(source.file) != source.content:
        raise ConfigError(
            f"{name}.file: {source.file} has changed since the run was started, and what was trained so far had the "
            "former one; put it back, or stop the run and go on with --resume --changed"
        )
    return readable(config, renderer_of(config, model))[0]


def hash_of_file(name: str) -> str:
    """Return a hash of a file's content; "" if there is no such file, as for a data set of the hub."""
    try:
        with open(name, "rb") as file:
            return hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=8)).hexdigest()
    except OSError:
        return ""


def readable(config: RunConfig, renderer: Renderer) -> tuple[list[Conversation], list[str]]:
    """Return the conversations of the run that can be learnt from, and remarks on the others.

    Raises:
        ConfigError: as `given_of` does.
    """
    assert config.learner.conversations is not None
    name, source = config.learner.conversations
    longest = config.learner.sampling.max_trajectory_tokens
    try:
        of_file = _of_file(source.file, f"{name}.file", renderer, experts=source.experts)
        found = list(of_file if source.file else _of_environment(config, name, source, renderer))
    except (EnvError, ActorError, LookupError) as error:
        raise ConfigError(f"{name}: {error}") from None
    answered = [talk for talk in found if talk.learnt[1:].any()]
    kept = [talk for talk in answered if len(talk.token_ids) <= longest]
    remarks = []
    if too_long := len(answered) - len(kept):
        first = next(talk for talk in answered if len(talk.token_ids) > longest)
        remarks.append(
            f"{name}: {too_long} of {len(found)} conversations are left out, because they are longer than "
            f"learner.sampling.max_trajectory_tokens {longest}; {first.place} has {len(first.token_ids)} tokens"
        )
    if silent := len(found) - len(answered):
        remarks.append(f"{name}: {silent} of {len(found)} conversations are left out: they have no answer")
    if not kept:
        raise ConfigError("\n".join(remarks) or f"{name}: there are no conversations")
    return kept, remarks


def _of_environment(
    config: RunConfig, name: str, source: Conversations, renderer: Renderer
) -> Iterable[Conversation]:
    suite = make_suite(config.env.name, config.env.params)
    try:
        needs, cure = f"{name} needs solutions", f"name a file in {name}.file"
        talks = demonstrations(suite, source.tasks, needs, cure)
    finally:
        # With all roles in one process this thread has a loop, which `asyncio.run` would take away.
        loop = asyncio.new_event_loop()
        loop.run_until_complete(suite.close())
        loop.close()
    for index, talk in talks.items():
        yield _of_talk(f"training task {index}", renderer, talk)


def _of_file(name: str, field: str, renderer: Renderer, *, experts: bool) -> Iterable[Conversation]:
    rows = read_rows(name, field)
    for row in rows:
        if experts:
            if (answered := _of_expert(row, renderer)) is not None:
                yield answered
        elif TOKENS in row.values:
            yield _of_tokens(row, renderer.vocabulary)
        else:
            yield _of_talk(row.place, renderer, _talk_of(row, field))


def _conversation(place: str, ids: Sequence[int], learnt: Sequence[bool]) -> Conversation:
    mask = np.array(learnt, np.bool_)
    # Nothing comes before it, so it is predicted from nothing.
    mask[0] = False
    return Conversation(place, np.array(ids, np.int32), mask)


def _of_talk(place: str, renderer: Renderer, talk: Sequence[ChatMessage]) -> Conversation:
    """Render a conversation.

    Raises:
        EnvError: a text of it is no text, or has an end token, behind which nobody samples.
    """
    for number, message in enumerate(talk, 1):
        check_characters(place, message["content"], f"message {number}")
    made = _conversation(place, *example(renderer, talk))
    ends = np.isin(made.token_ids[made.learnt], renderer.eos_ids)
    if ends.sum() > sum(message["role"] == "assistant" for message in talk):
        end = renderer.decode([int(made.token_ids[made.learnt][ends][0])], keep_special=True)
        raise EnvError(f"{place}: an answer has the end token {end} in it; take it out, because it is added")
    return made


def _of_expert(row: DataRow, renderer: Renderer) -> Conversation | None:
    """Return an expert's answer behind the first prompt of an episode; None if nobody was asked in it.

    Raises:
        EnvError: the row is none of a journal, or the answer is no text.
    """
    extra = row.values.get("extra")
    info = extra.get("info") if isinstance(extra, Mapping) else None
    if not isinstance(info, Mapping):
        raise EnvError(
            f"{row.place}: no column 'extra' with an 'info'; take a file of `offbeat journal export`"
        )
    if EXPERT not in info:
        return None
    episode, text = _of_tokens(row, renderer.vocabulary), info[EXPERT]
    if not isinstance(text, str) or not text.strip():
        raise EnvError(f"{row.place}: the expert's answer is {text!r:.80}, which is no text")
    check_characters(row.place, text, "the expert's answer")
    prompt = episode.token_ids[: int(np.argmax(episode.learnt))].tolist() if episode.learnt.any() else []
    if not prompt:
        raise EnvError(f"{row.place}: nothing stands before the first answer")
    answer = renderer.answer(text)
    return _conversation(row.place, [*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


def _of_tokens(row: DataRow, vocabulary: int) -> Conversation:
    ids, mask = row.values[TOKENS], row.values.get(MASK)
    if (
        not isinstance(ids, list)
        or not isinstance(mask, list)
        or not 0 < len(ids) == len(mask)
        or not all(type(token) is int and 0 <= token < 2**31 for token in ids)
        or not all(acts in (False, True) for acts in mask)
    ):
        raise EnvError(
            f"{row.place}: {TOKENS} and {MASK} have to be two equally long lists, of token ids and of true or false"
        )
    if (largest := max(ids)) >= vocabulary:
        raise EnvError(
            f"{row.place}: the model has no token {largest}, only {vocabulary}; take the tokens of a run of this model"
        )
    if row.values.get("complete") is False or row.values.get("offset"):
        raise EnvError(f"{row.place}: the trajectory is not whole; leave it out")
    return _conversation(row.place, ids, mask)


def _talk_of(row: DataRow, field: str) -> list[ChatMessage]:
    """Return the conversation of a row: its messages, or its prompt and its answer."""
    if MESSAGES not in row.values:
        if PROMPT not in row.values:
            has = ", ".join(map(str, row.values))
            raise EnvError(f"{row.place}: no column {MESSAGES!r}, {PROMPT!r} or {TOKENS!r} (columns: {has})")
        prompt = PromptMaker(PROMPT, "", list(row.values), field).messages(row)
        return [*prompt, {"role": "assistant", "content": solution_of(row)}]
    messages = row.values[MESSAGES]
    if not isinstance(messages, list) or not messages:
        raise EnvError(f"{row.place}: {MESSAGES!r} has to be a list of messages")
    try:
        talk = [message_of(message, whole=True) for message in messages]
    except EnvError as error:
        raise EnvError(f"{row.place}: {error}") from None
    if any(message.get("tool_calls") for message in talk):
        raise EnvError(
            f"{row.place}: a message has tool_calls, whose text only a chat template knows; write the call into the "
            "content as the model writes it, or take tokens from `offbeat journal export`"
        )
    if talk[0]["role"] == "assistant" or talk[-1]["role"] != "assistant":
        raise EnvError(f"{row.place}: {MESSAGES!r} has to begin with a question and end with an answer")
    return talk


def demonstrations(
    suite: Suite,
    count: int,
    who: str = "[model.tiny.warm_start] needs solutions",
    cure: str = "set model.path",
) -> dict[int, list[ChatMessage]]:
    """Return the solutions of the first ``count`` training tasks by their numbers, each solution once.

    A suite may answer one question in many ways, for example with random walks. All of them are kept.

    Args:
        who: who needs them, and ``cure`` what to do if there are none, for the error.

    Raises:
        ConfigError: the suite gives no solutions.
    """
    talks: dict[tuple[str, ...], tuple[int, list[ChatMessage]]] = {}
    for index in range(count):
        try:
            talk = suite.demonstration(index, "train")
        except LookupError as error:
            raise ConfigError(f"{who}, but: {error}; {cure}") from None
        talks[tuple(message["content"] for message in talk)] = index, talk
    return dict(talks.values())


def example(
    renderer: Renderer, talk: Sequence[ChatMessage], unlearnt: Collection[int] = ()
) -> tuple[list[int], list[bool]]:
    """Return a conversation's token ids, and for each whether the assistant wrote it (end tokens included).

    The ids are built as an actor builds a trajectory: the prompt, then actions and observations in turn.

    Args:
        unlearnt: places of messages of the assistant that are not to be learnt.
    """
    opening = opening_of(talk)
    ids = renderer.prompt(talk[:opening])
    learnt = [False] * len(ids)
    numbered = enumerate(talk[opening:], start=opening)
    for by_assistant, turn in groupby(numbered, key=lambda pair: pair[1]["role"] == "assistant"):
        if by_assistant:
            for place, message in turn:
                added = [*renderer.encode(message["content"]), renderer.eos_ids[0]]
                ids += added
                learnt += [place not in unlearnt] * len(added)
        else:
            added = renderer.observation([message for _, message in turn], ids)
            ids += added
            learnt += [False] * len(added)
    return ids, learnt


def opening_of(talk: Sequence[ChatMessage]) -> int:
    """Return the number of messages before the first answer."""
    return next(i for i, message in enumerate(talk) if message["role"] == "assistant")
