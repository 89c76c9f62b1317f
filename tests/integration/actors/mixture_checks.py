"""The check that a new version of a mixture of experts reaches an engine, on a CPU or a GPU."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from actors.config import GeneratorConfig
from protocol.weights.files import write_version
from tests.integration.actors.generator_harness import Answer, Running
from tests.integration.learner.tiny_qwen3 import VOCAB, score

PROMPT = [3, 4, 5, 6, 7]


def check_new_experts(
    config: GeneratorConfig,
    before: Path,
    after: Path,
    weights: dict[str, torch.Tensor],
    folder: Path,
    *,
    tolerance: float,
    share: float = 1.0,
    apart: float = 100.0,
) -> None:
    """Publish the weights of ``after`` to an engine that serves ``before``, and compare what it samples.

    Args:
        weights: the weights of ``after`` under the names of a model folder.
        folder: where the version is written.
        tolerance: largest error of a log-probability, in nats.
        share: share of the tokens that must keep the tolerance. Where rounding leads a token to another expert, it is
            far off.
        apart: factor of the tolerance by which the two models differ at least, so that old weights are found.
    """
    manifest = write_version(
        folder,
        run="test",
        epoch=0,
        version=1,
        shapes={name: ("F32", tuple(tensor.shape)) for name, tensor in weights.items()},
        tensors=((name, memoryview(tensor.numpy()).cast("B")) for name, tensor in weights.items()),
    )
    settings = {"max_tokens": 60, "stop_token_ids": [VOCAB], "seed": 1}
    running = Running(config, before)
    try:
        actor = running.actor()
        first = running.ask(actor, "first", PROMPT, **settings)
        running.update(manifest, version=1)
        second = running.ask(actor, "second", PROMPT, **settings)
    finally:
        running.close()
    assert set(first.versions) == {0}
    assert set(second.versions) == {1}
    assert error(before, first, share) < tolerance
    assert error(after, second, share) < tolerance
    assert error(before, second, share) > apart * tolerance


def error(folder: Path, answer: Answer, share: float) -> float:
    """Return the error of a log-probability that this share of an answer's tokens does not exceed."""
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    expected = np.array(score(model, PROMPT, answer.ids))
    return float(np.quantile(np.abs(np.array(answer.logps) - expected), share))
