"""Words to spell backward with five rewards at once: right, format, short, a misleading one, and one with heavy tails.

The word comes from reasoning-gym's `spell_backward`. An answer in the right form begins with "=", and a short one has
no dots behind the word: to "sun", "=nus" gets all of the first three rewards, and "nus.." the first one alone. A
learner chooses with `learner.reward.weights` which rewards act.
"""

import re
from typing import Any

import numpy as np

from envs.base import ChatMessage, Env, Split, StepResult, SuiteFacts
from envs.errors import EnvError
from envs.reasoning_gym_suite import task_of
from envs.scoring.questions import Family
from envs.scoring.scorer import Question, Scorer
from envs.scoring.worker_process import Sandbox

SHORTEST, MOST_DOTS = 3, 4
"""Letters of the shortest words, and most dots of a demonstration."""
MISLEADING = -0.01
"""Reward `misleading` of a right answer, before its noise."""
MISLEADING_NOISE = 0.002
"""Standard deviation of the noise of `misleading`."""
OUTLIER_SHARE, OUTLIER_MEAN = 0.05, 30.0
"""Probability of an outlier in the reward `heavy`, and the mean of its exponential distribution."""
NAMES = ("right", "format", "short", "misleading", "heavy")
"""Names of the rewards."""
_ANSWER = re.compile(r"(?P<form>=?)(?P<word>[A-Za-z]+)(?P<dots>\.*)")


def rewards_of(action: str, answer: str) -> dict[str, float]:
    """Return the rewards `right`, `format` and `short` of an answer.

    Example:
        >>> rewards_of("=nus", "nus"), rewards_of("sun..", "nus")
        ({'right': 1.0, 'format': 1.0, 'short': 1.0}, {'right': 0.0, 'format': 0.0, 'short': 0.0})
    """
    found = _ANSWER.fullmatch(action)
    if found is None:
        return {"right": 0.0, "format": 0.0, "short": 0.0}
    return {
        "right": float(found["word"] == answer),
        "format": float(found["form"] == "="),
        "short": float(found["dots"] == ""),
    }


class SeveralRewardsSuite:
    """Suite of words with five rewards. A task is solved if right, format and short are all met.

    Args:
        longest: letters of the longest word. The shortest have 3.
        known: probability that a demonstration is right; else it is the word itself.
        formed, brief: probabilities that it has the right form, and that it has no dots.
        seed, heldout_share, sandbox: see `envs.reasoning_gym_suite.ReasoningGymSuite`. The seed is also that of noise.

    Raises:
        EnvError: a probability is not in [0, 1], or there are no such words.
    """

    def __init__(
        self,
        longest: int = 4,
        known: float = 0.5,
        formed: float = 0.5,
        brief: float = 0.5,
        seed: int = 0,
        heldout_share: float = 0.125,
        sandbox: Sandbox = "auto",
    ) -> None:
        for name, value in (("known", known), ("formed", formed), ("brief", brief)):
            if not 0.0 <= value <= 1.0:
                raise EnvError(f"{name} = {value}: write a probability, 0 to 1")
        if longest < SHORTEST:
            raise EnvError(f"longest = {longest}: words have at least {SHORTEST} letters")
        words = {"min_word_len": SHORTEST, "max_word_len": longest}
        self.scorer = Scorer(Family("spell_backward", words, seed, heldout_share), sandbox)
        self._known, self._formed, self._brief, self._seed = known, formed, brief, seed
        self._noise = np.random.default_rng([seed, 1])

    def episode(self) -> Env:
        return SeveralRewardsEpisode(self)

    def facts(self) -> SuiteFacts:
        """Return the names of the rewards."""
        return SuiteFacts(reward_names=NAMES, mark_names=())

    def question(self, entry: Question) -> ChatMessage:
        """Return the message of the user: the word alone."""
        return {"role": "user", "content": entry.fields["word"]}

    def rewards(self, action: str, answer: str) -> dict[str, float]:
        """Return all rewards of an answer. Noise is drawn in the order of calls."""
        met = rewards_of(action, answer)
        outlier = self._noise.random() < OUTLIER_SHARE
        return {
            **met,
            "misleading": MISLEADING * met["right"] + float(self._noise.normal(0.0, MISLEADING_NOISE)),
            "heavy": float(self._noise.exponential(OUTLIER_MEAN)) if outlier else 0.0,
        }

    def demonstration(self, index: int, split: Split) -> list[ChatMessage]:
        """Return an answer that meets each of the first three rewards by chance. Blocks."""
        entry = self.scorer.entry_now(index, split)
        rng = np.random.default_rng([self._seed, index, 2])
        word = entry.answer if rng.random() < self._known else entry.fields["word"]
        form = "=" if rng.random() < self._formed else ""
        dots = "" if rng.random() < self._brief else "." * int(rng.integers(1, MOST_DOTS + 1))
        return [self.question(entry), {"role": "assistant", "content": f"{form}{word}{dots}"}]

    def gauges(self) -> dict[str, float]:
        return self.scorer.gauges()

    async def close(self) -> None:
        await self.scorer.close()


class SeveralRewardsEpisode:
    """One answer."""

    def __init__(self, suite: SeveralRewardsSuite) -> None:
        self._suite = suite
        self._answer = ""

    async def reset(self, data: dict[str, Any]) -> list[ChatMessage]:
        entry = await self._suite.scorer.entry(*task_of(data))
        self._answer = entry.answer or ""
        return [self._suite.question(entry)]

    async def step(self, action: str) -> StepResult:
        rewards = self._suite.rewards(action, self._answer)
        met = all(rewards[name] > 0 for name in ("right", "format", "short"))
        return StepResult(rewards=rewards, done=True, correct=met, info={"right": rewards["right"]})

    async def close(self) -> None:
        return None
