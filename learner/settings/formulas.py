"""Sections of formulas of the user's own: `kind = "file.py:function"` in place of the name of a shipped form.

The keys beside `kind` are the formula's own settings; `learner.formulas` reads the file and checks them.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import ConfigDict, Field

from protocol.section import OWN, Section

S = TypeVar("S", bound=Section)


class OwnFormula(Section):
    """A formula of your own. All keys beside `kind` and `content` are settings of the formula, see
    docs/extend/first-method.md."""

    model_config = ConfigDict(extra="allow")

    kind: str = Field(OWN, pattern=r"^[^:]+:[A-Za-z_]\w*$")
    """The function, as `path/to/file.py:function` or `module:function`. A file is looked for in the working folder,
    then in the run file's folder."""
    content: str = ""
    """Hash of the file. Offbeat fills it in when a run starts, so that no process computes with a file that has
    changed since."""

    @property
    def own_settings(self) -> dict[str, Any]:
        """Settings of the formula: the keys of the run file that are not those of this section."""
        return dict(self.model_extra or {})


class OwnSurrogate(OwnFormula):
    """A surrogate of your own. Its function takes a `learner.update.objective.View` and the settings, and returns a
    `SurrogateValue`. All keys beside `kind` are its settings, see docs/extend/first-method.md."""


class OwnCorrection(OwnFormula):
    """A correction of your own. Its function takes a `learner.update.objective.View` and the settings, and returns a
    `CorrectionValue`. All keys beside `kind` are its settings, see docs/extend/first-method.md."""

    @property
    def level(self) -> str:
        """Tokens that share one ratio: an own correction gets tokens, and does the rest itself."""
        return "token"


class OwnAdvantage(OwnFormula):
    """An advantage of your own. Its function takes `learner.formulas.Rollouts` and the settings, and returns one number
    for each trajectory or for each token. All keys beside `kind` are its settings, see docs/extend/first-method.md.
    Groups with equal returns are not left out, because it may find a difference in them."""


class OwnReward(OwnFormula):
    """A composition of rewards of your own. Its function takes `learner.formulas.Members` and the settings, and returns
    a list of rewards for each trajectory. It comes last: it sees rewards after gates and weights, and what it returns
    is trained. All keys beside `kind` are its settings, see docs/extend/first-method.md."""


def own_formulas(section: Section, place: str) -> Iterator[tuple[str, OwnFormula]]:
    """Yield the formulas of the user's own in a section and in those inside it, each with its place.

    Args:
        place: name of the section in the run file.
    """
    for name, part in section.all_sections(place):
        if isinstance(part, OwnFormula):
            yield name, part


def with_own_formulas(section: S, change: Callable[[OwnFormula], OwnFormula]) -> S:
    """Return a section with its own formulas changed, those of the sections inside it, too."""
    return section.with_sections(lambda part: change(part) if isinstance(part, OwnFormula) else part)
