"""Test which tensors of a model folder a policy version has to hold."""

import json

import pytest

from protocol.errors import WeightsError
from protocol.weights.format import check_names, layout, replaced_shapes

EMBEDDINGS = {"model.embed_tokens.weight": ("F32", (4, 2))}
HEAD = {"lm_head.weight": ("F32", (4, 2))}


def folder_with(tmp_path, shapes, **config):
    header, _ = layout(shapes)
    (tmp_path / "model.safetensors").write_bytes(header)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(("tied", "names"), [(True, EMBEDDINGS), (False, EMBEDDINGS | HEAD)])
def test_a_head_that_shares_the_embeddings_is_not_replaced(tmp_path, tied, names):
    folder = folder_with(tmp_path, EMBEDDINGS | HEAD, tie_word_embeddings=tied)
    assert replaced_shapes(folder) == names
    check_names(names, folder)


def test_what_follows_from_the_configuration_is_not_replaced(tmp_path):
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (2,))}
    assert replaced_shapes(folder_with(tmp_path, EMBEDDINGS | derived)) == EMBEDDINGS


def test_quantised_weights_are_refused(tmp_path):
    folder = folder_with(tmp_path, EMBEDDINGS)
    header = json.dumps({"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "more.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(WeightsError, match=r"w is F8_E4M3 \(1 tensors are quantised\).* bfloat16 version"):
        replaced_shapes(folder)


@pytest.mark.parametrize(
    ("published", "words"),
    [
        ({}, "model.embed_tokens.weight is in the folder, but not"),
        (EMBEDDINGS | {"more": ("F32", (1,))}, "more is in the model .* but not in the folder"),
        ({"model.embed_tokens.weight": ("F32", (2, 4))}, "has another shape"),
    ],
)
def test_what_no_generator_would_take_is_named_with_the_cure(tmp_path, published, words):
    with pytest.raises(WeightsError, match=words) as caught:
        check_names(published, folder_with(tmp_path, EMBEDDINGS))
    assert "save it with save_pretrained" in str(caught.value)


def test_another_float_type_is_no_difference(tmp_path):
    check_names({"model.embed_tokens.weight": ("BF16", (4, 2))}, folder_with(tmp_path, EMBEDDINGS))
