"""Turns GGUF files into model folders, which generators and learners load.

A GGUF file holds weights, tokenizer and chat template, mostly quantized for llama.cpp. The learner trains
ordinary weights, so the file is dequantized once and kept as a folder in Hugging Face format.
"""

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from launch.errors import ConfigError

SUFFIX = ".gguf"
PACKAGES = ("torch", "transformers", "gguf", "accelerate")
"""Packages that the conversion needs."""
CONVERT_S = 1800.0
SHOWN_CHARS = 600


def is_gguf(path: str) -> bool:
    """Return whether a `model.path` names a GGUF file.

    Example:
        >>> is_gguf("models/SmolLM2.Q4_1.GGUF"), is_gguf("Qwen/Qwen3-0.6B")
        (True, False)
    """
    return path.lower().endswith(SUFFIX)


def kept_folder(file: Path, cache: Path) -> Path:
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


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder, whole or not at all.

    A process of its own does the work, because the caller may live as long as the run and must not keep the
    memory of torch. The caller holds a lock if several processes may convert the file at the same time.

    Raises:
        ConfigError: a package is missing, or transformers cannot read the file; the text ends with the reason.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"model.path {file}: GGUF files need the packages {', '.join(missing)}: "
            "pip install 'offbeat[learner,gguf]'"
        )
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "launch.gguf", str(file), str(partial)],
        capture_output=True,
        text=True,
        timeout=CONVERT_S,
        check=False,
    )
    if done.returncode != 0:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"model.path {file}: cannot be converted: {done.stderr.strip()[-SHOWN_CHARS:]}")
    partial.rename(folder)


def write_folder(file: Path, folder: Path) -> None:
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
    parser = argparse.ArgumentParser(prog="python -m launch.gguf", description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_folder(arguments.file, arguments.folder)


if __name__ == "__main__":
    main()
