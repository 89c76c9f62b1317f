"""Random Qwen3 models of a quarter of a million parameters, and versions of them as a learner publishes."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from protocol.weights.files import write_version

VOCAB = 48
EOS = 1


def tiny_model(*, tied: bool, seed: int, intermediate: int = 192) -> Qwen3ForCausalLM:
    """A model in fp32. vLLM's CPU attention needs a head size of 32 at least."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        bos_token_id=0,
        pad_token_id=2,
        initializer_range=0.2,  # far from uniform: a wrong weight shows in every log-probability
    )
    return Qwen3ForCausalLM(config).float().eval()


def save(model: Qwen3ForCausalLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def publish(
    model: Qwen3ForCausalLM,
    root: Path,
    *,
    version: int,
    epoch: int = 0,
    run: str = "test",
    without: str = "",
    flat: str = "",
) -> Path:
    """Write the model as a version; ``without`` leaves a tensor out, ``flat`` gives one a wrong shape."""
    names = [name for name, _ in model.named_parameters() if name != without]  # named once when tied
    tensors = {name: model.get_parameter(name).detach() for name in names}
    if flat:
        tensors[flat] = tensors[flat].flatten()
    return write_version(
        root,
        run=run,
        epoch=epoch,
        version=version,
        shapes={name: ("F32", tuple(t.shape)) for name, t in tensors.items()},
        tensors=((name, memoryview(t.contiguous().numpy()).cast("B")) for name, t in tensors.items()),
    )


@torch.no_grad()
def score(model: Qwen3ForCausalLM, prompt: list[int], answer: list[int]) -> list[float]:
    """Log-probability of each token of the answer in one forward pass."""
    logits = model(torch.tensor([prompt + answer])).logits[0].float()
    logps = torch.log_softmax(logits, dim=-1)
    return [logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]


@torch.no_grad()
def greedy(model: Qwen3ForCausalLM, prompt: list[int], count: int) -> list[int]:
    """The most likely continuation, token by token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
