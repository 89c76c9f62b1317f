"""The device of a rank: takes its GPU, and sets torch, the C library and transformers so that a model trains fast."""

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.settings.learner import LearnerConfig
from protocol.errors import GpuUnusable
from protocol.processes import VARIABLE

log = logging.getLogger(__name__)


def take_gpu(config: LearnerConfig) -> None:
    """Make this rank's GPU the current one, and bound the memory of its tensors. Without GPUs, do nothing.

    Raises:
        GpuUnusable: the rank was given a GPU, but torch or DeepSpeed would not compute on it. It must not compute on a
            CPU instead.
    """
    if not config.devices:
        return
    if (accelerator := os.environ.get("DS_ACCELERATOR", "cuda")) != "cuda":
        raise GpuUnusable(
            f"the learner was given GPUs ({', '.join(map(str, config.devices))}), but DS_ACCELERATOR is "
            f'"{accelerator}" in its environment, so DeepSpeed would not compute on them; unset it'
        )
    place = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        # A GPU that the driver lists may still not compute: the build of torch may lack its kernels.
        torch.ones(1, device=f"cuda:{place}").add_(1).item()
    except (RuntimeError, AssertionError) as error:
        raise GpuUnusable(
            f"the learner was given GPUs ({', '.join(map(str, config.devices))}), but torch {torch.__version__} cannot "
            f"compute on its GPU {place}: {' '.join(str(error).split())[:400]}; look at nvidia-smi, and install "
            'offbeat with the extra "gpu" into a virtual environment of its own'
        ) from None
    torch.cuda.set_device(place)
    share = config.gpu_memory_utilization
    if not isinstance(share, str) and share < 1.0:
        # Without a bound, memory that torch keeps for later would be missing when the generator starts again.
        torch.cuda.set_per_process_memory_fraction(share, place)


def forget_peak_memory() -> None:
    """Begin a new measurement of the most memory in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()


def memory_metrics() -> dict[str, float]:
    """Return the metrics of this rank's GPU since `forget_peak_memory`; empty on a CPU, where nothing is measured."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "learner/gpu_memory_peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "learner/gpu_memory_used_share": 1 - free / total,
    }


def make_room(ranks: int) -> None:
    """Give back memory that torch keeps for later, on all ranks, if generators wake on these GPUs now.

    It is a collective call: no generator may wake before the last rank has done so.
    """
    if VARIABLE not in os.environ:
        return
    torch.cuda.empty_cache()
    if ranks > 1:
        dist.barrier()


# Numbers of the mallopt parameters, from glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLD_BYTES = 32 * 2**20
"""Largest threshold that glibc accepts."""
SHORT = 192
"""Number of tokens below which torch's bfloat16 attention is slower than its float32 attention, casts
included. The backward pass in bfloat16 works on blocks that short sequences do not fill (four times slower at
43 tokens, equally fast at 192)."""


def keep_freed_memory() -> bool:
    """Make this process keep the memory that it frees, and return whether that worked.

    By default glibc returns large blocks to the system, which clears each page again when the next layer
    needs it: 5 to 15 % of a learner's step. With this call the process keeps them for the next tensors of
    that size. It keeps about as much memory as was once in use at a time.
    """
    if not sys.platform.startswith("linux"):
        return False
    # Other C libraries than glibc may lack mallopt.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES) and mallopt(M_TRIM_THRESHOLD, -1))


def use_float_attention() -> None:
    """Let bfloat16 models of transformers attend in float32 over short sequences on a CPU.

    `float_attention` replaces "sdpa", torch's attention, in this process. It must keep that name: models look
    up the abilities of their attention by name, and would not recognise a new one.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa", float_attention)


def float_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the scaled dot-product attention of transformers.

    On a CPU, bfloat16 sequences of fewer than `SHORT` tokens are computed in float32.

    Args:
        query: [B, H, T, D]; ``key`` and ``value`` have this layout, too.

    Returns:
        [B, T, H, D] in the dtype of the query.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dtype = query.dtype
    short = query.shape[2] < SHORT and kwargs.get("position_bias") is None
    if short and dtype == torch.bfloat16 and query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
    states, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return states.to(dtype), None


def pack_no_rows() -> None:
    """Tell transformers that no row of this process packs several sequences.

    By default it looks at the positions in every forward pass, and the host then waits for all that the GPU has to do.
    Rows that trajectories share bring a mask of their own, for which it does not look.
    """
    from transformers import masking_utils

    masking_utils.find_packed_sequence_indices = no_packed_rows


def no_packed_rows(position_ids: torch.Tensor) -> None:
    """Say that each row is one sequence, as `transformers.masking_utils.find_packed_sequence_indices` would."""


TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}
"""Largest norm of a difference of logits that counts as rounding, relative to the norm of the logits. In bfloat16 it
grows with the layers: to 0.03 in 28, and 0.07 in 64 with weights that are five times as large as usual ones."""
PROBE_TOKENS = 48
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in configurations."""
ABSENT: Any = object()
Agree = Callable[[bool], bool]
Changes = list[tuple[nn.Module, dict[str, Any]]]
"""Parts of a model, and what they had before under the names that were changed; `ABSENT`: nothing."""


