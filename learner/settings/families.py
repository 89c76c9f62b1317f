"""`[learner.family]`: groups whose results ask for further groups, all of which are trained together."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from learner.settings.given import Conversations
from learner.settings.selection import Instruction
from protocol.messages.fields import MAX_TEXT
from protocol.section import Section

MAX_FRAME = MAX_TEXT // 4
"""Most characters of the words around a text in a note."""
ANSWERS, FUTURE, INSTRUCTION = "{answers}", "{future}", "{instruction}"


def with_place(note: str, place: str, field: str = "note") -> str:
    """Return the words of a note, in which the place of a text stands once.

    Raises:
        ValueError: it does not.
    """
    if note.count(place) != 1:
        raise ValueError(f"{field} is {note!r}; write {place} once, where the text is to stand")
    return note


class Family(Section):
    """What all kinds have in common."""

    kind: str
    deadline_s: float = Field(1800.0, gt=0)
    """Seconds that a family waits for its next group. Then what is there is trained. Above 0. If nothing else comes
    meanwhile, as in lockstep, a shorter learner.data_timeout_s ends the run before."""

    @property
    def stages(self) -> int:
        """Most groups after the first one."""
        return 1

    def first(self, group_size: int) -> int:
        """Return the members of the first group."""
        return group_size

    def largest(self, group_size: int) -> int:
        """Return the members of the largest group."""
        return group_size


class SolvedFamily(Family):
    """What those have in common that ask whether an answer is right."""

    reward: str = ""
    """Reward that says whether an answer is right: one above `above` is. Absent: what the environment says
    (`StepResult.correct`), or the return if it says nothing."""
    above: float = 0.0
    """Value of the reward above which an answer is right."""


def _larger_part(first: int, group_size: int) -> int:
    return max(first, group_size - first)


class JudgeFamily(Family):
    """Some members of a group answer the task; the others read these answers and give each a number. Where the task has
    a reference, judgements are trained to agree with it. Where it has none, the numbers are the reward of the answers
    (URPO, arXiv:2507.17515). It is for tasks of one turn."""

    kind: Literal["judge"] = "judge"
    answers: int = Field(4, ge=2)
    """Answers to each task; the rest of learner.group_size are judgements. At least 2, at most
    learner.group_size - 2, so that two judgements are compared."""
    reference: str = Field("return", min_length=1)
    """Name of the reward that is the truth about an answer. A task whose answers did not all get it has no reference.
    "return": the return of an answer, so that every task has a reference."""
    highest: float = Field(10.0, gt=0)
    """Largest number that a judgement may give; the smallest is 0. Above 0."""
    note: str = Field(
        "Do not answer. These are answers to it:\n{answers}\nRate each from 0 to 10. Write one number for each, in "
        "this order, on the last line.",
        max_length=MAX_FRAME,
    )
    """Words around the answers, which stand where `{answers}` is, each with a number in brackets before it. A judgement
    is read from its last line, which must hold as many numbers as there are answers."""

    @field_validator("note")
    @classmethod
    def _with_answers(cls, note: str) -> str:
        return with_place(note, ANSWERS)

    def first(self, group_size: int) -> int:
        return self.answers

    def largest(self, group_size: int) -> int:
        return _larger_part(self.answers, group_size)


class VerdictFamily(SolvedFamily):
    """A group is sampled; then the policy, or a pinned model, reads each right answer and names its first mistake (the
    judge of FAPO, arXiv:2510.22543). An answer is flawed if most of its judgements that can be read name one, and then
    has the reward `flawed` of -`penalty` beside its own. Judgements are not trained here; the tasks of the suite
    `planted_mistakes`, which know the truth, train them. It is for tasks whose answers can be quoted."""

    kind: Literal["verdict"] = "verdict"
    reward: str = Field(min_length=1)
    """Reward that says whether an answer is right: one above `above` is. Only right answers are judged. Tasks that give
    no such reward have no judgements."""
    readers: int = Field(1, ge=1)
    """Judgements of each right answer. At least 1; an odd number, so that most of them decide."""
    penalty: float = Field(1.0, ge=0)
    """Amount that a flawed answer loses, after gates and weights. At least 0."""
    from_version: int = Field(0, ge=0)
    """Policy version before which nobody judges, so that tasks with a known truth train the judge first. At least 0."""
    judge: str = Field("", max_length=64)
    """Name in `[[actor.teachers]]` of the model that judges, whose weights never change. Empty: the policy, at the
    version that it has then."""
    truth: str = ""
    """Reward of an answer that is above 0 if its way is right, where the environment knows it. Judgements are compared
    with it, for the metric `family/verdict_right_share` alone. Empty: it is not known."""
    note: str = Field("Mistake?\n{attempt}", max_length=MAX_FRAME)
    """Words around the answer, which stands where `{attempt}` is. The last line of a judgement must hold one number:
    that of the first wrong step, or 0."""

    @field_validator("note")
    @classmethod
    def _with_attempt(cls, note: str) -> str:
        return with_place(note, ATTEMPT)

    def largest(self, group_size: int) -> int:
        return group_size * self.readers


class RefineFamily(Family):
    """Some members of a group are plain episodes. Each of the others reads how one of these really went on, and plays
    the task anew (Dyna-Mind, arXiv:2510.09577). A right one that beats the mean of both groups has advantage 1, the
    others 0. Plain episodes are compared with each other alone. Tasks need several turns."""

    kind: Literal["refine"] = "refine"
    rollouts: int = Field(4, ge=2)
    """Plain episodes of each task; the rest of learner.group_size are refined ones. At least 2, at most
    learner.group_size - 2: one alone has nobody to be compared with."""
    horizon: int = Field(5, ge=1)
    """Most actions of the plain episode that are shown, each with the observation that really followed. At least 1."""
    note: str = Field(
        "An earlier plan and what really followed:\n{future}\nUse this to do better.", max_length=MAX_FRAME
    )
    """Words around the actions and observations, which stand where `{future}` is."""

    @field_validator("note")
    @classmethod
    def _with_future(cls, note: str) -> str:
        return with_place(note, FUTURE)

    def first(self, group_size: int) -> int:
        return self.rollouts

    def largest(self, group_size: int) -> int:
        return _larger_part(self.rollouts, group_size)


HintShare = Annotated[float, Field(gt=0, le=1)]
HINT, DRAFT, ATTEMPT, REFLECTION, EXAMPLES = "{hint}", "{draft}", "{attempt}", "{reflection}", "{examples}"
"""Places in a note, each for a text."""


class HintFamily(SolvedFamily):
    """A group in which nobody solved the task is sampled again with a hint behind its prompt, then with a stronger one,
    until somebody solves it (GHPO, arXiv:2507.10628; Scaf-GRPO, arXiv:2510.19807). The environment gives the hints in
    `StepResult.hints`."""

    kind: Literal["hint"] = "hint"
    shares: tuple[HintShare, ...] = Field((0.25, 0.5, 0.75), strict=False, min_length=1, max_length=16)
    """Strengths of the hints, rising. If the environment gives one text, a hint is this share of its characters, from
    the first one on. If it gives several, a hint is this share of them, at least the first."""
    members: int = Field(0, ge=0)
    """Answers to each hint. 0: a whole group, which is trained in place of the one before it (GHPO). Otherwise the
    first right answer takes the place of one wrong answer of the first group (Scaf-GRPO)."""
    note: str = Field("A solution begins like this: {hint}", max_length=MAX_FRAME)
    """Words around a hint, which stands where `{hint}` is."""
    warmup_groups: int = Field(0, ge=0)
    """Groups at the beginning of the run that get no hints. At least 0."""

    @field_validator("shares")
    @classmethod
    def _rising(cls, shares: tuple[float, ...]) -> tuple[float, ...]:
        if list(shares) != sorted(set(shares)):
            raise ValueError(f"shares are {list(shares)}; each hint must be stronger than the one before")
        return shares

    @field_validator("note")
    @classmethod
    def _with_hint(cls, note: str) -> str:
        return with_place(note, HINT)

    @property
    def stages(self) -> int:
        return len(self.shares)

    def largest(self, group_size: int) -> int:
        return max(group_size, self.members)


class DraftFamily(Family):
    """A group of drafts is sampled and not trained. Then a group is sampled with the best draft behind the prompt, and
    trained (iGRPO, arXiv:2602.09000)."""

    kind: Literal["draft"] = "draft"
    drafts: int = Field(4, ge=1)
    """Drafts of each task; learner.group_size is the number of answers with a draft. At least 1."""
    note: str = Field("Here is a first draft of an answer: {draft}\nImprove it.", max_length=MAX_FRAME)
    """Words around the draft, which stands where `{draft}` is."""

    @field_validator("note")
    @classmethod
    def _with_draft(cls, note: str) -> str:
        return with_place(note, DRAFT)

    def first(self, group_size: int) -> int:
        return self.drafts

    def largest(self, group_size: int) -> int:
        return max(group_size, self.drafts)


class BranchFamily(Family):
    """Some members of a group are whole episodes; the others begin in the middle of these, behind an observation (ARPO,
    arXiv:2507.19849; AEPO, arXiv:2510.14545). The actor repeats the actions of the beginning, so the environment must
    answer them alike. `learner.algorithm.shared_prefix` says how the beginning is credited."""

    kind: Literal["branch"] = "branch"
    rollouts: int = Field(8, ge=1)
    """Whole episodes of each task; the rest of learner.group_size are branches, and whole episodes where too few
    branches are drawn. At least 1, below learner.group_size."""
    whole: Literal["fixed", "entropy_gap"] = "fixed"
    """Number of whole episodes. "fixed": `rollouts`. "entropy_gap": `rollouts` come first and decide it: the more
    uncertain their first answer is than all their answers in the mean, the more of learner.group_size are whole (AEPO).
    The others of these are a further group, so that a family has up to three."""
    gap_weight: float = Field(0.5, ge=0)
    """Weight of this difference, in nats, in a sigmoid. At least 0."""
    root_tokens: int = Field(50, ge=1)
    """Tokens of the first answer over whose -log p its uncertainty is averaged for the difference. At least 1."""
    penalty: float = Field(0.0, ge=0, le=1)
    """Amount by which each turn in a row that some episode of the group branches at makes the next branch less likely:
    the draw is multiplied by 1 - penalty times their number (AEPO, where it is 0.05). 0 to 1."""
    where: Literal["uncertain", "anywhere"] = "uncertain"
    """Observations behind which a branch begins. "uncertain": with the probability 1/2 + `weight` times the change of
    the uncertainty since the episode's first answer; "anywhere": with the probability 1/2."""
    weight: float = Field(0.2, ge=0)
    """Weight of the change of the uncertainty, in nats. At least 0."""
    tokens: int = Field(20, ge=1)
    """Tokens of an answer over whose -log p the uncertainty is averaged. At least 1."""

    @property
    def stages(self) -> int:
        return 2 if self.whole == "entropy_gap" else 1

    def first(self, group_size: int) -> int:
        return self.rollouts

    def largest(self, group_size: int) -> int:
        return _larger_part(self.rollouts, group_size)


