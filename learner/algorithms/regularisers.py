r"""Regularisers: the entropy, and estimates of the KL divergence from sampled tokens.

k1, k2 and k3 estimate KL(a || b) from tokens sampled by a (J. Schulman, "Approximating KL divergence", 2020),
with d = log b(x) - log a(x). All are per token, in nats.

A good estimate of the number need not be a good loss (arXiv:2506.09477): its derivative ignores that a also
chose the token. With gradient through log a and tokens sampled by a itself, the expected gradients are

    k1: 0 (only noise)    k2: gradient of KL(a || b)    k3: gradient of KL(b || a), the other direction

and the last two agree to first order where a and b are close.
"""

import math
from typing import Literal, assert_never

from torch import Tensor

from learner.algorithms.ratios import LOG_RATIO_LIMIT
from learner.algorithms.tokens import check_same_shape

KlEstimator = Literal["k1", "k2", "k3"]
K3_CEILING = 10.0
"""Largest value of `kl_k3` in a loss, in nats."""


def kl_k1(logp_a: Tensor, logp_b: Tensor) -> Tensor:
    r"""Return -d: unbiased, high variance, may be negative. Shape [N].

    As a loss its gradient is :math:`\nabla \log a`, zero in expectation: it regularises nothing. Use it for
    measuring, or as a penalty inside the reward.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> kl_k1(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
        tensor([0.6931])
    """
    check_same_shape(logp_a=logp_a, logp_b=logp_b)
    return logp_a - logp_b


def distillation_advantage(logp_teacher: Tensor, logp_proximal: Tensor, *, limit: float) -> Tensor:
    r"""Return the advantage of each token by which a policy learns from a teacher on its own samples, [N].

    .. math:: A_t = \log \pi_{teacher}(y_t) - \log \pi_{proximal}(y_t)

    It is the negative of k1 of KL(proximal || teacher). As an advantage, and not as a loss, its expected gradient is
    that of the reverse KL: :math:`-\nabla KL(\pi || \pi_{teacher})` at the proximal policy, for the token alone and not
    for what follows it. This is the form of "On-policy distillation" (Thinking Machines, 2025, and its code in
    tinker-cookbook) with discount 0; MiniLLM (arXiv:2306.08543) goes down the same divergence of whole sequences. No
    gradient flows through it.

    Args:
        logp_teacher: of the sampled tokens, in nats; minus infinity where the teacher excludes one.
        logp_proximal: of the same tokens, under the policy before the update.
        limit: largest absolute value, in nats.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> distillation_advantage(torch.tensor([0.5, 0.0]).log(), torch.tensor([0.25, 0.5]).log(), limit=10.0)
        tensor([  0.6931, -10.0000])
    """
    check_same_shape(logp_teacher=logp_teacher, logp_proximal=logp_proximal)
    return (logp_teacher - logp_proximal).detach().clamp(-limit, limit)


def sibling_weights(entropy: Tensor, *, beta: float) -> Tensor:
    r"""Return how much each token of a failure learns from the policy that has read a solved sibling, [N].

    .. math:: w_t = \frac{e^{-\beta H_t}}{\operatorname{mean}_s e^{-\beta H_s}}

    SRPO, arXiv:2604.02288, with the entropy of that policy: where it is sure, it is believed. The mean weight is 1.

    Args:
        entropy: of the policy that has read the sibling, in nats, over all tokens of the batch that learn so.
        beta: 0 makes all weights 1.

    Example:
        >>> import torch
        >>> sibling_weights(torch.tensor([0.1, 1.0, 2.0]), beta=1.0)
        tensor([1.9278, 0.7838, 0.2883])
    """
    # The shift cancels, and keeps the largest from vanishing.
    weights = (-beta * (entropy - entropy.min())).exp()
    return (weights / weights.mean()).detach()


def kl_k2(logp_a: Tensor, logp_b: Tensor) -> Tensor:
    r"""Return d²/2: biased, low variance, never negative. Shape [N].

    As a loss its gradient is :math:`(\log a - \log b) \nabla \log a`. On policy this is an unbiased estimate
    of the gradient of the reverse KL, :math:`\nabla KL(a || b)`.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> kl_k2(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
        tensor([0.2402])
    """
    check_same_shape(logp_a=logp_a, logp_b=logp_b)
    return (logp_a - logp_b).square() / 2


