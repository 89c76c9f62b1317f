"""Retries of wrong episodes and examples for unsolved tasks: what the cards of R3L, Agent-R and XRPO say.

The slow twins are written from the cards, letter by letter. Tokens are letters here.
"""

from dataclasses import replace

import numpy as np
import pytest

from learner.families.branching import kept_steps, parting_step, prefix_of
from learner.families.family import UNBEGUN, ChildTask, FamilyStage, TaskFamily
from learner.families.notes import filled, other_tasks, own_lines, similarity, transcript
from learner.families.reactions import Surroundings, joined, react, settle
from learner.settings.families import GuidedFamily, RetryFamily
from learner.trajectory import Trajectory, Unit
from protocol import names
from protocol.messages.episodes import Reward, Turn
from protocol.messages.fields import MAX_PREFIX_BYTES, MAX_TEXT
from tests.oracle.test_credit_recipes import firsts_of, group_of

RNG = np.random.default_rng(61)
R3L = RetryFamily(
    rollouts=2, begin="named", reflection="failed: {attempt}", note="note: {reflection}", clean=True, mask_shared=True
)  # fmt: skip
AGENT_R = RetryFamily(rollouts=2, begin="parting", note="", mask_shared=False)
GUIDED = GuidedFamily(examples=2, candidates=4, note="seen: {examples}")


def letters(token_ids):
    return "".join(map(chr, token_ids))


def told(name, *said, correct=False, prompt="Q", group="0g3", repeated=0):
    """Return an episode: its prompt, then answers and observations in turns; the first answers may be repeated ones."""
    texts, turns, end, mask = [prompt, *said], [], 0, []
    for n, text in enumerate(texts):
        action = n % 2 == 1 and n > 2 * repeated
        turns.append(Turn(n, end, end + len(text), action))
        mask += [action] * len(text)
        end += len(text)
    sampled = np.array(mask)
    return Trajectory(
        trajectory_id=f"{name}.0", group_id=group, group_size=2, env="e", status="finished", purpose="train",
        token_ids=np.array(list(map(ord, "".join(texts))), np.int32), action_mask=sampled,
        logp_behaviour=np.where(sampled, -np.arange(end, dtype=np.float32) / 8, 0).astype(np.float32),
        policy_version=np.where(sampled, 4, -1).astype(np.int32), turns=turns,
        rewards=[Reward("score", turns[-1].index, float(correct))], correct=correct,
    )  # fmt: skip


def stage(number, *members):
    group = names.stage_id("0g3", number)
    return FamilyStage(group, group, [replace(t, group_id=group) for t in members])


def around(group_size=4, room=999):
    return Surroundings(group_size, letters, room, seed=5)


def ids(trajectories):
    return [t.trajectory_id for t in trajectories]


def trained_letters(t):
    return letters(t.token_ids[t.learned_mask])


# --- R3L, arXiv:2601.03715 --------------------------------------------------------------------------------

WRONG = told("0g3.0", "a$", "|1", "b$", "|2", "c$")
RIGHT = told("0g3.1", "a$", "|1", "d$", "|3", "e$", correct=True)


def slow_amplified(returns):
    """The card's rule by a loop: alpha is 3, and a return of 1 has the advantage 1."""
    mean = sum(returns) / len(returns)
    advantages = []
    for r in returns:
        if r >= 1:
            advantages.append(1.0)
        elif r - mean >= 0:
            advantages.append(3 * (r - mean))
        else:
            advantages.append(r - mean)
    return advantages


@pytest.mark.parametrize(
    ("returns", "expected"),
    [((1, 0, 0, 0), (1, -0.25, -0.25, -0.25)), ((0.5, 0, 0, 0.1), (1.05, -0.15, -0.15, -0.05))],
)
def test_positive_advantages_are_amplified(returns, expected):
    """Card B42: R = (1,0,0,0) gives (1, -.25, -.25, -.25); R = (.5,0,0,.1) gives (1.05, -.15, -.15, -.05)."""
    assert slow_amplified(returns) == pytest.approx(expected)
    members = group_of("g", [{"score": float(r)} for r in returns])
    np.testing.assert_allclose(firsts_of("r3l", members), expected, atol=1e-12)


