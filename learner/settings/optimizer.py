"""`[learner.optimizer]`: AdamW and the schedule of its learning rate."""

from typing import Annotated, Literal

from pydantic import Field

from protocol.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW and the schedule of its learning rate."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up. Above 0. Absent: 1e-6 for all weights of a language model that is trained
    already, 2e-5 for adapters (`[learner.lora]`), 3e-4 for a tiny model that is made here (`[model.tiny]`)."""
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)
    """Decay rates of AdamW's averages of the gradient and of its square. Each at least 0 and below 1."""
    eps: float = Field(1e-8, gt=0)
    """Term that AdamW adds to its denominator. Above 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of AdamW. At least 0; 0 turns it off."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps in which the learning rate rises linearly to `lr`. 0: no warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to zero at the end of the run, linearly or as
    half a cosine."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Norm to which a larger gradient is clipped. Above 0."""
