"""Finds out whether a server reports log-probabilities at the sampling temperature, or those of the raw logits.

With raw ones the behaviour probability of a token would be that of a different distribution at every temperature
but 1, and so would its importance ratio. At a temperature near 0 the sampled token has a log-probability near 0. In
the raw distribution it has one only where the model is nearly certain. The median over prompts decides, because
after a token without meaning, like padding, all logits may be equal.
"""

from collections.abc import Sequence
from statistics import median

from actors.generator.engine import Request

TEMPERATURE = 1e-3
"""Sampling temperature of the probe. vLLM raises it to 0.01, the least that it computes with."""
LEAST_LOGP = -0.3
"""Smallest median log-probability, in nats, of tokens sampled at that temperature. The best logit is rarely less than
0.01 above the second one, and hardly ever after two prompts of three."""
PROMPTS = ([3], [5], [7])
"""Token ids that every vocabulary has, behind the usual special tokens. After so short a prompt a model is hardly
ever certain."""
CURE = "start the server with --logprobs-mode processed_logprobs"


def probes() -> list[Request]:
    """Return the requests of the probe, each for one token."""
    return [
        Request(f"probe-{i}", prompt, 1, TEMPERATURE, top_p=1.0, top_k=0, seed=0, stop=[])
        for i, prompt in enumerate(PROMPTS)
    ]


def why_not_processed(logps: Sequence[float]) -> str:
    """Return why a server's log-probabilities cannot be used, or "".

    Args:
        logps: log-probabilities, in nats, of the tokens that answered the probes.

    Example:
        >>> why_not_processed([-0.0, -3.9, -1e-5])
        ''
        >>> why_not_processed([-0.0, -2.5, -4.0]).partition(":")[0]
        'a token sampled at temperature 0.001 has log-probability -2.5'
    """
    usual = median(logps)
    if usual >= LEAST_LOGP:
        return ""
    return (
        f"a token sampled at temperature {TEMPERATURE:g} has log-probability {usual:.3g}: it is that of the raw "
        f"logits, not of the policy that sampled; {CURE}"
    )
