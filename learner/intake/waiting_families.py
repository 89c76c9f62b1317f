"""Families that wait for groups, between the deliveries of the broker and the units of a batch."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from learner.curriculum import Curriculum
from learner.errors import ModelUnusable
from learner.families.family import ChildTask, FamilyStage, TaskFamily
from learner.families.judging import judgement_metrics
from learner.families.notes import AnswerText, refined_metrics
from learner.families.reactions import Surroundings, acts_of, react, settle
from learner.given import Conversation, as_trajectory
from learner.settings.families import (
    FamilyConfig,
    HintFamily,
    JudgeFamily,
    RefineFamily,
    SteeredFamily,
    VerdictFamily,
)
from learner.settings.learner import LearnerConfig
from learner.trajectory import FOREIGN, Trajectory, Unit, UnitPart
from protocol import names

log = logging.getLogger(__name__)

LATE, ORPHANED = "late_child", "orphaned"
"""Outcomes of a group whose family was trained without it, and of one whose first group is lost."""
DIVERGED = "prefix diverged at turn"
"""Beginning of the error of an episode whose environment answered a repeated action in a different way."""


@dataclass
class _WaitingFamily:
    """A family whose first group is here, or only later ones, which is so after a restart."""

    family: TaskFamily
    early: dict[int, FamilyStage] = field(default_factory=dict)
    """Groups that came before the one that asks for them, by stage."""
    asked: int = 0
    """Newest stage whose tasks were asked for."""
    children: Sequence[ChildTask] = ()
    """Tasks of this stage."""
    since: float | None = None
    """Time at which `look` has first seen the family wait for the present stage."""


@dataclass
class WaitingFamilies:
    """Groups that were delivered and whose families are not trained yet.

    A family whose last group is in becomes a `Unit`, whose parts are its groups. So all of them are committed in the
    step that trains the family. Nothing here outlives the process: the broker delivers the groups of a family again to
    a learner that restarts, and the same groups ask for the same tasks.
    """

    config: FamilyConfig
    curriculum: Curriculum
    decode: AnswerText
    seed: int = 0
    demonstrations: Sequence[Trajectory] = ()
    """Solved tasks that somebody else wrote, for families of kind "steered"."""
    deadlines: int = 0
    """Families so far that were trained without a group that did not come in time."""
    children: int = 0
    """Tasks so far that families have asked for."""
    diverged: int = 0
    """Members so far that failed because the environment answered a repeated action in a different way."""
    _waiting: dict[str, _WaitingFamily] = field(default_factory=dict)
    _settled: set[str] = field(default_factory=set)
    """Families that are ready or being trained."""
    _warned: bool = False
    """True once it was said that the environment gives no hints."""
    _groups: list[int] = field(default_factory=list)
    """Groups of each family that was settled since the last `metrics`."""
    _acts: dict[str, list[float]] = field(default_factory=dict)
    """What these families show of their parts; see `learner.families.reactions.acts_of`."""

    def __len__(self) -> int:
        """Return the number of families that wait for a group."""
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Action tokens of the members of all groups that wait here."""
        stages = (s for w in self._waiting.values() for s in (*w.family.stages, *w.early.values()))
        return sum(stage.tokens for stage in stages)

    def outcome_if_late(self, group_id: str) -> str:
        """Return the outcome of a group that came too late for its family, or ""."""
        return LATE if names.family_of(group_id) in self._settled else ""

    def note_failed(self, members: Sequence[Trajectory]) -> None:
        """Note the members of a group that failed."""
        self.diverged += sum(t.error.startswith(DIVERGED) for t in members)

    def add_group(self, stage: FamilyStage) -> Unit | None:
        """Add a group that was delivered; return its family if that is to be trained now."""
        family_id = names.family_of(stage.group_id)
        waiting = self._waiting.setdefault(family_id, _WaitingFamily(TaskFamily(family_id)))
        waiting.early[stage.number] = stage
        return self._advance(waiting)

    def note_lost(self, group_id: str) -> Unit | None:
        """Note that a group will not come; return its family if that is to be trained, or dropped, now.

        Without its first group a family has nothing to train.
        """
        family_id, number = names.family_of(group_id), names.stage_of(group_id)
        waiting = self._waiting.get(family_id, _WaitingFamily(TaskFamily(family_id)))
        if family_id in self._settled or number < len(waiting.family.stages) or number in waiting.early:
            # It was delivered before.
            return None
        if number:
            return self.add_group(FamilyStage(group_id))
        self._waiting.pop(family_id, None)
        parts = [UnitPart(s.unit_id, [], {ORPHANED: s.members}) for s in waiting.early.values() if s.unit_id]
        return Unit(family_id, family_id, [], tuple(parts))

    def overdue(self, now: float) -> list[Unit]:
        """Return the families whose next group has not come within `deadline_s`, to be trained without it.

        Args:
            now: monotonic time in seconds.
        """
        late = []
        for family_id, waiting in list(self._waiting.items()):
            if not waiting.family.stages:
                continue
            if waiting.since is None:
                waiting.since = now
            elif now - waiting.since > self.config.deadline_s:
                log.warning(
                    "family %s: group %d did not come within %g s",
                    family_id,
                    waiting.asked,
                    self.config.deadline_s,
                )
                self.deadlines += 1
                late.append(self._settle(waiting))
        return late

    def forget_family(self, family_id: str) -> None:
        """Forget a family that is trained or dropped."""
        self._settled.discard(family_id)

    def metrics(
        self, trained: Sequence[Trajectory], *, version: int, max_policy_lag: int
    ) -> dict[str, float]:
        """Return the metrics `family/...` of a learner step.

        Args:
            trained: trajectories of the batch.
            version: policy version that the step updated.
            max_policy_lag: largest lag of a token that carries gradient.
        """
        sampled = sum(t.action_tokens for t in trained if t.origin not in FOREIGN)
        masked = sum(
            int((t.action_mask & (version - t.policy_version > max_policy_lag)).sum())
            for t in trained
            if t.origin not in FOREIGN
        )
        groups, self._groups = self._groups, []
        acts, self._acts = self._acts, {}
        mean = {"family/stages": float(np.mean(groups))} if groups else {}
        mean |= {name: float(np.mean(values)) for name, values in acts.items() if values}
        return (
            mean
            | (judgement_metrics(trained) if isinstance(self.config, JudgeFamily) else {})
            | (refined_metrics(trained) if isinstance(self.config, RefineFamily) else {})
            | {
                "family/waiting": float(len(self)),
                "family/children": float(self.children),
                "family/masked_share": masked / max(1, sampled),
                "family/deadlines": float(self.deadlines),
                "family/diverged_prefixes": float(self.diverged),
            }
        )

    def _advance(self, waiting: _WaitingFamily) -> Unit | None:
        """Take the groups that are here in the order of their stages, and ask for the next one."""
        family = waiting.family
        while (stage := waiting.early.pop(len(family.stages), None)) is not None:
            family.add_stage(stage, waiting.children)
            waiting.since = None
            self._look_for_hints(family)
            waiting.children = children = react(self.config, family, self._around(family))
            if not children:
                return self._settle(waiting)
            waiting.asked = len(family.stages)
            if waiting.asked not in waiting.early:
                self.children += len(children)
                self.curriculum.ask(family.family_id, waiting.asked, children)
        return None

    def _around(self, family: TaskFamily) -> Surroundings:
        config = self.curriculum.config
        room = config.sampling.max_trajectory_tokens
        instruction = self.curriculum.instruction_of(family.family_id)
        return Surroundings(config.group_size, self.decode, room, self.seed, self.demonstrations, instruction)

    def _look_for_hints(self, family: TaskFamily) -> None:
        needed = isinstance(self.config, HintFamily) or (
            isinstance(self.config, SteeredFamily) and self.config.own
        )
        if self._warned or not needed or family.hints:
            return
        if any(stage.members for stage in family.stages):
            self._warned = True
            log.warning(
                "family %s has no hints: the environment must give them in StepResult.hints with the last step; "
                "without them the group is trained as it is",
                family.family_id,
            )

    def _settle(self, waiting: _WaitingFamily) -> Unit:
        family = waiting.family
        del self._waiting[family.family_id]
        self._settled.add(family.family_id)
        self._groups.append(len(family.stages))
        for name, values in acts_of(self.config, family, self.decode).items():
            self._acts.setdefault(name, []).extend(values)
        unit = settle(self.config, family, self.decode).unit(family)
        # Groups that nobody asked for: the learner before this one decided otherwise.
        strays = [UnitPart(s.unit_id, [], {LATE: s.members}) for s in waiting.early.values() if s.unit_id]
        return replace(unit, deliveries=(*unit.parts, *strays))


