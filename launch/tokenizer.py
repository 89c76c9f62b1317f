"""A small tokenizer for tiny models: one token per character, plus tokens for text that all questions repeat.

Single characters keep spelling and digits visible to a model of a million parameters. The text that all
questions begin with becomes one token, and so does each word that nearly all questions contain. This makes
prompts several times shorter.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

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


def make_tokenizer(questions: Sequence[str]) -> Tokenizer:
    """Return a tokenizer whose decoding is plain concatenation, hence lossless on printable ASCII.

    A template word counts as one token only where a space or punctuation follows, so that the same letters
    inside a longer word, or as an answer, are spelled out.
    """
    opening = common_opening(questions)
    words = template_words([question[len(opening) :] for question in questions])
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
