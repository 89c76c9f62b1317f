"""Test what a generator reads in a model folder."""

import json

import pytest

from actors.generator.engine import read_model_facts
from protocol.errors import WeightsError
from protocol.weights.format import layout


def folder_with(tmp_path, **files):
    header, _ = layout({"w": ("F32", (2, 2))})
    (tmp_path / "model.safetensors").write_bytes(header + bytes(16))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50} | files.pop("config", {})))
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"generation_config": {"eos_token_id": [4, 5]}, "config": {"eos_token_id": 3}}, [4, 5]),
        ({"generation_config": {}, "config": {"eos_token_id": 3}}, [3]),
        ({"config": {"eos_token_id": 0}}, [0]),
        (
            {
                "tokenizer_config": {"eos_token": "<e>"},
                "tokenizer": {"added_tokens": [{"id": 7, "content": "<e>"}]},
            },
            [7],
        ),
        (
            {
                "tokenizer_config": {"eos_token": {"content": "<e>"}},
                "tokenizer": {"added_tokens": [{"id": 7, "content": "<e>"}, {"id": 8, "content": "<f>"}]},
            },
            [7],
        ),
        ({}, []),
    ],
)
def test_end_tokens_are_found_where_hugging_face_keeps_them(tmp_path, files, eos):
    facts = read_model_facts(folder_with(tmp_path, **files))
    assert facts.eos_ids == eos
    assert facts.vocab_size == 50
    assert facts.shapes == {"w": ("F32", (2, 2))}


def test_tensors_of_several_files_are_put_together(tmp_path):
    header, _ = layout({"v": ("BF16", (3,))})
    (folder_with(tmp_path) / "model-00002.safetensors").write_bytes(header + bytes(6))
    assert read_model_facts(tmp_path).shapes == {"w": ("F32", (2, 2)), "v": ("BF16", (3,))}


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config"):
        read_model_facts(tmp_path)
    (folder_with(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="safetensors"):
        read_model_facts(tmp_path)
