"""Random Qwen3 models of about 1, 10 and 50 million parameters, with a tokenizer of single characters."""

from pathlib import Path
from typing import Any

from benchmarks.envs.random_prompt import LETTERS

SIZES: dict[str, dict[str, Any]] = {
    "1M": {"hidden_size": 160, "intermediate_size": 448, "layers": 4, "heads": 4, "head_dim": 32},
    "10M": {"hidden_size": 384, "intermediate_size": 1024, "layers": 6, "heads": 6, "head_dim": 64},
    "50M": {"hidden_size": 768, "intermediate_size": 2048, "layers": 7, "heads": 12, "head_dim": 64},
}


def make_model(size: str, folder: Path) -> int:
    """Write a model of this size and its tokenizer. Return the number of its parameters."""
    from safetensors import safe_open

    from launch.tokenizer import make_tokenizer, save_tokenizer
    from learner.warmstart import make_tiny_model

    save_tokenizer(make_tokenizer(list(LETTERS)), folder, max_length=1024)
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    make_tiny_model(folder, files, max_positions=1024, tied=False, **SIZES[size])
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        return sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 (no mapping)
