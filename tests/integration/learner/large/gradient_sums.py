"""How far the gradients that an engine sums over micro-batches are from their exact sums."""

from benchmarks.gpu.gradient_sums import MicroBatches, exact_sums, relative_error, summed_by
from tests.integration.learner.tiny_qwen3 import VOCAB


def gradient_errors(engine):
    """Return the errors of an engine's gradients and of their sums in bfloat16, relative to the exact sums.

    The exact sums are those of the bfloat16 gradients of each micro-batch, in float64. With several ranks, every rank
    calls this.
    """
    batches = MicroBatches(64, VOCAB, rows=2, length=12)
    exact, rounded = exact_sums(engine.model, batches, engine.deepspeed.device)
    return [relative_error(sums, exact) for sums in (summed_by(engine, batches), rounded)]
