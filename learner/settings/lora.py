"""`[learner.lora]`: adapters of low rank."""

from typing import Annotated

from pydantic import Field

from protocol.section import Section

ModuleNames = Annotated[tuple[str, ...], Field(strict=False)]
ALL_LINEAR = "all-linear"
"""Value of `LoraConfig.targets`: every linear layer but the output layer."""


class LoraConfig(Section):
    """`[learner.lora]`: train adapters of low rank in place of the model's own weights (LoRA, arXiv:2106.09685).
    Generators, evaluations and the final model get the adapters merged into the weights, see docs/run/lora.md. It needs
    the extra `lora`, and a learning rate 10 to 100 times that of full weights."""

    rank: int = Field(16, ge=1)
    """Rank of the adapters: the columns of B and rows of A in W + alpha / rank · B A. At least 1, at most the smaller
    side of every layer that is adapted."""
    alpha: float | None = Field(None, gt=0)
    """Scale of the adapters, which is divided by `rank`. Above 0. Absent: twice the rank, so that what an adapter
    adds does not depend on its rank."""
    targets: str | ModuleNames = ALL_LINEAR
    """Layers that get an adapter: "all-linear" for every linear layer but the output layer, or a list of names such as
    ["q_proj", "v_proj"]. A name stands for every linear layer whose path ends with it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names in `targets`; none for "all-linear"."""
        if isinstance(self.targets, str):
            return () if self.targets == ALL_LINEAR else (self.targets,)
        return self.targets

    @property
    def scale(self) -> float:
        """Factor of B A: alpha / rank."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    @property
    def words(self) -> str:
        """The settings as words, by which a checkpoint says what it holds.

        Example:
            >>> LoraConfig(rank=8, targets=["v_proj", "q_proj"]).words
            'rank 8, alpha 16, targets q_proj, v_proj'
        """
        targets = ", ".join(sorted(self.names)) or ALL_LINEAR
        return f"rank {self.rank}, alpha {self.scale * self.rank:g}, targets {targets}"
