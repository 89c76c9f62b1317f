"""Entries of a reasoning_gym family, and their scores. This code runs in the worker process of a scorer."""

import hashlib
import math
from collections import OrderedDict
from typing import Any

from envs.scoring.family import COMPOSITE

WALK_STRIDE = 64
WALK_LIMIT = 4_096
ENDLESS = 1 << 40
CACHED_ENTRIES = 256
ROUNDING = 1e-9

# These families draw a list of `size` entries when they are made, or refuse a large size.
COUNTED_FAMILIES = {"list_functions", "gsm_symbolic", "acre", "word_ladder", COMPOSITE}
COUNTED_SIZE = 20_000


def split_of(question: str, heldout_share: float) -> str:
    """Return the split of a question. A hash of its text decides, so equal questions are in one split.

    Example:
        >>> split_of("1 + 1 =", 0.0), split_of("1 + 1 =", 1.0)
        ('train', 'heldout')
    """
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "little") < heldout_share * 2**64 else "train"


class Questions:
    """Entries of one family, found by (index, split).

    Task ``index`` of a split is the first entry of that split among the library's entries ``64 * index``,
    ``64 * index + 1``, and so on. Both splits of one index start at the same place and never share an entry.
    Two indices give different entries, unless 64 entries in a row all belong to the other split.
    """

    def __init__(self, dataset: Any, size: int, heldout_share: float) -> None:
        self._dataset, self._size, self._share = dataset, size, heldout_share
        self._cache: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def at(self, position: int) -> dict[str, Any]:
        """Return the entry at a position of the library's numbering."""
        if position not in self._cache:
            self._cache[position] = self._dataset[position]
            if len(self._cache) > CACHED_ENTRIES:
                self._cache.popitem(last=False)
        return self._cache[position]

    def find(self, index: int, split: str) -> tuple[int, dict[str, Any]]:
        """Return the position and entry of a task.

        Raises:
            LookupError: none of `WALK_LIMIT` entries is in the split.
        """
        for step in range(WALK_LIMIT):
            position = (index * WALK_STRIDE + step) % self._size
            entry = self.at(position)
            if split_of(entry["question"], self._share) == split:
                return position, entry
        raise LookupError(f"no {split} question among {WALK_LIMIT} from {index}; is heldout_share 0 or 1?")

    def score(self, position: int, answer: str) -> float:
        """Return the score of an answer to the entry at ``position``, in [0, 1].

        Raises:
            ValueError: the scorer returned anything else.
        """
        score = float(self._dataset.score_answer(answer, self.at(position)))
        if 1.0 < score <= 1.0 + ROUNDING:
            # A sum of parts was rounded up. Return just below 1, because only an exactly right answer gets 1.
            score = math.nextafter(1.0, 0.0)
        if not (math.isfinite(score) and 0.0 <= score <= 1.0):
            raise ValueError(f"scorer returned {score!r}, not a number in [0, 1]")
        return score


def fields_of(entry: dict[str, Any]) -> dict[str, str]:
    """Return the metadata of an entry that is a text or a number, as texts by name.

    Example:
        >>> fields_of({"question": "Calculate 1 + 2.", "metadata": {"expression": "1 + 2", "terms": 2, "x": [1]}})
        {'expression': '1 + 2', 'terms': '2'}
    """
    metadata = entry.get("metadata") or {}
    return {str(name): str(value) for name, value in metadata.items() if isinstance(value, str | int | float)}


def open_family(request: dict[str, Any]) -> Questions:
    """Make the dataset of a family.

    Raises:
        LookupError: the family is unknown.
        TypeError: a setting is wrong.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    family, config = request["family"], dict(request["config"])
    if family not in DATASETS:
        raise LookupError(f"unknown family {family!r}")
    size = config.setdefault("size", COUNTED_SIZE if family in COUNTED_FAMILIES else ENDLESS)
    dataset = reasoning_gym.create_dataset(family, seed=request["seed"], **_with_specs(family, config))
    return Questions(dataset, size, request["heldout_share"])


def family_names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def _with_specs(family: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a composite with the library's objects in place of the tables in ``datasets``."""
    if family != COMPOSITE:
        return config
    from reasoning_gym.composite import DatasetSpec

    specs = [{"weight": 1.0, "config": {}, **spec} for spec in config["datasets"]]
    for spec in specs:
        spec["config"] = _with_specs(spec["name"], spec["config"])
    return {**config, "datasets": [DatasetSpec(**spec) for spec in specs]}
