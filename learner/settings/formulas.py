"""Sections of formulas of the user's own: `kind = "file.py:function"` in place of the name of a shipped form.

The keys beside `kind` are the formula's own settings; `learner.formulas` reads the file and checks them.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from protocol.section import Section

S = TypeVar("S", bound=BaseModel)
OWN = "file.py:function"
"""How a formula of the user's own is named, in pages and in errors."""
SHIPPED = "[shipped]"
"""Tag of the forms that Offbeat ships. Its brackets keep it out of errors, which name keys of the run file only."""


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


def form_of(section: Any) -> str:
    """Return whether the section of a form, or its content, is a shipped one or the user's own.

    Example:
        >>> form_of({"kind": "clip"}), form_of({"kind": "my_loss.py:soft_gate"}), form_of({})
        ('[shipped]', 'file.py:function', '[shipped]')
    """
    kind = section.get("kind") if isinstance(section, dict) else getattr(section, "kind", None)
    return OWN if isinstance(kind, str) and ":" in kind else SHIPPED


def own_formulas(section: BaseModel, place: str) -> Iterator[tuple[str, OwnFormula]]:
    """Yield the formulas of the user's own in a section and in those inside it, each with its place.

    Args:
        place: name of the section in the run file.
    """
    if isinstance(section, OwnFormula):
        yield place, section
        return
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from own_formulas(value, f"{place}.{name}")
        elif isinstance(value, tuple):
            for index, part in enumerate(value):
                if isinstance(part, BaseModel):
                    yield from own_formulas(part, f"{place}.{name}.{index}")


def with_own_formulas(section: S, change: Callable[[OwnFormula], OwnFormula]) -> S:
    """Return a section with its own formulas changed, those of the sections inside it, too."""
    if isinstance(section, OwnFormula):
        return change(section)  # type: ignore[return-value]
    update: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            update[name] = with_own_formulas(value, change)
        elif isinstance(value, tuple):
            update[name] = tuple(
                with_own_formulas(part, change) if isinstance(part, BaseModel) else part for part in value
            )
    changed = {name: value for name, value in update.items() if value != getattr(section, name)}
    return section.model_copy(update=changed) if changed else section
