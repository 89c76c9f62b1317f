"""A tiny model is made for a tokenizer and learns the form of the answers."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.model import make_tokenizer, save_tokenizer
from learner.warmstart import make_tiny_model, share_solved, warm_start


@pytest.fixture
def folder(tmp_path):
    save_tokenizer(make_tokenizer(["Repeat: a", "Repeat: b"]), tmp_path, max_length=64)
    files = [tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"]
    make_tiny_model(tmp_path, files, hidden_size=64, layers=2, heads=2, intermediate_size=96, seed=1)
    return tmp_path


def make_examples(count, seed):
    """Return examples of three letters and then the first again; only the last token is to be learnt."""
    letters = np.random.default_rng(seed).integers(20, 24, (count, 3)).tolist()
    return [([1, *row, row[0]], [False, False, False, False, True]) for row in letters]


def test_model_fits_the_tokenizer_and_making_it_is_repeatable(folder, tmp_path_factory):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.eos_token_id is not None
    assert model.config.pad_token_id is not None
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    again = tmp_path_factory.mktemp("again")
    files = [folder / "tokenizer.json", folder / "tokenizer_config.json"]
    state = torch.get_rng_state()
    make_tiny_model(again, files, hidden_size=64, layers=2, heads=2, intermediate_size=96, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_warm_start_learns_in_place_and_stops_when_good_enough(folder):
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    held = make_examples(32, seed=9)
    progress = warm_start(
        folder, make_examples(64, seed=1), steps=200, batch=16, lr=5e-3, seed=0, validation=held, stop_at=0.9
    )
    assert progress.solved >= 0.9
    assert progress.steps < 200
    assert progress.losses[-1] < progress.losses[0] / 2
    after = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert share_solved(after, held) == progress.solved
    assert share_solved(before, held) < 0.5


def test_only_tokens_to_be_learnt_count(folder):
    """The loss of the first step is the last token's alone, because all others are masked."""
    examples = make_examples(8, seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([ids for ids, _ in examples])
    with torch.no_grad():
        logp = model(input_ids=ids[:, :-1]).logits[:, -1].log_softmax(-1)
    expected = -logp.gather(1, ids[:, -1:]).mean().item()
    progress = warm_start(folder, examples, steps=1, batch=8, lr=1e-3, seed=0)
    assert progress.losses == [pytest.approx(expected, rel=1e-5)]


def test_refusals(folder):
    with pytest.raises(ValueError, match="at least one example"):
        warm_start(folder, [], steps=1, batch=1, lr=1e-3, seed=0)
    with pytest.raises(ValueError, match="lower lr"):
        warm_start(folder, make_examples(8, 0), steps=20, batch=8, lr=1e30, seed=0)
