"""Writes a trained model as a Hugging Face folder, with the files of its tokenizer."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from learner.run_files import let_all_read

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "vocab*", "merges.txt", "*.model",
)  # fmt: skip


def save_pretrained(lm: Any, weights: Iterable[tuple[str, Tensor]], folder: Path, *, source: str) -> None:
    """Write a model as a Hugging Face folder, with the tokenizer's files.

    Args:
        lm: model of transformers, for its configuration.
        weights: whole tensors under the names of the folder; see `gathering.gathered_weights`.
        folder: is made unless it is there.
        source: Hugging Face name or folder of the model that was trained, which has the tokenizer.
    """
    state = {name: tensor.to("cpu", copy=True) for name, tensor in weights}
    folder.mkdir(parents=True, exist_ok=True)
    # The names are those of the folder already.
    lm.save_pretrained(folder, state_dict=state, save_original_format=False)
    let_all_read(folder)
    _copy_tokenizer(source, folder)


def _copy_tokenizer(source: str, folder: Path) -> None:
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        return
    for pattern in TOKENIZER_FILES:
        for path in Path(source).glob(pattern):
            if path.is_file() and path.resolve() != (folder / path.name).resolve():
                shutil.copyfile(path, folder / path.name)
