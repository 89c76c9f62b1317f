"""What the config.json of a model says about the model: the longest sequence that it allows."""

import json
import math
from pathlib import Path
from typing import Any

from launch.errors import ConfigError

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
"""Keys of config.json that may hold the longest sequence of a model."""
ALREADY_SCALED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Kinds of rotary embedding whose `factor` does not lengthen the context that config.json states."""


def read_description(folder: Path) -> dict[str, Any]:
    """Return the content of a model's config.json.

    Raises:
        ConfigError: there is no config.json, or it is not a JSON object.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path}: {error}; a model folder has one") from None
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {path}: expected an object, found {type(content).__name__}")
    return content


def context_of(content: dict[str, Any]) -> int | None:
    """Return the longest sequence that the content of a config.json allows, scaling included.

    Example:
        >>> context_of({"max_position_embeddings": 2048})
        2048
        >>> context_of({"n_positions": 1024, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
        4096
        >>> context_of({"text_config": {"max_position_embeddings": 512}}), context_of({})
        (512, None)
    """
    for part in (content.get("text_config"), content):
        if not isinstance(part, dict):
            continue
        stated = [part[key] for key in CONTEXT_KEYS if type(part.get(key)) is int and part[key] > 0]
        if stated:
            return int(max(stated) * _stretch(part.get("rope_scaling") or part.get("rope_parameters")))
    return None


def _stretch(rope: Any) -> float:
    if not isinstance(rope, dict):
        return 1.0
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor")
    if kind in ALREADY_SCALED or isinstance(factor, bool) or not isinstance(factor, int | float):
        return 1.0
    return factor if 0 < factor < math.inf else 1.0


def fitted(data: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return a run file's content with a `generator.max_model_len` that its model allows, if the file leaves it out.

    The model has to be a folder of this host. The model of a hub, or of another host, is held against the setting when
    the run starts; see `launch.preflight.model_limits`.

    Args:
        data: content of the run file, not checked yet.
        longest: `generator.max_model_len` of a model with no smaller limit, in tokens.

    Example:
        >>> fitted({"model": {"path": "no such folder"}}, 1024)
        {'model': {'path': 'no such folder'}}
    """
    generator, model = data.get("generator", {}), data.get("model", {})
    path = model.get("path") if isinstance(model, dict) else None
    # Values of a wrong type are reported by the fields themselves.
    if (
        not isinstance(generator, dict)
        or "max_model_len" in generator
        or not isinstance(path, str)
        or not path
    ):
        return data
    try:
        context = context_of(read_description(Path(path)))
    except ConfigError:
        return data
    if context is None or context >= longest:
        return data
    return {**data, "generator": {**generator, "max_model_len": context}}
