"""Random Qwen3 models of a quarter of a million parameters, published as versions like a learner's."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from protocol.weights.files import write_version

VOCAB = 48
EOS = 1


def tiny_model(*, tied: bool, seed: int, intermediate: int = 192) -> Qwen3ForCausalLM:
    """Return a model in float32 with a head size of 32, the least that vLLM's CPU attention needs."""
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
        # The policy is far from uniform, so a wrong weight shows in every log-probability.
        initializer_range=0.2,
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
    # Tied weights have one name only.
    names = [name for name, _ in model.named_parameters() if name != without]
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
    """Return the log-probability of each token of the answer, from one forward pass."""
    logits = model(torch.tensor([prompt + answer])).logits[0].float()
    logps = torch.log_softmax(logits, dim=-1)
    return [logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]


@torch.no_grad()
def greedy(model: Qwen3ForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Return the most likely continuation, decoded token by token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]
