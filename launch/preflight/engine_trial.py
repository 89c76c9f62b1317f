"""Tries whether vLLM can load the model, in a process of its own: importing vLLM takes ten seconds and much memory."""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

from actors.config import GeneratorConfig
from launch.errors import ConfigError
from launch.run_file.sections import RunConfig

TRY_S = 300.0
SHOWN_CHARS = 600


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
        done = subprocess.run(
            [sys.executable, "-m", "launch.preflight.engine_trial", str(folder), generator.model_dump_json()],
            capture_output=True,
            text=True,
            timeout=TRY_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            f"whether vLLM can load the model could not be tried: it did not come to an end within {TRY_S:g} s"
        ]
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2][:SHOWN_CHARS]
        return [f"whether vLLM can load the model could not be tried: {reason}"]
    # vLLM prints to standard output, too.
    told = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if told:
        raise ConfigError(f"model.path: {told[0]}")
    return []


MARK = "offbeat: "
"""Begins the line with the result."""


def main() -> None:
    """Print why vLLM has no way to load the model of a folder, if it has none."""
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
    try:
        described_to_vllm(vllm, described)
    except ModelNotLoaded as error:
        sys.stdout.write(f"{MARK}{error}\n")


if __name__ == "__main__":
    main()
