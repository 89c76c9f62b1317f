"""Finds where a turn's text completes a stop string. Pure.

Engines return token ids and know no text, so the actor looks for stop strings while the tokens come. A token is
whole: the turn ends with the token that completes the string, even if that token has more text.
"""

from collections.abc import Callable, Sequence

MARGIN_TOKENS = 8
"""Tokens that are decoded in front of a stop string's own: the first of them may lack a part of a character."""


def stopped_at(
    tokens: Sequence[int], checked: int, stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """Return how many tokens the turn has when its text first completes a stop string; None if it does not.

    Args:
        tokens: action tokens of the turn so far.
        checked: number of tokens at the beginning that completed none.
        stop: stop strings.
        decode: returns the text of tokens.

    Example:
        >>> stopped_at([1, 2, 3, 4], 1, ["23"], lambda ids: "".join(map(str, ids)))
        3
    """
    if not stop or len(tokens) <= checked:
        return None
    # A token with text has at least one byte, so a string of n bytes lies in the text of n tokens.
    longest = max(len(string.encode()) for string in stop)
    first = max(0, checked - longest - MARGIN_TOKENS)
    if find_stop(decode(tokens[first:]), stop) is None:
        return None
    ends = range(checked + 1, len(tokens) + 1)
    return next(end for end in ends if find_stop(decode(tokens[first:end]), stop) is not None)


def find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return the place of the first stop string in a text, or None.

    Example:
        >>> find_stop("Action: add(1, 2)\\nObservation: 3", ["\\nObservation:", "\\n\\n"])
        17
        >>> find_stop("3", ["\\n"]) is None
        True
    """
    places = [place for string in stop if (place := text.find(string)) >= 0]
    return min(places, default=None)
