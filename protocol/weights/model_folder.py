"""The tensors of a Hugging Face model folder that a policy version replaces."""

import json
from pathlib import Path

from protocol.errors import WeightsError
from protocol.weights.format import Shapes, read_shapes

HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
DERIVED = "rotary_emb.inv_freq"
"""Ending of tensors that follow from config.json; older folders hold them."""
QUANTISED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8")
"""Types of quantised weights, which cannot be trained."""


def replaced_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return ``name -> (safetensors dtype, shape)`` of the tensors that every policy version has to hold.

    An output layer that shares the embeddings' weight is left out, and so is what follows from config.json, because
    neither is trained by itself.

    Raises:
        WeightsError: there are no tensors, or they are quantised. The message says what to do.
    """
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        shapes |= read_shapes(file)
    if not shapes:
        raise WeightsError(f"{folder}: no *.safetensors; save the model with safe_serialization")
    if quantised := sorted(name for name, (dtype, _) in shapes.items() if dtype in QUANTISED):
        raise WeightsError(
            f"{folder}: {quantised[0]} is {shapes[quantised[0]][0]} ({len(quantised)} tensors are quantised); such "
            "weights cannot be trained, so take the model's bfloat16 version"
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tied = config.get("tie_word_embeddings", False) and any(name.endswith(EMBEDDINGS) for name in shapes)
    return {
        name: shape
        for name, shape in shapes.items()
        if not name.endswith(DERIVED) and not (tied and name.endswith(HEAD))
    }


def check_names(published: Shapes, folder: Path) -> None:
    """Check that versions with these tensors can replace those of a model folder.

    Args:
        published: ``name -> (dtype, shape)`` of what a learner would publish.

    Raises:
        WeightsError: a name or a shape differs; no generator would take such a version.
    """
    wanted = replaced_shapes(folder)
    missing, unknown = sorted(wanted.keys() - published.keys()), sorted(published.keys() - wanted.keys())
    wrong = sorted(name for name in wanted.keys() & published.keys() if wanted[name][1] != published[name][1])
    for names, what in (
        (missing, "is in the folder, but not in the model that transformers makes of it"),
        (unknown, "is in the model that transformers makes of it, but not in the folder"),
        (wrong, "has another shape in the model that transformers makes of it"),
    ):
        if names:
            raise WeightsError(
                f"{folder}: {names[0]} {what} ({len(names)} in all), so no generator would take a trained version; "
                "load the model with transformers' AutoModelForCausalLM, save it with save_pretrained, and name that "
                "folder"
            )