def test_amplified_advantages_against_a_loop():
    for _ in range(20):
        returns = RNG.choice([0.0, 0.1, 0.4, 0.9, 1.0], 8).tolist()
        members = group_of("g", [{"score": r} for r in returns])
        np.testing.assert_allclose(firsts_of("r3l", members), slow_amplified(returns), atol=1e-12)


def family_of(config, *stages):
    """Add groups as they are delivered; return the family and what it asked for after each."""
    family, asked = TaskFamily("0g3"), [[]]
    for each in stages:
        family.add_stage(each, asked[-1])
        asked.append(react(config, family, around()))
    return family, asked[1:]


def reflections(*texts):
    return stage(1, *(told(f"0g3r1.{n}", text, prompt="Qfailed") for n, text in enumerate(texts)))


def test_each_wrong_episode_is_reflected_on_and_tried_again_from_the_step_that_is_named():
    """Card B42: half of the budget are first episodes, half reflect and retry."""
    family, asked = family_of(R3L, stage(0, WRONG, RIGHT), reflections("keep 1 steps$", "keep 2 steps$"))
    said = "Step 1: a$\n|1\nStep 2: b$\n|2\nStep 3: c$"
    assert asked[0] == [ChildTask(f"failed: {said}")] * 2
    assert [child.note for child in asked[1]] == ["note: keep 1 steps$", "note: keep 2 steps$"]
    assert [letters(np.frombuffer(child.start.token_ids, "<i4")) for child in asked[1]] == [
        "Qa$|1",
        "Qa$|1b$|2",
    ]
    assert [child.start.parent for child in asked[1]] == ["0g3.0.0"] * 2
    assert family_of(R3L, *family.stages)[1] == asked, "the same after a restart"


def test_two_wrong_episodes_share_the_retries():
    other = told("0g3.1", "z$")
    _, asked = family_of(R3L, stage(0, WRONG, other), reflections("keep 9$", "keep 1$"))
    assert [child.note for child in asked[0]] == [f"failed: {transcript(t, letters)}" for t in (WRONG, other)]
    assert [child.start for child in asked[1]] == [None, None], "no step is there: it begins anew"


def test_a_reflection_that_does_not_come_has_no_retry_and_the_others_keep_their_episode():
    other = told("0g3.1", "y$", "|1", "z$")
    lost = stage(1, told("0g3r1.1", "keep 1$", prompt="Qfailed"))
    family, asked = family_of(R3L, stage(0, WRONG, other), lost)
    assert [child.start.parent for child in asked[1]] == ["0g3.1.0"]
    family = TaskFamily("0g3", [stage(0, WRONG, other), stage(1)])
    assert react(R3L, family, around()) == []
    assert ids(settle(R3L, family).trained) == ["0g3.0.0", "0g3.1.0"]


def test_a_group_without_a_wrong_episode_is_trained_at_once():
    family, asked = family_of(R3L, stage(0, RIGHT, RIGHT))
    assert asked == [[]]
    assert ids(settle(R3L, family).trained) == ["0g3.1.0"] * 2
    assert react(R3L, TaskFamily("0g3", [stage(0)]), around()) == []


def whole_family(config=R3L):
    """Return a family whose one retry repeated two steps behind a note, and was right."""
    retry = told("0g3r2.0", "a$", "|1", "b$", "|2", "f$", prompt="Q note: keep 2$", correct=True, repeated=2)
    return family_of(config, stage(0, WRONG, RIGHT), reflections("keep 2$"), stage(2, retry))[0]


def slow_r3l(family):
    """The card by loops: which letters are trained behind which, of each first episode and of each retry.

    The card masks "the base rollout and the retry". Base rollouts are the wrong episodes in turns, so the number of a
    retry says which one it is, whatever other episodes of the group have in common with it.
    """
    first, _, retries = (stage.members for stage in family.stages)
    wrong = [n for n, t in enumerate(first) if not t.correct]
    kept = [0] * len(first)
    for retry in retries:
        base = wrong[int(names.task_of(retry.trajectory_id).rpartition(".")[2]) % len(wrong)]
        repeated = sum(u.end <= retry.prompt_tokens and u.index % 2 for u in retry.turns)
        kept[base] = max(kept[base], repeated)
    expected = []
    for steps, t in zip(kept, first, strict=True):
        own = [letters(t.token_ids[u.start : u.end]) for u in t.turns if u.action]
        expected.append((letters(t.token_ids), "".join(own[steps:])))
    for t in retries:
        plain = letters(first[0].token_ids[: first[0].turns[0].end])
        text = plain + letters(t.token_ids[t.turns[0].end :])
        expected.append((text, letters(t.token_ids[t.action_mask])))
    return expected


