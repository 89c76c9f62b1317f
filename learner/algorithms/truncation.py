"""Unfinished trajectories, cut at the end of a window: their advantages, and which of their tokens to trust.

The method is T-PPO, arXiv:2506.15050. All functions compute in numpy and float64, one trajectory at a time.
Where the paper gives no number, the default is the number in the released program (verl pull request 3728,
``recipe/tppo``).
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
    r"""Estimate advantages (GAE) on the window of a response that may go on after it: EGAE.

    .. math::
        \delta_t = r_t + \gamma V_{t+1} - V_t, \qquad
        A_t = \sum_{k=0}^{T-1-t} (\gamma \lambda)^k \delta_{t+k}

    with :math:`V_T = 0` where the response is finished, which is plain GAE (arXiv:1506.02438, equation 16).
    For an unfinished response arXiv:2506.15050 sets :math:`V_T \approx V_{T-1}`, so the last :math:`\delta`
    is :math:`r_{T-1} + (\gamma - 1) V_{T-1}`. That is the default; a critic that has seen the last token can
    give ``bootstrap`` instead. Compared with the complete response, the advantages of the window are off by
    :math:`(\gamma \lambda)^{T-1-t} (\gamma (V_T^{true} - V_T) + \gamma \lambda A_T)`, most at its end. The
    released program negates an integer flag bitwise, which gives the last term the wrong sign for
    :math:`\gamma < 1`. This function follows the formula.

    Args:
        rewards: [T], reward of each action token of the window, in the unit of the return.
        values: [T], value before each of these tokens, in the unit of the return.
        finished: whether the response ended in this window.
        discount: gamma, [0, 1], per token.
        trace: lambda, [0, 1].
        bootstrap: value after the last token of an unfinished window.

    Returns:
        Advantages [T], float64.

    Raises:
        ValueError: the shapes differ, or a finished response has a bootstrap.

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
    r"""Return a lambda that grows with the response, so that the reward at its end reaches its beginning.

    .. math:: \lambda = \max\left(\lambda_0, 1 - \frac{1}{\alpha L}\right), \qquad
        L = \text{length} + \lfloor W / 2 \rfloor \text{ if unfinished, else length}

    This is length-adaptive GAE (arXiv:2504.05118, section 4.2) in the form of T-PPO's program
    (``use_variable_lambda``), which expects an unfinished response to go on for half a window. Alpha 0.05 and
    base 0.95 are the numbers of that program; with them lambda leaves its base at 400 tokens.

    Args:
        length: action tokens so far, over all windows, >= 1.
        unfinished: whether the response goes on after the window.
        window: largest number W of action tokens in a window, >= 0.
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
    """Mask the tokens of a window that may carry policy gradient: not the last few of an unfinished window.

    The advantages of `extended_gae` are the most biased there. T-PPO's program (arXiv:2506.15050) leaves out
    8 tokens, and still counts them where it averages over tokens.

    Args:
        n: action tokens in the window.
        finished: whether the response ended in the window; then all tokens stay.
        ignore: number of tokens to leave out, >= 0; a shorter window loses all of its tokens.

    Returns:
        Mask [n], bool, true on tokens to train.

    Raises:
        ValueError: ``n`` or ``ignore`` is negative.

    Example:
        >>> tail_mask(4, finished=False, ignore=1).tolist()
        [True, True, True, False]
        >>> tail_mask(4, finished=True, ignore=1).all().item()
        True
    """
    if n < 0 or ignore < 0:
        raise ValueError(f"window of {n} tokens, {ignore} to ignore: neither may be negative")
    return np.arange(n) < (n if finished else n - ignore)
