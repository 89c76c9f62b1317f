"""The digest of a run: short hashes of what all its peers must have alike, in one line that people can compare.

The broker has the digest of the run, a host the one in its ticket. They differ if the run was resumed with other
settings since the ticket was made.
"""

from collections.abc import Mapping

MAX_PARTS = 16
OTHER_DIGEST = "belongs to other settings than the run"
"""Words in the refusal of a peer with another digest."""


def digest(parts: Mapping[str, str]) -> str:
    """Return the digest of these parts. A part that is not known is left out.

    Example:
        >>> digest({"env": "3f2a", "model": "", "offbeat": "0.1.0"})
        'env=3f2a offbeat=0.1.0'
    """
    return " ".join(f"{name}={value}" for name, value in parts.items() if value)


def difference(run: str, peer: str) -> str:
    """Return in which parts two digests differ, with both values; "" if they agree in all parts that both have.

    Example:
        >>> difference("env=3f2a model=77ab", "env=9c1b model=77ab other=1")
        'env is 9c1b, in the run 3f2a'
        >>> difference("env=3f2a", ""), difference("", "env=1")
        ('', '')
    """
    ours, theirs = _parts(run), _parts(peer)
    return ", ".join(
        f"{name} is {theirs[name]}, in the run {ours[name]}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    )


def _parts(text: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in text.split()[:MAX_PARTS])
    return {name: value for name, equals, value in pairs if equals}