def test_a_retry_is_trained_without_the_note_and_shared_steps_in_neither_episode():
    """Card B42: pivot 2, so the action tokens of the first two answers are trained nowhere."""
    family = whole_family()
    settled = settle(R3L, family)
    found = [(letters(t.token_ids), trained_letters(t)) for t in settled.trained]
    assert found == slow_r3l(family)
    assert found == [("Qa$|1b$|2c$", "c$"), ("Qa$|1d$|3e$", "a$d$e$"), ("Qa$|1b$|2f$", "f$")]
    assert {t.group_id for t in settled.trained} == {"0g3"}, "one baseline for first episodes and retries"
    assert ids(settled.dropped["reflection"]) == ["0g3r1.0.0"]


@pytest.mark.parametrize("clean", [False, True])
def test_equal_steps_of_an_episode_that_nobody_retried_are_trained(clean):
    """Card B42 with pivot 1: the right episode took the same first step, but it is not the base of the retry."""
    config = R3L.model_copy(update={"clean": clean})
    retry = told("0g3r2.0", "a$", "|1", "f$", prompt="Q note: keep 1$", correct=True, repeated=1)
    family, _ = family_of(config, stage(0, WRONG, RIGHT), reflections("keep 1$"), stage(2, retry))
    trained = settle(config, family).trained
    assert [trained_letters(t) for t in trained] == ["b$c$", "a$d$e$", "f$"]
    if clean:
        assert [(letters(t.token_ids), trained_letters(t)) for t in trained] == slow_r3l(family)


def test_each_wrong_episode_is_masked_by_its_own_retries_alone():
    """Two wrong episodes with equal first steps, retried behind different ones, against the card by loops."""
    twin = told("0g3.1", "a$", "|1", "b$", "|2", "h$")
    retries = [
        told("0g3r2.0", "a$", "|1", "f$", prompt="Q note: keep 1$", repeated=1),
        told("0g3r2.1", "a$", "|1", "b$", "|2", "g$", prompt="Q note: keep 2$", repeated=2),
    ]
    family, _ = family_of(R3L, stage(0, WRONG, twin), reflections("keep 1$", "keep 2$"), stage(2, *retries))
    found = [(letters(t.token_ids), trained_letters(t)) for t in settle(R3L, family).trained]
    assert found == slow_r3l(family)
    assert [trained for _, trained in found] == ["b$c$", "h$", "f$", "g$"]


def test_a_retry_without_its_note_keeps_what_was_sampled():
    family = whole_family()
    sampled, clean = family.stages[2].members[0], settle(R3L, family).trained[2]
    for name in ("token_ids", "logp_behaviour", "policy_version"):
        assert (
            getattr(clean, name)[clean.action_mask].tolist()
            == getattr(sampled, name)[sampled.action_mask].tolist()
        )
        assert len(getattr(clean, name)) == len(clean)
    assert (clean.policy_version[~clean.action_mask] == -1).all()
    assert (clean.logp_behaviour[~clean.action_mask] == 0).all()
    assert [(u.index, u.start, u.end, u.action) for u in clean.turns] == [
        (u.index, u.start, u.end, u.action and u.index == 5) for u in WRONG.turns
    ]
    unit = settle(R3L, family).unit(family)
    assert unit.tokens == sum(s.tokens for s in family.stages), "tokens are counted as they were sampled"
    assert [(part.unit_id, len(part.trained), list(part.dropped)) for part in unit.parts] == [
        ("0g3", 2, []), ("0g3r1", 0, ["reflection"]), ("0g3r2", 1, []),
    ]  # fmt: skip