def fuse_layers(lm: Any, device: torch.device, agree: Agree = bool) -> bool:
    """Let a model compute with fused kernels, if it computes on a GPU and Liger is installed and knows its kind.

    Where DeepSpeed has cut the model, this is a collective call.

    Args:
        lm: causal language model of transformers, on its device.
        device: where the model computes.
        agree: function that tells whether all ranks say true; a collective call, so that all of them compute alike.

    Returns:
        Whether layers were changed.
    """
    if device.type != "cuda":
        return False
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as apply
    except Exception as error:
        log.warning("layers are not fused, because Liger cannot be imported: %s; install liger-kernel", error)
        apply = None
    return agree(apply is not None) and fuse(lm, apply, agree)


def fuse(lm: Any, apply: Callable[..., None], agree: Agree = bool) -> bool:
    """Change the layers of one model, and change them back unless its logits are those from before.

    Args:
        apply: Liger's function, which changes a model and the modules of its classes.
        agree: see `fuse_layers`.
    """
    before, changes = probe(lm), Changes()
    try:
        changes = change(lm, apply)
        difference = float((probe(lm) - before).norm() / before.norm())
        # A difference that is not a number is no small one.
        why = "" if difference <= TOLERANCE[lm.dtype] else f"logits would be {difference:.1%} off"
    except Exception as error:
        # Kernels are compiled when they are first used, so that many things can go wrong, and none of them matters.
        why = " ".join(str(error).split())[:300]
    if not agree(not why):
        undo(changes)
        log.warning("layers are not fused, which is slower: %s", why or "another rank cannot")
        return False
    log.info(
        "%d parts of the model compute with fused kernels; logits differ by %.2g", len(changes), difference
    )
    return bool(changes)


def change(lm: Any, apply: Callable[..., None]) -> Changes:
    """Let Liger change a model, put the names of its classes' modules back, and return the changes of its parts."""
    modules = {sys.modules[type(part).__module__] for part in lm.modules()}
    modules = {module for module in modules if module.__name__.startswith("transformers.models.")}
    names = [(module, dict(vars(module))) for module in modules]
    states = [(part, dict(vars(part))) for part in lm.modules()]
    config = lm.config.get_text_config()
    # Experts stay as they are, because their choice may be recorded and replayed.
    dense = not any(getattr(config, name, None) for name in EXPERTS)
    try:
        apply(lm, cross_entropy=False, fused_linear_cross_entropy=False, swiglu=dense)
    except Exception:
        undo(changed(states))
        raise
    finally:
        new = {module.__name__: restore(module, were) for module, were in names}
    for part in lm.modules():
        use(part, new.get(type(part).__module__, {}))
    return changed(states)


def changed(states: Changes) -> Changes:
    """Return the parts of a model that are not as they were, with what they had before.

    Args:
        states: all parts with all that they had.
    """
    found = []
    for part, were in states:
        now = vars(part)
        different = [
            name for name in now.keys() | were if now.get(name, ABSENT) is not were.get(name, ABSENT)
        ]
        if different:
            found.append((part, {name: were.get(name, ABSENT) for name in different}))
    return found


def undo(changes: Changes) -> None:
    """Give parts of a model back what they had."""
    for part, were in changes:
        for name, value in were.items():
            if value is ABSENT:
                vars(part).pop(name, None)
            else:
                vars(part)[name] = value


def restore(module: ModuleType, names: dict[str, Any]) -> dict[str, Any]:
    """Put back what a module's names stood for, and return the functions that had taken their place."""
    new = {name: value for name, value in vars(module).items() if names.get(name) is not value}
    for name in new:
        delattr(module, name)
    vars(module).update({name: names[name] for name in new if name in names})
    return {name: value for name, value in new.items() if isinstance(value, FunctionType)}


def use(part: nn.Module, new: dict[str, Any]) -> None:
    """Let the forward pass of one part of a model call new functions of its module, if it calls them."""
    forward = type(part).forward
    if "forward" in vars(part) or not isinstance(forward, FunctionType):
        return
    if own := calling(forward, new):
        part.forward = MethodType(own, part)


def calling(function: FunctionType, new: dict[str, Any]) -> FunctionType | None:
    """Return a copy of a function that calls new functions of its module, or None if it calls none of them.

    Decorators that keep the function as ``__wrapped__``, as those of renamed arguments do, are copied around it.
    """
    names, closure = function.__globals__, function.__closure__
    inner = getattr(function, "__wrapped__", None)
    if isinstance(inner, FunctionType):
        if (own := calling(inner, new)) is None:
            return None
        closure = tuple(CellType(own) if c.cell_contents is inner else c for c in closure or ())
    elif set(function.__code__.co_names) & set(new):
        names = {**names, **new}
    else:
        return None
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@torch.no_grad()
def probe(lm: Any) -> Tensor:
    """Return the logits of a short row."""
    ids = torch.arange(PROBE_TOKENS, device=next(lm.parameters()).device)[None]
    training = lm.training
    lm.eval()
    logits: Tensor = lm(input_ids=ids % int(lm.config.get_text_config().vocab_size), use_cache=False).logits
    lm.train(training)
    return logits.float()
