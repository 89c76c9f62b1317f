"""Tasks of `benchmarks.claims`: what they show, mark and reward."""

import asyncio

import numpy as np
import pytest

from actors.play_steps import with_note
from benchmarks.claims.claims import TASKS
from benchmarks.envs.dials import DialsSuite, dial
from benchmarks.envs.hops import HopsSuite, HopsTask, task_from
from benchmarks.envs.several_rewards import NAMES, SeveralRewardsSuite, rewards_of
from envs.errors import EnvError
from envs.registry import make_suite
from envs.scoring.scorer import Question
from launch.run_file.load import load

GRAPH = "Solve the following task:\n|4 1|1 7|2 3|0 9|7 6|3 0|9 5|2 4/2 6 = \n"
HOPS = HopsTask({"1": "4", "4": "7", "5": "2"}, ("1", "4", "7"), "xyz")


class KnownScorer:
    """Stands for the library: there is one question."""

    async def entry(self, index, split):
        return Question(GRAPH, "2 4 1 7 6", 0, {})


class KnownHops(HopsSuite):
    """A suite whose only task is `HOPS`."""

    def __init__(self, max_turns=8):
        self.scorer, self.max_turns = KnownScorer(), max_turns

    def task(self, question):
        return HOPS


def played(suite, actions, index=0, split="train"):
    async def play():
        episode = suite.episode()
        await episode.reset({"index": index, "split": split})
        results = [await episode.step(action) for action in actions]
        await episode.close()
        return results

    return asyncio.run(play())


def test_a_graph_of_the_library_becomes_a_store_and_a_way():
    task = task_from(Question(GRAPH, "2 4 1 7 6", 0, {}), np.random.default_rng(0))
    assert task.edges == {"4": "1", "1": "7", "3": "0", "0": "9", "7": "6", "9": "5"}
    assert task.answer == "6"
    assert task.way == ("4", "1", "7", "6")[-len(task.way) :]
    seen = task.question[:2]
    for _ in range(len(task.way) - 1):
        seen = task.get(seen[0])
    assert seen == "60"


def test_a_question_of_another_form_is_named():
    with pytest.raises(EnvError, match="not a path_star question: 'What"):
        task_from(Question("What is 1 + 1?", "2", 0, {}), np.random.default_rng(0))


def test_calls_are_marked_and_only_the_answer_is_rewarded():
    results = played(KnownHops(), ["g1", "g5", "g4", "=7"])
    assert [r.observation["content"] for r in results[:-1]] == ["41", "2-", "70"]
    assert [r.marks for r in results] == [
        {"anchor": "12", "calls": 1.0},
        {"anchor": "41", "calls": 1.0},
        {"anchor": "2-", "calls": 1.0},
        {"anchor": "70", "calls": 0.0},
    ]
    assert [r.rewards["answer"] for r in results] == [0.0, 0.0, 0.0, 1.0]
    assert (results[-1].done, results[-1].correct) == (True, True)


@pytest.mark.parametrize("last", ["=4", "7", "", "g1"])
def test_all_but_the_answer_ends_with_nothing(last):
    *_, end = played(KnownHops(max_turns=4), ["g1", "g4", "g4", last])
    assert (end.done, end.correct, end.rewards) == (True, False, {"answer": 0.0})


@pytest.mark.parametrize("settings", [{"hops": 0}, {"hops": 4}, {"hops": 3, "max_turns": 3}])
def test_hops_that_cannot_be(settings):
    with pytest.raises(EnvError, match="choose 1 to 3 hops"):
        HopsSuite(**settings)


@pytest.mark.parametrize(
    ("action", "met"),
    [("=nus", "right format short"), ("nus", "right short"), ("=nus..", "right format"), ("=sun", "format short"),
     ("=", ""), ("=nus .", ""), ("==nus", ""), ("", "")],
)  # fmt: skip
def test_rewards_by_name(action, met):
    assert " ".join(name for name, value in rewards_of(action, "nus").items() if value) == met


@pytest.fixture(scope="module")
def words():
    suite = SeveralRewardsSuite(sandbox="process", seed=1)
    yield suite
    asyncio.run(suite.close())


def test_a_right_answer_gets_all_rewards_and_a_slightly_lower_misleading_one(words):
    word = words.scorer.entry_now(3, "train").fields["word"]
    (end,) = played(words, ["=" + word[::-1]], index=3)
    assert tuple(end.rewards) == NAMES == words.facts().reward_names
    assert (end.done, end.correct) == (True, True)
    assert not played(words, [word[::-1]], index=3)[0].correct
    right = [words.rewards("=ab", "ab") for _ in range(400)]
    wrong = [words.rewards("=ba", "ab") for _ in range(400)]
    mean = lambda rows, name: np.mean([row[name] for row in rows])  # noqa: E731
    assert mean(wrong, "misleading") - mean(right, "misleading") == pytest.approx(0.01, abs=0.001)
    heavy = np.array([row["heavy"] for row in right + wrong])
    assert 0.02 < (heavy > 0).mean() < 0.09
    assert heavy.max() > 30


def test_demonstrations_meet_each_reward_by_chance(words):
    met = [
        rewards_of(talk[-1]["content"], talk[0]["content"][::-1])
        for talk in (words.demonstration(i, "train") for i in range(200))
    ]
    for name in ("right", "format", "short"):
        assert 0.35 < np.mean([rewards[name] for rewards in met]) < 0.65


@pytest.mark.parametrize("settings", [{"known": 1.5}, {"formed": -0.1}, {"longest": 2}])
def test_several_rewards_that_cannot_be(settings):
    with pytest.raises(EnvError, match="="):
        SeveralRewardsSuite(**settings)


