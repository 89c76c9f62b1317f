"""Fused kernels of the library Liger in a model's layers on a GPU: norms, rotary embeddings, and gated activations.

In transformers each of these is a chain of operations that reads and writes all activations. On an H200 they took
more time than the matrix products of a Qwen3 with 0.6 billion parameters. Liger (arXiv:2410.10989) makes each of them
in one kernel, for both passes.

Liger changes the module of the model's class, too. Here only the given model changes: another one of the same class may
compute on a CPU, or be compared with. If the kernels cannot be compiled, or compute something else, the model becomes
what it was.
"""

import logging
import sys
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

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
    if not set(forward.__code__.co_names) & set(new):
        return
    names = {**forward.__globals__, **new}
    own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    part.forward = MethodType(own, part)


@torch.no_grad()
def probe(lm: Any) -> Tensor:
    """Return the logits of a short row."""
    ids = torch.arange(PROBE_TOKENS, device=next(lm.parameters()).device)[None]
    training = lm.training
    lm.eval()
    logits: Tensor = lm(input_ids=ids % int(lm.config.get_text_config().vocab_size), use_cache=False).logits
    lm.train(training)
    return logits.float()