def kl_k3(logp_a: Tensor, logp_b: Tensor) -> Tensor:
    r"""Return exp(d) - 1 - d: unbiased, never negative. Shape [N].

    This is the estimator of GRPO (arXiv:2402.03300, equation 4). d is clamped to ±20 nats. Gradient flows to
    both arguments, and is zero where they are equal. As a loss its gradient is
    :math:`(1 - b/a) \nabla \log a`. On policy this estimates the gradient of the *forward* KL,
    :math:`\nabla KL(b || a)`. It is biased for the reverse KL: weak (at most 1 · ∇ log a) where a token has
    become too likely, strong where it has become too unlikely.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> kl_k3(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.5]).log())
        tensor([0.1931, 0.0000])
    """
    check_same_shape(logp_a=logp_a, logp_b=logp_b)
    d = (logp_b - logp_a).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return d.expm1() - d


def kl_estimate(logp_a: Tensor, logp_b: Tensor, *, estimator: KlEstimator) -> Tensor:
    """Estimate KL(a || b) per token, in nats, with the named estimator, for a loss.

    k3 is cut at 10, as in verl and slime, so that one token cannot fill the gradient: its slope at 20 nats
    would be 5e8. Its gradient is zero where the cut acts, at d above 2.61 or below -11. So k3 does not pull a
    token back that the policy has left far behind; k2 does.

    Args:
        logp_a: log-probabilities [N] of the tokens under a, nats; in a penalty, a is the current policy.
        logp_b: log-probabilities [N] of these tokens under b, nats.
        estimator: `kl_k1`, `kl_k2` and `kl_k3` say what each is as a number and as a loss. As a loss, k3 is
            the common choice, and k2 is the one whose gradient is the gradient of the divergence it
            estimates.

    Returns:
        Estimates [N]; gradient flows to both arguments.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> kl_estimate(torch.tensor([0.5]).log(), torch.tensor([0.25]).log(), estimator="k2")
        tensor([0.2402])
    """
    check_same_shape(logp_a=logp_a, logp_b=logp_b)
    match estimator:
        case "k1":
            return kl_k1(logp_a, logp_b)
        case "k2":
            return kl_k2(logp_a, logp_b)
        case "k3":
            return kl_k3(logp_a, logp_b).clamp(max=K3_CEILING)
        case _:
            assert_never(estimator)


