"""Trajectories cut at the end of a window, still unfinished: their advantages, and which of their tokens to trust.

T-PPO, arXiv:2506.15050. Numpy, float64, one trajectory at a time. Where the paper gives no number, that of the
released program (verl pull request 3728, ``recipe/tppo``) is the default.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def extended_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    *,
    finished: bool,
    discount: float,
    trace: float,
    bootstrap: float | None = None,
) -> NDArray[np.float64]:
    r"""Generalised advantage estimation on the window of a response that may go on after it (EGAE).

    .. math::
        \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad
        A_t = \sum_{k=0}^{T-1-t} (\gamma \lambda)^k \delta_{t+k}

    with :math:`V_T = 0` where the response is finished, which is plain GAE (arXiv:1506.02438, equation 16).
    Unfinished, arXiv:2506.15050 puts :math:`V_T \approx V_{T-1}`: the last :math:`\delta` is
    :math:`r_{T-1} + (\gamma - 1) V_{T-1}`. That is the default; a critic that has seen the last token can give
    ``bootstrap`` in its place. Against the complete response the window is wrong by
    :math:`(\gamma \lambda)^{T-1-t} (\gamma (V_T^{true} - V_T) + \gamma \lambda A_T)`, most at its end. The
    released program negates an integer flag bitwise, which gives the last term the wrong sign for
    :math:`\gamma < 1`; here the formula is followed.

    Args:
        rewards: [T], of the window's action tokens, in the unit of the return.
        values: [T], before each of these tokens, same unit.
        finished: whether the response ended in this window.
        discount: gamma, [0, 1], per token.
        trace: lambda, [0, 1].
        bootstrap: value after the last token of an unfinished window.

    Returns:
        Advantages [T], float64.

    Raises:
        ValueError: shapes differ, or a finished response is given a bootstrap.

    Example:
        >>> extended_gae(np.zeros(3), [0.2, 0.4, 0.5], finished=False, discount=1.0, trace=0.5).round(3).tolist()
        [0.25, 0.1, 0.0]
        >>> extended_gae([0, 0, 1], [0.2, 0.4, 0.5], finished=True, discount=1.0, trace=0.0).round(3).tolist()
        [0.2, 0.1, 0.5]
    """
    rewards, values = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if rewards.ndim != 1 or rewards.shape != values.shape:
        raise ValueError(f"rewards {rewards.shape} and values {values.shape}: give one of each per token")
    if finished and bootstrap is not None:
        raise ValueError(f"bootstrap {bootstrap} for a finished response; the value after its end is 0")
    if not len(values):
        return np.zeros(0)
    after = float(values[-1]) if bootstrap is None else bootstrap
    following = np.append(values[1:], 0.0 if finished else after)
    deltas = rewards + discount * following - values
    advantages, running = np.zeros_like(values), 0.0
    for t in reversed(range(len(values))):
        running = deltas[t] + discount * trace * running
        advantages[t] = running
    return advantages


def adaptive_trace(
    length: int, *, unfinished: bool, window: int, alpha: float = 0.05, base: float = 0.95
) -> float:
    r"""Lambda that grows with the response, so that the reward at its end reaches its beginning.

    .. math:: \lambda = \max\left(\lambda_0, 1 - \frac{1}{\alpha L}\right), \qquad
        L = \text{length} + \lfloor W / 2 \rfloor \text{ if unfinished, else length}

    Length-adaptive GAE (arXiv:2504.05118, section 4.2) as T-PPO's program has it (``use_variable_lambda``):
    an unfinished response is expected to go on for half a window. Alpha 0.05 and base 0.95 are its numbers;
    with them lambda leaves its base at 400 tokens.

    Args:
        length: action tokens so far, over all windows, >= 1.
        window: action tokens a window holds at most.
        alpha: > 0, per token.
        base: smallest lambda, [0, 1].

    Returns:
        Lambda, in [base, 1).

    Raises:
        ValueError: a length below 1, a negative window, or alpha not above 0.

    Example:
        >>> adaptive_trace(800, unfinished=False, window=512)
        0.975
        >>> adaptive_trace(100, unfinished=True, window=512)
        0.95
    """
    if length < 1 or window < 0 or alpha <= 0:
        raise ValueError(
            f"length {length}, window {window}, alpha {alpha}: need length >= 1, window >= 0, alpha > 0"
        )
    expected = length + (window // 2 if unfinished else 0)
    return max(base, 1 - 1 / (alpha * expected))


def tail_mask(n: int, *, finished: bool, ignore: int = 8) -> NDArray[np.bool_]:
    """Tokens of a window that may carry policy gradient: not the last few of an unfinished one.

    There the advantages of `extended_gae` are the most biased. T-PPO's program (arXiv:2506.15050) leaves out 8,
    and still counts them where it averages over tokens.

    Args:
        n: action tokens in the window.
        finished: whether the response ended in it; then all tokens stay.
        ignore: how many to leave out, >= 0; a shorter window loses all of its tokens.

    Returns:
        Mask [n], bool, true on tokens to train.

    Raises:
        ValueError: a negative number.

    Example:
        >>> tail_mask(4, finished=False, ignore=1).tolist()
        [True, True, True, False]
        >>> tail_mask(4, finished=True, ignore=1).all().item()
        True
    """
    if n < 0 or ignore < 0:
        raise ValueError(f"window of {n} tokens, {ignore} to ignore: neither may be negative")
    return np.arange(n) < (n if finished else n - ignore)
