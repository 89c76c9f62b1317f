"""Kinds of advantage that are names of one comparison."""

from learner.credit.comparison_config import ComparedAdvantage, Comparison
from learner.settings.advantages import (
    AdvantageConfig,
    BatchMeanAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    TurnReturnAdvantage,
)


def comparisons_of(config: AdvantageConfig) -> ComparedAdvantage | None:
    """Return an advantage as a sum of comparisons; None if it is of a kind that is not one.

    Example:
        >>> comparisons_of(LeaveOneOutAdvantage()).terms[0].scale
        'leave_one_out'
    """
    match config:
        case ComparedAdvantage():
            return config
        case GroupAdvantage(scale=scale):
            term = Comparison(scale=scale)
        case LeaveOneOutAdvantage():
            term = Comparison(scale="leave_one_out")
        case BatchMeanAdvantage(scale=scale):
            term = Comparison(among=("batch",), scale=scale)
        case TurnReturnAdvantage(discount=discount, baseline=baseline):
            term = Comparison(
                of="turn",
                value="return_to_go",
                discount=discount,
                among=("group", "position") if baseline == "group" else (),
                scale="none",
            )
        case _:
            return None
    return ComparedAdvantage(terms=(term,))