def base_share(step: int, *, hold: int = 50, every: int = 10, drop: float = 0.1, floor: float = 0.5) -> float:
    r"""Return the share of the base policy in `kl_convex`, which falls as training goes on.

    .. math:: \lambda(t) = \max(1 - \delta \lceil \max(t - t_0, 0) / k \rceil, \lambda_\min)

    ReMix (arXiv:2507.06892), whose numbers are the defaults. The policy is held close to the base policy
    first, and more and more to its predecessor later.

    Args:
        step: t, learner steps.
        hold: t_0, steps with the base policy alone.
        every: k, steps between two drops, >= 1.
        drop: δ, by how much the share falls each time.
        floor: λ_min, the smallest share.

    Returns:
        A share in [floor, 1].

    Raises:
        ValueError: every is below 1.

    Example:
        >>> [round(base_share(step), 1) for step in (50, 51, 60, 61, 90, 91, 150)]
        [1.0, 0.9, 0.9, 0.8, 0.6, 0.5, 0.5]
    """
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    drops = -(-max(step - hold, 0) // every)
    return max(1 - drop * drops, floor)


def kl_convex(
    logp_current: Tensor,
    logp_base: Tensor,
    logp_predecessor: Tensor,
    *,
    base_share: float,
    estimator: KlEstimator,
) -> Tensor:
    r"""Return the convex mixture of the divergences from the base policy and from the predecessor.

    .. math:: \lambda\, KL(\pi_\theta || \pi_\mathrm{base}) + (1 - \lambda)\, KL(\pi_\theta || \pi_{k-1})

    KL-convex of ReMix (arXiv:2507.06892). The paper does not name an estimator; `kl_estimate` says what each
    one is as a loss.

    Args:
        logp_current: log-probabilities [N] under the current policy, with gradient, nats.
        logp_base: log-probabilities [N] under the base policy, with which training began or was restarted.
        logp_predecessor: log-probabilities [N] under the policy before the last update.
        base_share: lambda in [0, 1], from `base_share`.
        estimator: estimator of both divergences.

    Returns:
        Mixtures [N], nats; 0 where the three policies agree.

    Raises:
        ValueError: the shapes differ.

    Example:
        >>> import torch
        >>> now, base = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
        >>> kl_convex(now, base, now, base_share=0.5, estimator="k1")
        tensor([0.3466])
    """
    check_same_shape(logp_current=logp_current, logp_base=logp_base, logp_predecessor=logp_predecessor)
    from_base = kl_estimate(logp_current, logp_base, estimator=estimator)
    from_predecessor = kl_estimate(logp_current, logp_predecessor, estimator=estimator)
    return base_share * from_base + (1 - base_share) * from_predecessor


def entropy_band_penalty(entropy: Tensor, *, mean: float, low: float, high: float) -> Tensor:
    r"""Compute how far each token's entropy is outside a band around a mean.

    .. math:: P_t = \max(0, k_l \bar H - H_t) + \max(0, H_t - k_r \bar H)

    EPO, arXiv:2509.22576. Its released program has a constant in place of the distance, through which no gradient
    flows; this is the paper's form.

    Args:
        entropy: [N], entropies of the tokens in nats.
        mean: mean entropy of earlier updates, nats.
        low, high: edges of the band, as shares of the mean.

    Returns:
        Distances [N], at least 0, in nats; gradient flows.

    Example:
        >>> import torch
        >>> entropy_band_penalty(torch.tensor([0.5, 1.0, 1.5]), mean=1.0, low=0.8, high=1.2).round(decimals=3)
        tensor([0.3000, 0.0000, 0.3000])
    """
    return (low * mean - entropy).clamp(min=0) + (entropy - high * mean).clamp(min=0)


def band_weight(update: int, updates: int, *, growth: float) -> float:
    r"""Return the weight of the band's penalty at an update, :math:`1 + e^{-g k / \lfloor K / 2 \rfloor}`.

    EPO, arXiv:2509.22576.

    Args:
        update: k, counted from 0.
        updates: K, updates of the whole run.
        growth: g.

    Example:
        >>> [round(band_weight(k, 10, growth=1.0), 4) for k in (0, 5, 10)]
        [2.0, 1.3679, 1.1353]
    """
    return 1 + math.exp(-growth * update / max(1, updates // 2))


def next_entropy_coefficient(
    coefficient: float, entropy: float, *, target: float, change: float, maximum: float
) -> float:
    """Steer the coefficient of the entropy bonus so that the entropy does not stay below a target.

    The coefficient rises by ``change`` where the measured entropy is below the target, falls by ``change``
    otherwise, and stays within [0, maximum]. This is the adaptive entropy control of Skywork-OR1
    (arXiv:2505.22312, section 3.2.5; its released program bounds the coefficient). Skywork-OR1 also switches
    the bonus off for every step whose entropy is not below the target, whatever the coefficient; here the
    coefficient falls step by step instead.

    Args:
        coefficient: coefficient of the step just made.
        entropy: mean entropy of the tokens of that step, nats.
        target: smallest entropy wanted, nats; Skywork-OR1 uses 0.2.
        change: change per step, > 0; the scripts of Skywork-OR1 use 1e-4.
        maximum: largest coefficient; the scripts of Skywork-OR1 use 0.005.

    Returns:
        The coefficient of the next step.

    Example:
        >>> next_entropy_coefficient(0.003, 0.1, target=0.2, change=0.001, maximum=0.005)
        0.004
        >>> next_entropy_coefficient(0.0, 0.3, target=0.2, change=0.001, maximum=0.005)
        0.0
    """
    step = change if entropy < target else -change
    return min(max(coefficient + step, 0.0), maximum)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Compute the entropy of whole distributions, -Σ p log p, in nats, in [0, log V].

    Args:
        log_probabilities: normalised log-probabilities [N, V].

    Returns:
        Entropies [N]; gradient flows.

    Example:
        >>> import torch
        >>> entropy(torch.tensor([[0.5, 0.5]]).log())
        tensor([0.6931])
    """
    return -(log_probabilities.exp() * log_probabilities).sum(-1)