class RetryFamily(SolvedFamily):
    """Some members of a group are first episodes. Those that fail are tried again: with what the policy says of its
    mistake behind the prompt (R3L, arXiv:2601.03715), or from behind the mistake (Agent-R, arXiv:2501.11425)."""

    kind: Literal["retry"] = "retry"
    rollouts: int = Field(4, ge=1)
    """First episodes of each task; the rest of learner.group_size are retries, shared out evenly among the first
    episodes that are wrong. At least 1, below learner.group_size."""
    begin: Literal["prompt", "named", "parting"] = "prompt"
    """Where a retry begins. "prompt": with the first prompt; "named": behind the steps that the reflection keeps, by
    its last "keep K steps"; "parting": behind the first step that differs from a right episode of the
    group, the most similar one that leaves the wrong one something to go on with; a wrong one without such a place is
    not retried. Retries from the middle repeat the steps before, so the environment must answer them alike."""
    reflection: str = Field("", max_length=MAX_FRAME)
    """Words behind the prompt that ask for a reflection on a wrong episode, which stands where `{attempt}` is. The
    first answer is the reflection; none is trained. Empty: there are no reflections."""
    note: str = Field("An earlier attempt was wrong:\n{attempt}\nAvoid its mistake.", max_length=MAX_FRAME)
    """Words behind the prompt of a retry. The reflection stands where `{reflection}` is, the wrong episode where
    `{attempt}` is. Empty, with begin = "parting" only: a retry has no note."""
    clean: bool = False
    """True if a retry is trained behind the prompt without the note, so that the policy learns to answer as if it had
    read it. Its importance ratio then compares two prompts."""
    mask_shared: bool = False
    """True if the steps of a wrong episode that a retry repeats are left out of its training, so that the reward is
    credited to what differs."""

    @model_validator(mode="after")
    def _has_its_texts(self) -> "RetryFamily":
        if self.reflection:
            with_place(self.reflection, ATTEMPT, "reflection")
            with_place(self.note, REFLECTION)
        elif REFLECTION in self.note:
            raise ValueError(
                f"note has {REFLECTION} but there is none; set reflection to the words that ask for it, or use "
                f"{ATTEMPT}"
            )
        elif self.begin == "named":
            raise ValueError(
                'begin is "named" but no reflection names a step; set reflection to the words that ask for it, or '
                'use begin = "parting"'
            )
        if not self.note and (self.clean or self.begin != "parting"):
            what = "clean is true" if self.begin == "parting" else f'begin is "{self.begin}"'
            raise ValueError(
                f"note is empty but {what}: a retry would be nothing but a further answer; write a note"
            )
        if self.begin == "parting" and self.rollouts < 2:
            raise ValueError(
                'begin is "parting" but rollouts is 1: a wrong episode needs a right one beside it; raise rollouts'
            )
        if self.mask_shared and self.begin == "prompt":
            raise ValueError(
                'mask_shared is true but begin is "prompt", so that a retry repeats no step; use begin = "named" or '
                '"parting", or take mask_shared out'
            )
        return self

    @property
    def stages(self) -> int:
        return 2 if self.reflection else 1

    def first(self, group_size: int) -> int:
        return self.rollouts

    def largest(self, group_size: int) -> int:
        return _larger_part(self.rollouts, group_size)


