"""A toy task whose goal moves with the policy: neighbouring letters of an answer have to agree."""

from itertools import pairwise

from benchmarks.envs.letters import PromptedSuite


class NeighbourSuite(PromptedSuite):
    """Any letter will do, if it is repeated.

    Args:
        length: characters of a full response.
        prompts: number of different prompts.
    """

    def __init__(self, length: int = 8, prompts: int = 4) -> None:
        super().__init__(length, prompts, lambda text: agreeing(text, length))


def agreeing(text: str, length: int) -> float:
    """Return the share of the ``length - 1`` pairs of neighbours in a full response that agree.

    Example:
        >>> [round(agreeing(text, 4), 2) for text in ("aaaa", "aabb", "abab", "aa", "")]
        [1.0, 0.67, 0.0, 0.33, 0.0]
    """
    return sum(a == b for a, b in pairwise(text[:length])) / (length - 1)
