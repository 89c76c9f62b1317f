"""The models of `benchmarks.generation`: random ones of about 1, 10 and 50 million parameters, and SmolLM2."""

from pathlib import Path
from typing import Any

from benchmarks.envs.random_prompt import LETTERS

PRETRAINED = "smollm2"
"""SmolLM2-135M-Instruct with its own tokenizer and chat template, see `offbeat model`."""
SIZES: dict[str, dict[str, Any]] = {
    "1M": {"hidden_size": 160, "intermediate_size": 448, "layers": 4, "heads": 4, "head_dim": 32},
    "10M": {"hidden_size": 384, "intermediate_size": 1024, "layers": 6, "heads": 6, "head_dim": 64},
    "50M": {"hidden_size": 768, "intermediate_size": 2048, "layers": 7, "heads": 12, "head_dim": 64},
}


def model_folder(size: str, folder: Path) -> Path:
    """Return the folder of a model: a random one, which is made in ``folder``, or the pretrained one."""
    from launch.model import existing
    from launch.run_file.sections import ModelSection

    if size == PRETRAINED:
        return existing(ModelSection(path=PRETRAINED))
    make_model(size, folder)
    return folder


def make_model(size: str, folder: Path) -> int:
    """Write a random Qwen3 model of this size and a tokenizer of single characters.

    Returns:
        The number of its parameters.
    """
    from safetensors import safe_open

    from launch.model import make_tokenizer, save_tokenizer
    from learner.warmstart import make_tiny_model

    save_tokenizer(make_tokenizer(list(LETTERS)), folder, max_length=1024)
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    make_tiny_model(folder, files, max_positions=1024, tied=False, **SIZES[size])
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        return sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 (no mapping)
