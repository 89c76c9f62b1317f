"""Tries whether vLLM can load the model, in a process of its own: importing vLLM takes ten seconds and much memory."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

from actors.config import GeneratorConfig
from launch.errors import ConfigError
from launch.preflight.trial_process import NoAnswer, ask
from launch.run_file.sections import RunConfig


def try_engine(config: RunConfig, folder: Path | None) -> list[str]:
    """Return remarks on the engine: that the model could not be tried, if so.

    `offbeat check` alone calls this, because a generator tries the same at its start.

    Args:
        folder: folder with the model's config.json; None for a tiny model that is not made yet.

    Raises:
        ConfigError: vLLM has no way to load the model.
    """
    generator = config.generator
    if generator.backend != "vllm" or folder is None or not generator.count:
        return []
    if importlib.util.find_spec("vllm") is None:
        return ["vLLM is not installed on this host, so whether it can load the model was not tried"]
    try:
        found = ask("launch.preflight.engine_trial", str(folder), generator.model_dump_json())
    except NoAnswer as error:
        return [f"whether vLLM can load the model could not be tried: {error}"]
    if found.wrong:
        raise ConfigError(f"model.path: {found.wrong[0]}")
    return []


def main() -> None:
    """Write why vLLM has no way to load the model of a folder, if it has none."""
    from actors.errors import ModelNotLoaded
    from actors.generator.vllm_engine.engine import (
        described_to_vllm,
        engine_arguments,
        import_vllm,
        prepare_environment,
    )
    from actors.generator.vllm_engine.routes import allow_on_cpu

    parser = argparse.ArgumentParser(prog="python -m launch.preflight.engine_trial", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("generator", type=GeneratorConfig.model_validate_json, help="[generator], as JSON")
    arguments = parser.parse_args()
    config: GeneratorConfig = arguments.generator
    prepare_environment(config)
    vllm = import_vllm()
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    described = engine_arguments(config, model=str(arguments.folder), seed=0, cpu=current_platform.is_cpu())
    described["weight_transfer_config"] = WeightTransferConfig(**described["weight_transfer_config"])
    allow_on_cpu()
    wrong = []
    try:
        described_to_vllm(vllm, described)
    except ModelNotLoaded as error:
        wrong.append(str(error))
    sys.stdout.write("\n" + json.dumps({"wrong": wrong, "remarks": []}) + "\n")


if __name__ == "__main__":
    main()