def waiting_families(
    config: LearnerConfig,
    curriculum: Curriculum,
    model: str,
    *,
    seed: int,
    given: Callable[[], Sequence[Conversation]] = tuple,
) -> WaitingFamilies | None:
    """Return the families of a run; None if groups are trained by themselves.

    Args:
        config: settings of the learner.
        curriculum: the one that deals out the groups.
        model: model folder, whose tokenizer turns answers into text.
        seed: seed of the run.
        given: reads the conversations of ``config.conversations``.

    Raises:
        ModelUnusable: the tokenizer cannot be read.
    """
    if config.family is None:
        return None
    shown = given() if isinstance(config.family, SteeredFamily) else ()
    demonstrations = [as_trajectory(talk, talk.place) for talk in shown]
    return WaitingFamilies(config.family, curriculum, open_decoder(model), seed, demonstrations)


def decoder_of_judgements(config: LearnerConfig, model: str) -> AnswerText | None:
    """Return what reads the judgements of a recorded run; None if its families have none.

    Raises:
        ModelUnusable: the tokenizer cannot be read.
    """
    return open_decoder(model) if isinstance(config.family, JudgeFamily | VerdictFamily) else None


def open_decoder(model: str) -> AnswerText:
    """Return a function that turns the tokens of an answer into text, without special tokens.

    Raises:
        ModelUnusable: the tokenizer cannot be read.
    """
    path = Path(model) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The tokenizers library raises bare Exception.
        raise ModelUnusable(
            f"[learner.family] needs the tokenizer of the model, and {path} cannot be read: {error}"
        ) from None

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    return decode
