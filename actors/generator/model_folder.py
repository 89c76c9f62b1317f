"""Reads the facts that a generator needs from a Hugging Face model folder, without transformers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.errors import WeightsError
from protocol.weights.model_folder import replaced_shapes


@dataclass(frozen=True)
class ModelFacts:
    """Vocabulary size, end-of-sequence ids, and ``name -> (dtype, shape)`` of every tensor that a version
    replaces."""

    vocab_size: int
    eos_ids: list[int]
    shapes: dict[str, tuple[str, tuple[int, ...]]]


def read_model_facts(folder: Path) -> ModelFacts:
    """Return the facts of the model in ``folder``.

    Raises:
        FileNotFoundError: there is no config.json. The message says what to do.
        WeightsError: the vocabulary size or the tensors are missing, or quantised. The message says what to do.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: no config.json; give a Hugging Face model folder")
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    if "vocab_size" not in text:
        raise WeightsError(f"{folder}/config.json: no vocab_size; is this a causal language model?")
    return ModelFacts(int(text["vocab_size"]), _eos_ids(folder, text), replaced_shapes(folder))


def _eos_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    # Several files may give it. The one meant for generation comes first, as in transformers.
    for eos in (_read(folder / "generation_config.json").get("eos_token_id"), config.get("eos_token_id")):
        if eos is not None:
            return [int(i) for i in (eos if isinstance(eos, list) else [eos])]
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _read(folder / "tokenizer.json").get("added_tokens", [])
    return [int(entry["id"]) for entry in added if text is not None and entry["content"] == text]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}