def test_a_lock_pays_all_or_nothing_and_brings_its_combination_as_the_hint():
    suite = DialsSuite()
    combinations = [suite.combination(lock) for lock in range(suite.locks)]
    assert len(set(combinations)) == suite.locks
    assert suite.facts().hints
    for index, split in ((2, "train"), (6, "heldout")):
        (right,) = played(suite, [combinations[2]], index=index, split=split)
        assert (right.rewards, right.correct, right.done) == ({"opened": 1.0}, True, True)
        for action in (combinations[1], combinations[2][:-1], combinations[2] + "2", ""):
            (wrong,) = played(suite, [action], index=index, split=split)
            assert (wrong.rewards, wrong.correct) == ({"opened": 0.0}, False)
            assert wrong.hints == (combinations[2],)


def test_demonstrations_of_locks_follow_hints_and_know_no_combination():
    suite = DialsSuite()
    talks = [suite.demonstration(index, "train") for index in range(800)]
    hinted = [talk for talk in talks if "\n" in talk[0]["content"]]
    assert 0.8 < len(hinted) / len(talks) < 0.95
    for question, answer in hinted:
        letter, hint = question["content"].split("\n\n")
        assert [question] == with_note([{"role": "user", "content": letter}], hint)
        assert answer["content"].startswith(hint)
        assert 1 <= len(hint) < suite.dials
    for place in range(suite.dials):
        shown = [talk[1]["content"][place] for talk in talks]
        assert set(shown) == set(dial(place))
        assert max(map(shown.count, dial(place))) < 0.32 * len(shown)
    combinations = {suite.combination(lock) for lock in range(suite.locks)}
    assert not combinations & {talk[1]["content"] for talk in talks}
    assert suite.demonstration(3, "train") == suite.demonstration(3, "train")


@pytest.mark.parametrize("settings", [{"dials": 0}, {"dials": 10}, {"locks": 0}, {"locks": 27}])
def test_locks_that_cannot_be(settings):
    with pytest.raises(EnvError, match="choose 1 to 9 dials, and 1 to 26 locks"):
        DialsSuite(**settings)


def test_a_lake_is_crossed_in_letters_and_every_turn_has_its_state():
    pytest.importorskip("gymnasium", reason="the extra gym is not installed")
    from benchmarks.envs.lake import LakeSuite, lake_maps

    suite = LakeSuite(ice=0.99, lakes=2)
    env = suite.episode()
    first = env.reset({"index": 0, "split": "train"})[0]["content"]
    assert first[0] in "AB"
    assert first[1] == "a"
    results = [env.step(action) for action in "dddrrr"]
    assert [r.marks["anchor"][1] for r in results] == list("aeimno")
    assert [r.rewards["reward"] for r in results] == [0, 0, 0, 0, 0, 1]
    assert (results[-1].done, results[-1].correct) == (True, True)
    assert len(set(lake_maps(4, 0.8, 4))) == 4


def test_a_random_walk_seldom_crosses_a_wide_lake():
    pytest.importorskip("gymnasium", reason="the extra gym is not installed")
    from benchmarks.envs.lake import Lakes

    def crossed(attempts=300, **settings):
        env, rng, found = Lakes(**settings), np.random.default_rng(0), 0.0
        for attempt in range(4 * attempts):
            env.reset(seed=2 * attempt)
            over = False
            while not over:
                _, reward, ended, truncated, _ = env.step(int(rng.integers(4)))
                over = ended or truncated
            found += reward
        return found / (4 * attempts)

    assert 0.0 < crossed(size=5, most_steps=24) < 0.5 * crossed()


def test_training_and_evaluation_see_all_lakes():
    pytest.importorskip("gymnasium", reason="the extra gym is not installed")
    from benchmarks.envs.lake import LakeSuite

    suite = LakeSuite(lakes=3)
    for split in ("train", "heldout"):
        assert {suite.demonstration(i, split)[0]["content"][0] for i in range(30)} == set("ABC")
    walk = suite.demonstration(0, "train")
    assert {m["content"] for m in walk if m["role"] == "assistant"} <= set("ldru")
    assert len(walk) <= 32
    with pytest.raises(EnvError, match="choose a size from 2 to 6"):
        LakeSuite(size=7)
    with pytest.raises(EnvError, match="lakes = 2: 1000 draws gave 1 different maps"):
        LakeSuite(ice=1.0, lakes=2)


def test_a_door_of_the_benchmark_fits_its_limits_and_a_random_walk_seldom_gets_through():
    pytest.importorskip("minigrid", reason="the extra minigrid is not installed")
    config = load(TASKS / "doors.toml")
    limit = config.env.params["kwargs"]["max_steps"]

    def actions(slips, count):
        suite = make_suite(config.env.name, {**config.env.params, "slips": slips})
        return [
            len(suite._walk(np.random.default_rng(i), suite.seed_of(i, "train"))[1]) for i in range(count)
        ]

    # The shortest way of each room leaves time for as many detours. A character is a token; each turn has three tokens
    # more than its texts (the roles, and the end of the action), and the first message one (the beginning).
    assert max(actions(0.0, 6)) <= 0.75 * limit
    observation = max(len(text) for text in _texts(config.env, 4))
    assert 1 + limit * (observation + 1 + 3) <= config.learner.sampling.max_trajectory_tokens
    assert config.learner.sampling.max_trajectory_tokens < config.generator.max_model_len
    assert limit <= config.actor.max_turns
    # Hardly a random walk earns anything; with the slips of the warm start some do.
    walked, slipped = (
        sum(count < limit for count in actions(slips, 20)) for slips in (1.0, config.env.params["slips"])
    )
    assert walked <= 1 < slipped < 20


def _texts(env, count):
    suite = make_suite(env.name, env.params)
    return [message["content"] for i in range(count) for message in suite.demonstration(i, "train")]
