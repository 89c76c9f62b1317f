"""Families of reasoning_gym: their settings, entries and scores, and the notation that an answer may use.

The scorers of nine families call ``eval`` with the answer, directly or in sympy's parser. A worker replaces both,
before it reads any answer. The replacements refuse everything but a literal, or a formula of numbers, names and known
functions. The library takes what they refuse for an answer that cannot be read. Entries and scores are made in the
worker process of a scorer; `Family` is used by the actor, too.
"""

import ast
import hashlib
import importlib
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from envs.errors import EnvError

RUNS_ANSWERS = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Families whose scorer in the library runs the answer as Python."""
ACCEPTS_JUNK = frozenset({"game_of_life_halting", "complex_arithmetic", "coin_flip"})
"""Families whose scorer gives junk the score of a right answer."""
COMPOSITE = "composite"
"""Family that mixes the families in its setting ``datasets``, each a table with ``name``."""


@dataclass(frozen=True)
class Family:
    """A family of reasoning_gym, its settings and the share held out: what a worker opens first.

    Raises:
        EnvError: no question would be left to train on, or none would be held out.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    heldout_share: float = 0.125

    def __post_init__(self) -> None:
        if not 0.0 < self.heldout_share < 1.0:
            raise EnvError(
                f"heldout_share = {self.heldout_share:g}: nothing would be left to "
                f"{'train on' if self.heldout_share >= 1 else 'evaluate on'}; choose it between 0 and 1"
            )

    @property
    def members(self) -> frozenset[str]:
        """Names of the families that score answers: the family itself, or those that a composite mixes.

        Raises:
            EnvError: the datasets of a composite are not a list of tables with names.

        Example:
            >>> inner = {"name": "composite", "config": {"datasets": [{"name": "n_queens"}]}}
            >>> sorted(Family("composite", {"datasets": [inner, {"name": "chain_sum"}]}).members)
            ['chain_sum', 'n_queens']
        """
        return frozenset(_members(self.name, self.config))

    @property
    def runs_answers(self) -> bool:
        """Whether the library would run answers to this family as Python."""
        return not RUNS_ANSWERS.isdisjoint(self.members)


def _members(name: str, config: Any) -> set[str]:
    if name != COMPOSITE:
        return {name}
    datasets = config.get("datasets") if isinstance(config, dict) else None
    if not isinstance(datasets, list) or not datasets:
        raise EnvError(
            'reasoning_gym family "composite": config.datasets must list the families, '
            'for example [{name = "chain_sum", weight = 1.0}]'
        )
    members: set[str] = set()
    for number, spec in enumerate(datasets):
        if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
            raise EnvError(f'reasoning_gym family "composite": config.datasets[{number}] has no name')
        members |= _members(spec["name"], spec.get("config", {}))
    return members


MOST_CHARS = 4_096
"""Longest formula."""
FUNCTIONS = frozenset(
    (
        *("Abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp"),
        *("ln", "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh"),
    )
)
"""Functions of sympy that a formula may call.

``Integral`` is none of them: unevaluated, it repeats the question, and the library gives it the score 1.
"""
LITERALS_IN = (
    "reasoning_gym.algorithmic.binary_matrix",
    "reasoning_gym.algorithmic.spiral_matrix",
    "reasoning_gym.algorithmic.string_insertion",
    "reasoning_gym.games.n_queens",
)
"""Modules whose scorers call ``eval`` with the answer."""
FORMULAS_IN = ("reasoning_gym.games.countdown", "reasoning_gym.games.puzzle24", "sympy")
"""Modules through which scorers call sympy's ``parse_expr``; those of integrals and polynomials name it ``sympy``'s."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")
_SIGNS = (ast.UAdd, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
_PARTS = (ast.Expression, ast.UnaryOp, ast.BinOp, ast.Load, *_SIGNS)


def refuse_code() -> None:
    """Make the library's scorers refuse answers that are neither literals nor formulas, in this process.

    Raises:
        AttributeError: the library has changed, and no longer parses answers where this expects it.
    """
    for name in LITERALS_IN:
        # A global name of a module hides the built-in function.
        vars(importlib.import_module(name))["eval"] = ast.literal_eval
    for name in FORMULAS_IN:
        module = importlib.import_module(name)
        module.parse_expr = _only_formulas(module.parse_expr)  # type: ignore[attr-defined]


def check_formula(text: str) -> None:
    """Check that a text is a formula of numbers, names, ``+ - * / **``, brackets and `FUNCTIONS`.

    Raises:
        ValueError: the text contains anything else, or is too long. A SyntaxError says that it is no expression.

    Example:
        >>> check_formula("6*(98 - 54) - cos(x)**2/2 + C")
        >>> check_formula("x.__class__")
        Traceback (most recent call last):
        ...
        ValueError: not a notation that an answer may use: Attribute
    """
    if len(text) > MOST_CHARS or not text.isascii():
        raise ValueError(f"a formula has at most {MOST_CHARS} characters, all of them ASCII")
    tree = ast.parse(text.strip(), mode="eval")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) if _NAME.fullmatch(name) and (id(node) in called) == (name in FUNCTIONS):
                continue
            case ast.Call(func=ast.Name(), keywords=[]):
                continue
            case ast.Constant(value=value) if type(value) in (int, float):
                continue
            case _ if isinstance(node, _PARTS):
                continue
        raise ValueError(f"not a notation that an answer may use: {type(node).__name__}")


def _only_formulas(parse: Callable[..., Any]) -> Callable[..., Any]:
    def parse_formula(text: str, *arguments: Any, **options: Any) -> Any:
        check_formula(text)
        return parse(text, *arguments, **options)

    return parse_formula


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
