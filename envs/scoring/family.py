"""A family of reasoning_gym with its settings, and the families that need care."""

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
