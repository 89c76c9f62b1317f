"""Checks of a mixture of experts in an engine, on a CPU or a GPU: its updates, and the experts that it reports."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from actors.config import GeneratorConfig
from protocol.weights.files import write_version
from tests.integration.actors.generator_harness import Answer, Running
from tests.integration.learner.tiny_mixture import CHOSEN, LAYERS
from tests.integration.learner.tiny_qwen3 import VOCAB, score

PROMPT = [3, 4, 5, 6, 7]
LONG_PROMPT = [(7 * i) % 40 + 3 for i in range(70)]
ROUTED = {"max_tokens": 40, "stop_token_ids": [VOCAB], "seed": 1}


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
    manifest = published(weights, folder)
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


def published(weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Write weights as version 1 into a folder. Return the path of the manifest."""
    return write_version(
        folder,
        run="test",
        epoch=0,
        version=1,
        shapes={name: ("F32", tuple(tensor.shape)) for name, tensor in weights.items()},
        tensors=((name, memoryview(tensor.numpy()).cast("B")) for name, tensor in weights.items()),
    )


def check_experts(running: Running, folder: Path, *, share: float = 1.0) -> None:
    """Compare the experts that an engine reports with those that transformers chooses in float32.

    Args:
        folder: the model, as `tiny_mixture` makes them.
        share: share of the tokens whose experts must be equal in all layers. Where two experts have nearly equal
            numbers, rounding leads a token to the other one.
    """
    actor = running.actor("first")
    first = running.ask(actor, "first", LONG_PROMPT, routes_from=0, **ROUTED)
    everything = chosen(folder, [*LONG_PROMPT, *first.ids])
    assert sorted(first.routes) == list(range(len(everything) - 1))
    assert agreement(told(first), everything[:-1]) >= share
    # The next turn of a conversation: its beginning is in the prefix cache, and the actor knows all rows but the last.
    longer = [*LONG_PROMPT, *first.ids, 5, 6]
    after = len(longer) - 3
    second = running.ask(actor, "second", longer, routes_from=after, **ROUTED)
    assert sorted(second.routes) == list(range(after, len(longer) + len(second.ids) - 1))
    assert agreement(told(second), chosen(folder, [*longer, *second.ids])[after:-1]) >= share
    # Cached blocks keep their rows.
    again = running.ask(actor, "again", LONG_PROMPT, routes_from=0, **ROUTED)
    assert agreement(told(again)[: len(LONG_PROMPT)], told(first)[: len(LONG_PROMPT)]) >= share
    assert not running.ask(actor, "none", LONG_PROMPT, **ROUTED).routes


def check_experts_over_an_update(
    running: Running,
    before: Path,
    after: Path,
    weights: dict[str, torch.Tensor],
    folder: Path,
    *,
    share: float = 1.0,
) -> None:
    """Publish the weights of ``after`` in the middle of an answer; a token keeps the experts of its first pass.

    The arguments are those of `check_new_experts` and `check_experts`.
    """
    actor, manifest = running.actor("second"), published(weights, folder)
    actor.ask("long", LONG_PROMPT, **{**ROUTED, "max_tokens": 150}, routes_from=0)
    running.until(lambda: (actor.poll(), len(actor.answers["long"].ids) >= 8)[1])
    running.update(manifest, version=1)
    running.until(lambda: (actor.poll(), actor.answers["long"].finish_reason != "")[1])
    answer = actor.answers["long"]
    assert set(answer.versions) == {0, 1}
    ids = [*LONG_PROMPT, *answer.ids]
    assert sorted(answer.routes) == list(range(len(ids) - 1))
    old, new, rows = chosen(before, ids), chosen(after, ids), told(answer)
    first = len(LONG_PROMPT) + answer.versions.index(1)
    # The token before the first of version 1 was computed again with version 1, or it would not have sampled it.
    assert agreement(rows[: first - 1], old[: first - 1]) >= share
    assert agreement(rows[first - 1 :], new[first - 1 : -1]) >= share
    assert agreement(old, new) < 0.2


def chosen(folder: Path, token_ids: list[int]) -> np.ndarray:
    """Return the experts that transformers chooses for each token, [T, layers, experts of a layer], sorted."""
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    return np.stack([layer.topk(CHOSEN).indices.sort().values.numpy() for layer in logits], axis=1)


def told(answer: Answer) -> np.ndarray:
    """Return the experts that an engine reported, as `chosen` does."""
    rows = [answer.routes[place] for place in sorted(answer.routes)]
    return np.sort(np.array(rows).reshape(len(rows), LAYERS, CHOSEN))


def agreement(one: np.ndarray, other: np.ndarray) -> float:
    """Return the share of tokens whose experts are equal in all layers."""
    assert one.shape == other.shape
    return float((one == other).all(axis=(1, 2)).mean())


def error(folder: Path, answer: Answer, share: float) -> float:
    """Return the error of a log-probability that this share of an answer's tokens does not exceed."""
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    expected = np.array(score(model, PROMPT, answer.ids))
    return float(np.quantile(np.abs(np.array(answer.logps) - expected), share))
