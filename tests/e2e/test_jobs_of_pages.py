"""The jobs of the pages train: their files as they stand, with a tiny model and one short step."""

import json
import sys
from pathlib import Path

import pytest

from tests.integration.pages.test_pages_run import model_of_pages
from tests.pages import CODE, ROOT, PageRun, blocks

pytestmark = pytest.mark.timeout(900)
PAGES = ("docs/run/rows.md", "docs/run/tools.md", "docs/run/agents.md")
SHORT = (
    "generator.max_model_len=4096", "generator.kv_cache_mb=64", "generator.max_num_seqs=16",
    "learner.steps=1", "learner.batch_trajectories=4", "learner.group_size=2", "learner.evaluation_tasks=2",
    "learner.filter_uniform_groups=false", "learner.sampling.max_turn_tokens=8",
    "learner.sampling.max_trajectory_tokens=4096", "actor.count=1", "actor.concurrent_episodes=4", "actor.max_turns=2",
    "learner.micro_batch_tokens=4096",
)  # fmt: skip
"""Overrides for a short job. Untrained models answer junk, so groups with equal rewards are trained, too."""


def trainable_model(folder: Path) -> Path:
    """Make a random Qwen3 of 50,000 parameters, with a tokenizer of bytes and the template of Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model_of_pages(folder)
    vocabulary = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]) + 2
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=32_768, tie_word_embeddings=True,
        eos_token_id=vocabulary - 1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_the_job_of_a_page_trains(page, tmp_path, monkeypatch):
    folder = tmp_path / "page"
    folder.mkdir()
    model = trainable_model(tmp_path / "model")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.chdir(folder)
    run = PageRun(folder, (f"model.path={model}", *SHORT), train=True)
    print(f"{page}: the train command runs with {' '.join(SHORT)}")
    for block in blocks(ROOT / page):
        if block.language in CODE and not block.reason:
            run.run(block)
        if "offbeat train" in block.text:
            break
    (summary,) = folder.glob("runs/*/summary.json")
    told = json.loads(summary.read_text())
    assert told["steps"] == 1
    assert told["episodes"]["failed"] == 0, told["episodes"]


@pytest.mark.soak
@pytest.mark.timeout(20_000)
def test_the_job_of_the_readme_learns(tmp_path, monkeypatch):
    """Trains as it stands, with SmolLM2: a quarter of the sums is right at first, and more than half at the end.

    It took a quarter of an hour on two quiet cores, and has five hours.
    """
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    run = PageRun(tmp_path, train=True, timeout_s=18_000)
    for block in blocks(ROOT / "README.md"):
        if block.language in CODE and not block.reason:
            run.run(block)
        if "offbeat train" in block.text:
            break
    (summary,) = tmp_path.glob("runs/*/summary.json")
    accuracy = json.loads(summary.read_text())["accuracy"]
    assert accuracy["after"] > max(0.5, accuracy["before"] + 0.2)