def test_each_part_of_it_can_be_left_out():
    family = whole_family()
    noted = settle(R3L.model_copy(update={"clean": False}), family).trained
    assert letters(noted[2].token_ids) == "Q note: keep 2$a$|1b$|2f$"
    whole = settle(R3L.model_copy(update={"mask_shared": False}), family).trained
    assert [trained_letters(t) for t in whole] == ["a$b$c$", "a$d$e$", "f$"]


def test_the_step_is_the_last_one_that_is_named():
    assert [kept_steps(text) for text in ("keep 3 steps, no: Keep 2.", "keep none", "bookkeep 4")] == [
        2,
        0,
        0,
    ]


def test_a_prefix_and_a_note_that_do_not_fit_begin_anew():
    for room in (5, 999):
        family = TaskFamily("0g3", [stage(0, WRONG, RIGHT), reflections("keep 1$")])
        (child,) = react(R3L, family, around(room=room))
        assert (child.start is None) == (room == 5)
    long = told("0g3.0", "a" * (MAX_PREFIX_BYTES // 4 - 60), "|1", "b$")
    family = TaskFamily("0g3", [stage(0, long, RIGHT), reflections("keep 1" + "x" * 300)])
    (child,) = react(R3L, family, around(room=10**9))
    assert child.start is None, "note and prefix together are a part of one message"


def test_a_retry_with_note_and_prefix_is_known_by_both():
    child = ChildTask("note", prefix_of(WRONG, 3))
    retry = told("0g3r1.0", "a$", "|1", "d$", prompt="Q note", repeated=1)
    assert child.is_begun_by(retry, WRONG)
    assert not child.is_begun_by(told("0g3r1.0", "a$", "|1", "d$", repeated=1), WRONG), "without the note"
    assert not child.is_begun_by(told("0g3r1.0", "x$", "|1", "d$", prompt="Q note", repeated=1), WRONG)
    assert not child.is_begun_by(told("0g3r1.0", "a$", "|1", "d$", prompt="Q note"), WRONG), "sampled again"
    family = TaskFamily("0g3", [stage(0, WRONG)])
    family.add_stage(stage(1, told("0g3r1.0", "a$", "|1", "d$")), [child])
    assert list(settle(AGENT_R, family).unit(family).parts[1].dropped) == [UNBEGUN]


# --- Agent-R, arXiv:2501.11425 ----------------------------------------------------------------------------


def slow_splice(wrong, *rights):
    """The card by loops over letters: the bad path up to and with its first step off a good one, and what follows.

    Of several good ones the longest such beginning counts; None if the bad path goes on behind none.
    """
    text, longest = letters(wrong.token_ids), None
    for right in rights:
        steps = [
            [letters(t.token_ids[u.start : u.end]) for u in t.turns if u.index % 2] for t in (wrong, right)
        ]
        common = 0
        while common < min(map(len, steps)) and steps[0][common] == steps[1][common]:
            common += 1
        behind = 2 * (common + 1) + 1
        if behind < len(wrong.turns) and wrong.turns[behind].start > len(longest or ""):
            longest = text[: wrong.turns[behind].start]
    return longest


def test_a_retry_goes_on_behind_the_first_step_that_a_right_episode_did_not_take():
    family, asked = family_of(AGENT_R, stage(0, WRONG, RIGHT))
    assert parting_step(WRONG, RIGHT) == 1
    assert [letters(np.frombuffer(child.start.token_ids, "<i4")) for child in asked[0]] == ["Qa$|1b$|2"] * 2
    assert slow_splice(WRONG, RIGHT) == "Qa$|1b$|2"
    retry = told("0g3r1.0", "a$", "|1", "b$", "|2", "f$", correct=True, repeated=2)
    family.add_stage(stage(1, retry), asked[0])
    trained = settle(AGENT_R, family).trained
    # Card B41: every token before the revision is masked; the wrong step itself stays a bad example where it was taken.
    assert [trained_letters(t) for t in trained] == ["a$b$c$", "a$d$e$", "f$"]


def spoken(number, answers, **how):
    return told(f"0g3.{number}", *"|#|".join(answers).split("|"), **how)


def test_places_against_a_slow_twin():
    found = set()
    for _ in range(80):
        said = [[*RNG.choice(["a$", "b$"], int(RNG.integers(1, 5)))] for _ in range(int(RNG.integers(2, 5)))]
        wrong, *right = (spoken(n, own, correct=bool(n)) for n, own in enumerate(said))
        _, asked = family_of(AGENT_R, stage(0, wrong, *right))
        texts = [letters(np.frombuffer(child.start.token_ids, "<i4")) for child in asked[0]]
        expected = slow_splice(wrong, *right)
        assert texts == ([] if expected is None else [expected] * 2)
        found.add((len(right), expected is None))
    assert len(found) == 6, "with and without a place, for one, two and three right episodes"


def test_only_pairs_of_a_right_and_a_wrong_episode_are_used():
    """Card B41: pair (i, j) if Q_i > Q_j and the good leaf is above a bound; the most similar right one is the pair."""
    assert family_of(AGENT_R, stage(0, WRONG, WRONG))[1] == [[]]
    assert family_of(AGENT_R, stage(0, RIGHT, RIGHT))[1] == [[]]


def test_the_nearest_right_episode_behind_which_the_wrong_one_went_on_is_the_pair():
    """Nearer parts at the last step, which nothing follows: the splice behind step 2 is that of the other one."""
    nearer = told("0g3.2", "a$", "|1", "b$", "|2", "g$", correct=True)
    for right in ([RIGHT, nearer], [nearer, RIGHT]):
        family, asked = family_of(AGENT_R, stage(0, WRONG, *right))
        starts = [letters(np.frombuffer(child.start.token_ids, "<i4")) for child in asked[0]]
        assert starts == ["Qa$|1b$|2"] * 2
        assert family_of(AGENT_R, *family.stages)[1] == asked, "the same after a restart"


def test_a_wrong_episode_without_a_place_is_not_tried_again():
    nearer = told("0g3.2", "a$", "|1", "b$", "|2", "g$", correct=True)
    family, asked = family_of(AGENT_R, stage(0, WRONG, nearer))
    assert asked == [[]]
    assert ids(settle(AGENT_R, family).trained) == ["0g3.0.0", "0g3.2.0"]
    short = told("0g3.3", "z$")
    children = family_of(AGENT_R, stage(0, short, WRONG, RIGHT))[1][0]
    assert [child.start.parent for child in children] == ["0g3.0.0"] * 2, "the other one has all retries"
    narrow = TaskFamily("0g3", [stage(0, WRONG, RIGHT)])
    assert react(AGENT_R, narrow, around(room=5)) == [], "the beginning does not fit"


def test_a_reflection_that_leaves_no_room_for_a_beginning_has_no_retry():
    config = RetryFamily(
        rollouts=2,
        begin="parting",
        reflection="failed: {attempt}",
        note="note: {reflection}",
        mask_shared=True,
    )
    # Beside this beginning a note has room for 148 bytes.
    long = told("0g3.0", "a" * (MAX_PREFIX_BYTES // 4 - 40), "|1", "b$", "|2", "c$")
    family = TaskFamily("0g3", [stage(0, long, told("0g3.1", "d$", correct=True))])
    for expected in (2, 1):
        asked = react(config, family, around(room=10**9))
        assert len(asked) == expected
        family.add_stage(reflections("x" * 200, "yes$"), asked)
    assert [(child.note, child.start.parent) for child in asked] == [("note: yes$", "0g3.0.0")]


# --- XRPO's seeding, arXiv:2510.06672 ---------------------------------------------------------------------

FAILED = [told(f"0g3.{n}", "x$", prompt="sys\nabcd\nend") for n in range(2)]


def looked_up(*prompts, right=True):
    return stage(
        1,
        *(told(f"0g3r1.{n}", f"{n}$", prompt=f"sys\n{p}\nend", correct=right) for n, p in enumerate(prompts)),
    )


def test_a_task_without_success_is_asked_again_with_the_two_nearest_solved_examples():
    """Card A6: zero-success prompts get K = 2 nearest solved examples."""
    family, asked = family_of(GUIDED, stage(0, *FAILED), looked_up("wxyz", "abcz", "abyz"))
    assert [child.note for child in asked[0]] == [""] * 4
    assert len({child.index for child in asked[0]}) == 4
    assert 3 not in {child.index for child in asked[0]}, "another task than its own"
    assert asked[1] == [ChildTask("seen: abcz\n1$\n\nabyz\n2$")] * 4
    assert family_of(GUIDED, *family.stages)[1] == asked, "the same after a restart"
    guided = stage(
        2, *(told(f"0g3r2.{n}", "y$", prompt="sys\nabcd\n\nseen", correct=bool(n)) for n in range(4))
    )
    family.add_stage(guided, asked[1])
    assert react(GUIDED, family, around()) == []
    settled = settle(GUIDED, family)
    assert ids(settled.trained) == ids(guided.members)
    assert {name: len(ts) for name, ts in settled.dropped.items()} == {"unguided": 2, "example": 3}


def test_with_any_success_or_without_any_example_nothing_more_is_asked_for():
    solved = told("0g3.2", "y$", correct=True)
    assert family_of(GUIDED, stage(0, *FAILED, solved))[1] == [[]]
    family, asked = family_of(GUIDED, stage(0, *FAILED), looked_up("wxyz", right=False))
    assert (len(asked[0]), asked[1]) == (4, [])
    settled = settle(GUIDED, family)
    assert ids(settled.trained) == ids(FAILED)
    assert (len(settled.dropped["unguided"]), len(settled.dropped["example"])) == (0, 1)
    assert react(GUIDED, TaskFamily("0g3", [stage(0)]), around()) == []
    assert family_of(GUIDED, stage(0, *FAILED), looked_up("abcd"))[1][1] == [], (
        "an example of the task itself"
    )
    family = TaskFamily("0g3", [stage(0, *FAILED), looked_up("wxyz"), stage(2)])
    assert ids(settle(GUIDED, family).trained) == ids(FAILED), "the group with examples is lost"


def test_the_examples_are_of_different_tasks():
    """Card A6: K = 2 nearest prompts. Two numbers may stand for one task, of which the first right answer counts."""
    _, asked = family_of(GUIDED, stage(0, *FAILED), looked_up("wxyz", "abcz", "abcz", "abyz"))
    assert asked[1] == [ChildTask("seen: abcz\n1$\n\nabyz\n3$")] * 4
    _, asked = family_of(GUIDED, stage(0, *FAILED), looked_up("abcz", "abcz"))
    assert asked[1] == [ChildTask("seen: abcz\n0$")] * 4, "fewer than K, not one task twice"


def slow_similarity(a, b):
    both = [c for c in set(a) if c in b]
    return len(both) / len(set(a + b))


def test_similarity_against_a_loop_and_tasks_within_their_range():
    for _ in range(20):
        a, b = ("".join(RNG.choice(list("abcdef"), 5)) for _ in range(2))
        assert similarity(told("a", "x", prompt=a), told("b", "x", prompt=b)) == pytest.approx(
            slow_similarity(a, b)
        )
        index = int(RNG.integers(0, 30))
        tasks = other_tasks(index, 4, np.random.default_rng([1, index]))
        assert len(set(tasks)) == 4
        assert all(0 <= each <= max(index, 4) and each != index for each in tasks)
        assert tasks == other_tasks(index, 4, np.random.default_rng([1, index]))


# --- both ---------------------------------------------------------------------------------------------------


def test_texts_of_episodes():
    assert transcript(told("t", "a"), letters) == "a"
    assert transcript(replace(told("t", "a"), turns=[]), letters) == "a"
    assert own_lines("same\nx\ny", "same\nx\ny") == "same\nx\ny"
    assert own_lines("a\nb", "b\na") == "a\nb"
    long = filled("{attempt}{reflection}!", {"{attempt}": "x" * MAX_TEXT, "{reflection}": "y"})
    assert len(long) <= MAX_TEXT
    assert long.endswith("y!"), "one text leaves room for the other"


@pytest.mark.parametrize("clean", [False, True])
def test_a_recorded_family_is_trained_as_it_was(clean):
    config = R3L.model_copy(update={"clean": clean})
    family = whole_family(config)
    was = settle(config, family).unit(family)
    recorded = [Unit(s.unit_id, s.unit_id, list(s.members)) for s in family.stages if s.number != 1]
    (again,) = joined(config, recorded)
    assert [letters(t.token_ids) for t in again.trajectories] == [
        letters(t.token_ids) for t in was.trajectories
    ]
    assert [trained_letters(t) for t in again.trajectories] == [trained_letters(t) for t in was.trajectories]
