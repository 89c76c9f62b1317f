"""Values of an answer: of a wrong one by its turns, and of any by what its calls brought."""

from learner.credit.reward_config import StepReward, WrongAnswer
from learner.credit.rewards.sums import replaced, total_of
from learner.trajectory import Trajectory
from protocol.messages.episodes import Reward


def with_wrong_answer(config: WrongAnswer, t: Trajectory) -> list[Reward]:
    """Return a trajectory's rewards; if its answer is wrong, the named reward is replaced.

    A trajectory that never got the reward has no answer, which is wrong, too.
    """
    if total_of(t, config.reward) > 0:
        return t.rewards
    value = min(config.highest, config.lowest + config.per_turn * (t.action_turns - 1))
    return replaced(t, config.reward, value)


def step_value(config: StepReward, t: Trajectory) -> float:
    r"""Return the value of an answer by what its calls brought.

    .. math::
        \max(1 - \rho, \tfrac{1}{2}) \quad \text{(right)}, \qquad
        c_1 \min(1, \Delta_S / C_S) + c_2 \min(1, \Delta_Q / C_Q) \quad \text{(wrong)}

    RAPO, arXiv:2509.24107, section 2.5: rho is the share of redundant calls, and each difference that of new and
    redundant ones. A wrong answer has no lower bound.
    """
    labels = [mark.value for mark in t.marks if mark.name == config.mark]
    kinds = (config.searches, config.redundant_searches, config.queries, config.redundant_queries)
    searches, again, queries, idle = (sum(label in kind for label in labels) for kind in kinds)
    if total_of(t, config.reward) > 0:
        calls = searches + again + queries + idle
        return max(1 - (again + idle) / calls, config.least) if calls else 1.0
    by_searches = config.search_share * min(1.0, (searches - again) / config.most_searches)
    return by_searches + config.query_share * min(1.0, (queries - idle) / config.most_queries)
