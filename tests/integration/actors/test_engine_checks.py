"""Test that the tolerance of bfloat16 engines lets rounding pass, and no token of a wrong version."""

import torch

from tests.integration.actors.engine_checks import BFLOAT16, Policies, behind
from tests.integration.actors.generator_harness import Answer
from tests.integration.learner.tiny_qwen3 import score

PROMPT = [3, 4, 5]
TOKENS = 400


def answer_of(model, *, version, rounded):
    """Return an answer that a model samples token by token, with the log-probabilities of its rounded twin."""
    generator, ids = torch.Generator().manual_seed(version), list(PROMPT)
    cache, fed = None, ids
    for _ in range(TOKENS):
        with torch.no_grad():
            logits, cache = behind(model, fed, cache)
        fed = [int(torch.multinomial(logits[0, -1].softmax(-1), 1, generator=generator))]
        ids += fed
    sampled = ids[len(PROMPT) :]
    return Answer(ids=sampled, logps=score(rounded, PROMPT, sampled), versions=[version] * TOKENS)


def test_rounding_passes_and_a_wrong_version_does_not():
    policies, copies = Policies(tied=True, dtype=BFLOAT16.dtype), Policies(tied=True)
    for version in (1, 2):
        exact = policies[version]
        twin = copies[version].to(BFLOAT16.dtype)
        answer = answer_of(exact, version=version, rounded=twin)
        assert 0 < policies.largest_error(PROMPT, answer) < BFLOAT16.tolerance / 2
        answer.versions = [version + 2] * TOKENS
        assert policies.largest_error(PROMPT, answer) > 10 * BFLOAT16.tolerance
        # One token with a wrong stamp is found in most places.
        wrong = [
            abs(a - b)
            for a, b in zip(answer.logps, score(policies[version + 2], PROMPT, answer.ids), strict=True)
        ]
        assert sum(error > BFLOAT16.tolerance for error in wrong) > 0.85 * TOKENS