class GuidedFamily(SolvedFamily):
    """A group in which nobody solved the task asks for one answer to each of several other tasks. Then the group is
    sampled again with the right ones of these as examples behind the prompt (the seeding of XRPO, arXiv:2510.06672)."""

    kind: Literal["guided"] = "guided"
    examples: int = Field(2, ge=1)
    """Most solved examples behind a prompt; those whose prompts share most tokens with it. At least 1, at most
    `candidates`."""
    candidates: int = Field(8, ge=1)
    """Other tasks that are answered once each, to find examples; they are not trained. At least 1."""
    note: str = Field(
        "Here are solved examples:\n{examples}\nNow solve the task above.", max_length=MAX_FRAME
    )
    """Words around the examples, which stand where `{examples}` is."""

    @model_validator(mode="after")
    def _has_its_texts(self) -> "GuidedFamily":
        with_place(self.note, EXAMPLES)
        if self.examples > self.candidates:
            raise ValueError(
                f"examples is {self.examples} but candidates is {self.candidates}: so many are never there; raise "
                "candidates, or lower examples"
            )
        return self

    @property
    def stages(self) -> int:
        return 2

    def largest(self, group_size: int) -> int:
        return max(group_size, self.candidates)


class SteeredFamily(Conversations, SolvedFamily):
    """Some members of a group see a solved task behind their prompt. Those that are right are trained behind the plain
    prompt, beside the others, with a bonus that falls (ICPO, arXiv:2510.26519). The loss of these tokens is an entry of
    `learner.algorithm.by_origin` with origin "guided"; without one, their importance ratio compares two prompts."""

    kind: Literal["steered"] = "steered"
    members: int = Field(1, ge=1)
    """Answers behind a demonstration; the rest of learner.group_size are plain. At least 1, at most
    learner.group_size - 2, so that two plain answers are compared."""
    examples: int = Field(1, ge=1)
    """Solved tasks in a demonstration, drawn at random from `file` or the environment's solutions. At least 1."""
    own: bool = False
    """True if the demonstration is the solution of the task itself, which the environment gives in `StepResult.hints`:
    the suite rows does with env.params.hint = COLUMN. Then no other solution is read."""
    note: str = Field(
        "Here is a solved example:\n{examples}\nNow solve the task above.", max_length=MAX_FRAME
    )
    """Words around the solved tasks, which stand where `{examples}` is."""
    bonus: float = Field(1.0, ge=0)
    """Reward of a right answer behind a demonstration, beside its own, at version 0. At least 0."""
    until_version: int = Field(400, ge=1)
    """Policy version at which the bonus has fallen to 0, linearly. At least 1."""

    @field_validator("note")
    @classmethod
    def _with_examples(cls, note: str) -> str:
        return with_place(note, EXAMPLES)

    def first(self, group_size: int) -> int:
        return max(1, group_size - self.members)

    def largest(self, group_size: int) -> int:
        return max(self.first(group_size), self.members)


