"""Test the tiny models' own tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from launch.model import make_tokenizer, save_tokenizer

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
