"""The run file on the page docs/run/gpus.md passes `offbeat check` on such GPUs, which prints what the page shows."""

import json
import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pytest

import launch.placement
from launch.cli import main
from launch.model import make_tokenizer, save_tokenizer
from launch.preflight import examine, hardware
from launch.preflight.memory import Gpu

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "run" / "gpus.md").read_text().partition("## Layouts for 1, 2 and 8 GPUs")[2]
H100 = Gpu("NVIDIA H100 80GB HBM3", 85.0, 84.0)
HOST_GB = 1000.0
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_position_embeddings": 40_960}
SIZES = {
    "1.7B": (3_441_500_000, {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}, 16),
    "8B": (16_381_470_720, {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}, 32),
}
"""Bytes of the weights in bfloat16, sizes, and attention heads."""
Usage = namedtuple("Usage", "total used free")


def block(language, nth):
    """Return the n-th block of the section in a language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for kind, text in blocks if kind == language][nth]


def without_lengths(text):
    """Return the run file of the page without what is set for eight GPUs."""
    return re.sub(r"\[generator\].*", "", text, flags=re.DOTALL)


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """Return a function that checks a run file for a model on a number of GPUs, and returns what is said of these."""

    def check(text, size, count, *overrides):
        nbytes, shape, heads = SIZES[size]
        model = tmp_path / "model"
        save_tokenizer(make_tokenizer(["What is 17 + 25? 0346789"]), model, max_length=40_960)
        described = QWEN3 | shape | {"num_attention_heads": heads, "torch_dtype": "bfloat16"}
        (model / "config.json").write_text(json.dumps(described))
        index = {"metadata": {"total_size": nbytes}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        (tmp_path / "train.jsonl").write_text('{"prompt": "What is 17 + 25?", "answer": "42"}\n' * 64)
        (tmp_path / "rewards.py").write_text("def exact(answer, row):\n    return answer == row['answer']\n")
        (tmp_path / "run.toml").write_text(text)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
        monkeypatch.setattr(launch.placement, "torch_uses_gpus", lambda: True)
        monkeypatch.setattr(hardware, "try_gpus", lambda there: [H100] * there)
        monkeypatch.setattr(examine, "host_gb", lambda: HOST_GB)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**12))
        assert main(["check", "run.toml", f"model.path={model}", *overrides]) == 0
        said = [line.removeprefix("run.toml: note: ") for line in "".join(capsys.readouterr()).splitlines()]
        assert [line for line in said if "may take" in line or "for the KV cache;" in line] == [], "tight"
        return "".join(
            f"{line}\n" for line in said if line.startswith(("GPUs: ", "learner: ", "generators: "))
        )

    return check


@pytest.mark.parametrize(
    ("nth", "count", "overrides"), [(0, 1, ()), (1, 1, ("run.mode=sync",)), (2, 2, ())], ids=str
)
def test_one_and_two_gpus(checked, nth, count, overrides):
    assert checked(without_lengths(block("toml", 0)), "1.7B", count, *overrides) == block("", nth)


def test_eight_gpus(checked):
    assert checked(block("toml", 0), "8B", 8) == block("", 3)
