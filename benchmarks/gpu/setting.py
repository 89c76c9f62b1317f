"""Setting of every step of `benchmarks.gpu`: device, sizes and clocks, random models, and batches for them."""

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.envs.random_prompt import LETTERS
from launch.model import make_tokenizer, save_tokenizer
from learner.trajectory import Trajectory
from protocol.messages.episodes import Reward, Turn


@dataclass(frozen=True)
class GpuSetting:
    """Where and how large a measurement is."""

    device: torch.device
    tiny: bool
    """True proves in seconds, on any machine, that the programs work. The figures then mean nothing."""
    repetitions: int
    folder: Path
    """Folder for versions and runs; it is removed after the step."""
    shelf: Path
    """Folder for models, which further steps use, too."""
    models: tuple[str, ...]
    """Names of the models in `benchmarks.gpu.setting`."""
    quick: bool = False
    """True if to measure fewer sizes, for a GPU that is there for minutes only."""

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the models: bfloat16 on a GPU."""
        return torch.bfloat16 if self.cuda else torch.float32

    @property
    def dtype_name(self) -> str:
        """The same dtype as the run file has it."""
        return "bfloat16" if self.cuda else "float32"

    def settle(self) -> None:
        """Wait until the device has done all that was queued."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds that a call takes, until the device has done all of it."""
        self.settle()
        began = time.perf_counter()
        call()
        self.settle()
        return time.perf_counter() - began

    def in_turns(
        self, arms: Mapping[str, Callable[[], object]], before: Callable[[], object] = lambda: None
    ) -> dict[str, list[float]]:
        """Return the seconds of each arm and repetition. All run once before, and the order alternates.

        Args:
            before: called before each arm; its time does not count.
        """
        for call in arms.values():
            before()
            self.seconds(call)
        found: dict[str, list[float]] = {name: [] for name in arms}
        for repetition in range(self.repetitions):
            for name in list(arms) if repetition % 2 else list(arms)[::-1]:
                before()
                found[name].append(self.seconds(arms[name]))
        return found

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return memory that the GPU can fetch by itself; on a CPU ordinary memory."""
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.cuda)

    def peak_memory(self) -> float | None:
        """Return the peak of torch's memory on the GPU in GB since `forget_peak`; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) / 1e9 if self.cuda else None

    def forget_peak(self) -> None:
        """Begin a new measurement of the peak."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)


@dataclass(frozen=True)
class ModelShape:
    """Shape of a Qwen3 model with tied embeddings."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int


MODELS = {
    "tiny": ModelShape(256, 64, 2, 2, 1, 32, 128),
    "0.6B": ModelShape(151_936, 1024, 28, 16, 8, 128, 3072),
    "1.7B": ModelShape(151_936, 2048, 28, 16, 8, 128, 6144),
    "4B": ModelShape(151_936, 2560, 36, 32, 8, 128, 9728),
}
LONGEST = 40_960
TEMPLATE_TOKENS = 8
"""Room for the special tokens that a chat template puts around one prompt."""
GROUP = 8


def make_model(name: str, folder: Path, dtype: torch.dtype, device: torch.device) -> Path:
    """Write a random model of this name with a tokenizer of letters, unless it is there, and return its folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape, target = MODELS[name], folder / f"{name}-{str(dtype).removeprefix('torch.')}"
    if target.exists():
        return target
    # A program that is killed here leaves nothing that looks like a model.
    partial = target.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = make_tokenizer(list(LETTERS))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        intermediate_size=shape.inner, max_position_embeddings=LONGEST, tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id("<bos>"), eos_token_id=tokenizer.token_to_id("<eos>"),
        pad_token_id=tokenizer.token_to_id("<pad>"),
    )  # fmt: skip
    # A GPU draws billions of random numbers at once.
    with device:
        model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(partial, max_shard_size="64GB")
    save_tokenizer(tokenizer, partial, max_length=LONGEST)
    return partial.rename(target)


def operations(shape: ModelShape, parameters: int, tokens: int, length: int) -> float:
    r"""Return the floating-point operations of a forward and a backward pass, without what is computed twice.

    .. math:: 6 N \cdot \text{tokens} + 6 \cdot \text{layers} \cdot \text{heads} \cdot d_h \cdot \text{length}
              \cdot \text{tokens}

    (PaLM, arXiv:2204.02311, appendix B, with half of the attention, because it is causal.)

    Args:
        parameters: N, all parameters; a tied embedding counts once, as the output layer.
        tokens: number of tokens.
        length: length of each row.
    """
    attention = 6 * shape.layers * shape.heads * shape.head_dim * length
    return float((6 * parameters + attention) * tokens)


def make_batch_of(vocabulary: int, length: int, tokens: int, *, mixed: bool = False) -> list[Trajectory]:
    """Return trajectories, a quarter prompt, in groups of 8, with about ``tokens`` tokens in all.

    Args:
        length: length of all trajectories, or of the longest ones.
        mixed: spread lengths evenly from an eighth of ``length`` to ``length``, in a random order.
    """
    rng, mean = np.random.default_rng(0), length * 9 / 16 if mixed else length
    count = max(GROUP, int(tokens / mean) // GROUP * GROUP)
    lengths = (
        rng.permutation(np.linspace(length / 8, length, count).astype(int)) if mixed else [length] * count
    )
    return [trajectory(rng, vocabulary, int(each), i) for i, each in enumerate(lengths)]


def trajectory(rng: np.random.Generator, vocabulary: int, length: int, number: int) -> Trajectory:
    """Return a trajectory of random tokens with a random reward."""
    prompt = length // 4
    mask = np.arange(length) >= prompt
    return Trajectory(
        trajectory_id=f"t{number}", group_id=f"g{number // GROUP}", group_size=GROUP, env="benchmark",
        status="finished", purpose="train", token_ids=rng.integers(3, vocabulary, length).astype(np.int32),
        action_mask=mask, logp_behaviour=np.where(mask, -math.log(vocabulary), 0).astype(np.float32),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        turns=[Turn(0, 0, prompt, False), Turn(1, prompt, length, True)],
        rewards=[Reward("score", 1, float(rng.random()))],
    )  # fmt: skip


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the model of a folder, as transformers has it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
