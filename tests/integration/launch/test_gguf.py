"""Test that a GGUF file becomes a model folder with the weights, the tokenizer and the chat template of the file."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.render import Renderer
from launch.errors import ConfigError
from launch.model import existing
from launch.run_file.load import context_of, read_description
from launch.run_file.sections import ModelSection

WIDTH, INNER, HEADS, CONTEXT = 32, 64, 2, 128
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
BYTES = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))] + [
    chr(256 + i) for i in range(68)
]
TOKENS = ["<|end|>", *BYTES, "to"]
"""The end token, the 256 letters that stand for bytes in a byte-level tokenizer, and one merged token."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Return a Llama model of one layer, written by the library of llama.cpp."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(TOKENS) - 1)])
    writer.add_token_merges(["t o"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    for name, shape in {
        "token_embd.weight": (len(TOKENS), WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        **{f"blk.0.attn_{part}.weight": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (INNER, WIDTH),
        "blk.0.ffn_up.weight": (INNER, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, INNER),
    }.items():
        writer.add_tensor(name, random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_a_model_folder_once(file, tmp_path):
    section = ModelSection(path=str(file), cache=tmp_path)
    folder = existing(section)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert existing(section) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made, "the second time it is there"
    assert context_of(read_description(folder)) == CONTEXT
    renderer = Renderer(folder)
    prompt = renderer.prompt([{"role": "user", "content": "hello"}])
    assert renderer.decode(prompt) == "user:hello"
    assert renderer.eos_ids == (0,)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert not hasattr(model.config, "quantization_config")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    down = model.model.layers[0].mlp.down_proj.weight
    assert torch.equal(down, torch.tensor(stored["blk.0.ffn_down.weight"]))


def test_a_file_that_is_no_gguf_is_refused_with_the_reason_and_leaves_nothing(tmp_path):
    file = tmp_path / "no.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(ConfigError, match=r"no.gguf: cannot be converted: .*"):
        existing(ModelSection(path=str(file), cache=tmp_path / "cache"))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
