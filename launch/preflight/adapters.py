"""Tries whether a model can have the adapters of `[learner.lora]`, before anything starts.

The layers' names and sizes follow from the model's config.json, so the weights need not be there.
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

from launch.errors import ConfigError
from launch.run_file.sections import RunConfig
from learner.settings.learner import LoraConfig

TRY_S = 300.0
SHOWN_CHARS = 600


def try_adapters(config: RunConfig, folder: Path | None) -> list[str]:
    """Return remarks on the run's adapters: that they could not be tried, if so; the learner tries them in any case.

    A process of its own makes the model, because the caller may live as long as the run and must not keep the memory
    of torch.

    Args:
        folder: folder with the model's config.json; None for a tiny model that is not made yet.

    Raises:
        ConfigError: the model cannot have these adapters, or PEFT is not installed.
    """
    lora = config.learner.lora
    # An evaluation trains nothing, and its model need not be the one of the adapters.
    if lora is None or not config.learner.steps:
        return []
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "[learner.lora] needs the package peft, which is not installed: pip install 'offbeat[learner,lora]'"
        )
    if folder is None:
        return []
    done = subprocess.run(
        [sys.executable, "-m", "launch.preflight.adapters", str(folder), lora.model_dump_json()],
        capture_output=True,
        text=True,
        timeout=TRY_S,
        check=False,
    )
    if done.returncode != 0:
        # The last line of a traceback says what went wrong. Some models cannot be made without weights.
        reason = done.stderr.strip().rpartition("\n")[2][:SHOWN_CHARS]
        return [f"[learner.lora] could not be tried before the learner tries it: {reason}"]
    if problem := done.stdout.strip():
        raise ConfigError(problem)
    return []


def problem_of(folder: Path, lora: LoraConfig) -> str:
    """Return why the model of a folder cannot have these adapters, or ""."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from learner.errors import LoraError
    from learner.update.lora import chosen_layers

    # On this device a tensor has a shape and no content.
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    lm.tie_weights()
    try:
        chosen_layers(lm, lora)
    except LoraError as error:
        return str(error)
    return ""


def main() -> None:
    """Print why the model of a folder cannot have these adapters, if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m launch.preflight.adapters", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "lora", type=LoraConfig.model_validate_json, help="content of [learner.lora], as JSON"
    )
    arguments = parser.parse_args()
    sys.stdout.write(problem_of(arguments.folder, arguments.lora))


if __name__ == "__main__":
    main()