class TaughtFamily(SolvedFamily):
    """Groups that nobody solved are answered by teachers, while the run goes on. Their right answers take the place of
    some members, the likeliest to the policy first (AMPO, arXiv:2510.02227). The environment values them as it values
    those of the policy. Their loss is an entry of `learner.algorithm.by_origin` with origin "taught"."""

    kind: Literal["taught"] = "taught"
    teachers: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = Field(
        min_length=1, strict=False
    )
    """Names in `[[actor.teachers]]`. Each is asked for one answer to a task; a name that stands twice, for two."""
    members: int = Field(2, ge=1)
    """Most members of a group that are replaced, the last ones. At least 1, below learner.group_size."""
    value: float = 1.0
    """Least return of a right answer of a teacher, with which it is compared in its group."""
    deadline_s: float = Field(300.0, gt=0)
    """Seconds that a family waits for the teachers. Then the group is trained, or dropped, without them. Above 0."""

    def largest(self, group_size: int) -> int:
        return max(group_size, len(self.teachers))


class ProposeFamily(SolvedFamily):
    """Some groups with a wrong answer ask the policy for a new instruction (INSPO, arXiv:2512.01945). It may take the
    place of the worst one of `learner.selection` of kind "population". The group is trained as it is; the proposal is
    not."""

    kind: Literal["propose"] = "propose"
    every: int = Field(4, ge=1)
    """Only groups whose number is a multiple of this ask for a proposal. At least 1."""
    longest: int = Field(200, ge=1, le=1000)
    """Most characters of a proposal, the last line of an answer that is not empty. 1 to 1,000. It must have a letter,
    and none of < > [ ] |, of which marks of chat templates are made, and no character that is unprintable."""
    most: int = Field(64, ge=1, le=1024)
    """Proposals that enter the population during a run, at most. All of them stay in the checkpoint. 1 to 1,024."""
    note: str = Field(
        "This instruction stood behind the task: {instruction}\nAn answer to it was wrong: {attempt}\nDo not answer. "
        "Write a better instruction for tasks like this one, in one line.",
        max_length=MAX_FRAME,
    )
    """Words around the instruction of the group and one of its wrong answers, which stand where `{instruction}` and
    `{attempt}` are."""
    lessons: tuple[Instruction, ...] = Field((), strict=False, max_length=64)
    """Instructions beside those of the population that the lessons of a tiny model teach it to propose; see
    `model.tiny.warm_start.lessons`. Answers are right behind the first one of them alone. Others read nothing of it."""

    @field_validator("note")
    @classmethod
    def _with_both(cls, note: str) -> str:
        return with_place(with_place(note, ATTEMPT), INSTRUCTION)


FamilyConfig = Annotated[
    HintFamily
    | DraftFamily
    | BranchFamily
    | RetryFamily
    | GuidedFamily
    | SteeredFamily
    | JudgeFamily
    | VerdictFamily
    | RefineFamily
    | TaughtFamily
    | ProposeFamily,
    Field(discriminator="kind"),
]


def quoted_answers(family: FamilyConfig | None) -> int:
    """Return the least number of answers that stand in a prompt with a note.

    Example:
        >>> quoted_answers(GuidedFamily(examples=3)), quoted_answers(RetryFamily(begin="parting", note="", rollouts=2))
        (3, 0)
    """
    match family:
        case DraftFamily() | RefineFamily() | VerdictFamily():
            return 1
        case ProposeFamily():
            # The instruction may be one that the policy has written.
            return 2
        case RetryFamily():
            return max(family.reflection.count(ATTEMPT), sum(map(family.note.count, (ATTEMPT, REFLECTION))))
        case GuidedFamily() | SteeredFamily():
            return family.examples
        case JudgeFamily():
            return family.answers
    return 0
