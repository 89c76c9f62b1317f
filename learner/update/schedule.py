"""Learning rate as a function of the optimizer step."""

import math
from typing import assert_never

from learner.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0.

    The rate rises linearly over ``warmup_steps``. Then it stays constant, or falls to zero at
    ``total_steps``, linearly or as half a cosine.

    Example:
        >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear")
        >>> [learning_rate(config, step, total_steps=6) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    match config.schedule:
        case "constant":
            return config.lr
        case "linear":
            return config.lr * (1 - progress)
        case "cosine":
            return config.lr * (1 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(config.schedule)
