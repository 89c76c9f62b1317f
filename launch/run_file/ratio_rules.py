"""Contradictions in ratios and their bounds: staleness corrected twice, or intervals with nothing inside."""

from collections.abc import Iterator

from launch.run_file.objectives import objectives_of
from learner.settings.algorithm import (
    AlgorithmConfig,
    BalancedSurrogate,
    ClipSurrogate,
    EntropySurrogate,
    IntervalCorrection,
    LagSurrogate,
    MiniRlSurrogate,
    RegressionSurrogate,
    SurrogateConfig,
    TripletSurrogate,
    WeightedSurrogate,
    WindowSurrogate,
)


def ratio_contradictions(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield a line per mistake: field, value seen, cure."""
    yield from _ratios(algorithm)
    yield from _bounds(algorithm)


def _ratios(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Check that staleness is corrected once, and that ratios refer to the policy that the surrogate uses."""
    for name, surrogate, corrections, *_ in objectives_of(algorithm):
        if isinstance(surrogate, EntropySurrogate) and algorithm.proximal != "recomputed":
            yield (
                f'{name}.surrogate.kind is "entropy" but learner.algorithm.proximal is "{algorithm.proximal}": the '
                "entropies are those of the learner's weights before the update, and its clip is around them; use "
                'proximal = "recomputed", which costs nothing more'
            )
        if algorithm.proximal == "behaviour" and corrections:
            yield (
                f'learner.algorithm.proximal is "behaviour": {name}.corrections, of the ratio proximal / behaviour, '
                "are all 1 then; set corrections = [] there"
            )
        if algorithm.proximal != "recomputed" and any(c.level == "group" for c in corrections):
            yield (
                f'{name}.corrections have level "group" but learner.algorithm.proximal is "{algorithm.proximal}": the '
                "weight of a group is taken from the learner's weights before the update, which all of its answers "
                'have been shown to; use proximal = "recomputed"'
            )
        weights = [c.kind for c in corrections if not isinstance(c, IntervalCorrection) or c.weight]
        itself = isinstance(
            surrogate, MiniRlSurrogate | RegressionSurrogate | TripletSurrogate | WindowSurrogate
        )
        if weights and (itself or getattr(surrogate, "centre", "proximal") == "behaviour"):
            centre = "" if itself else ' with centre = "behaviour"'
            yield (
                f'{name}.surrogate of kind "{surrogate.kind}"{centre} has the ratio current / behaviour in it, and '
                f"{name}.corrections ({', '.join(weights)}) would weigh staleness a second time; set "
                'corrections = [], or keep kind "interval" with weight = false only'
            )


def _bounds(algorithm: AlgorithmConfig) -> Iterator[str]:
    for name, surrogate, corrections, *_ in objectives_of(algorithm):
        for i, correction in enumerate(corrections):
            if isinstance(correction, IntervalCorrection) and correction.low >= correction.high:
                yield (
                    f"{name}.corrections.{i}: low {correction.low:g} is not below high {correction.high:g}: "
                    "no token would be left; lower low"
                )
        yield from _order(f"{name}.surrogate", surrogate)
        yield from _dual(f"{name}.surrogate", surrogate)
    if (mask := algorithm.covariance) is not None and mask.low >= mask.high:
        yield f"learner.algorithm.covariance: low {mask.low:g} is not below high {mask.high:g}; lower low"
    bonus = algorithm.entropy
    if bonus.band is not None and not (bonus.coefficient or bonus.target):
        yield (
            "learner.algorithm.entropy.band is set but entropy.coefficient is 0: the band has the factor of the bonus, "
            "so it would not act; raise coefficient, or take band out"
        )
    if bonus.target and bonus.coefficient > bonus.maximum:
        yield (
            f"learner.algorithm.entropy.coefficient {bonus.coefficient:g} is above its maximum {bonus.maximum:g}; "
            "raise maximum or lower the coefficient"
        )


def _order(field: str, surrogate: SurrogateConfig) -> Iterator[str]:
    match surrogate:
        case BalancedSurrogate(low_start=a, low_stop=b, high_start=c, high_stop=d) if not a <= b < 1 < c <= d:
            yield (
                f"{field}: low {a:g} to {b:g}, high {c:g} to {d:g}: bounds of the ratio must be "
                "low_start <= low_stop < 1 < high_start <= high_stop"
            )
        case WeightedSurrogate(low=low, high=high) if low > high:
            yield f"{field}: low {low:g} is above high {high:g}; lower low"
        case TripletSurrogate(negative_low=low, negative_high=high) if low >= high:
            yield f"{field}: negative_low {low:g} is not below negative_high {high:g}; lower it"
        case _:
            pass


def _dual(field: str, surrogate: SurrogateConfig) -> Iterator[str]:
    match surrogate:
        case ClipSurrogate(high=high) | LagSurrogate(high=high):
            upper = 1 + high
        case EntropySurrogate(high=high):
            # The most uncertain token has the widest clip, with this upper bound.
            upper = 1 + 2 * high
        case BalancedSurrogate(high_stop=high):
            upper = high
        case _:
            return
    if 0 < surrogate.dual <= upper:
        yield (
            f"{field}.dual is {surrogate.dual:g}, not above the clip's own upper bound {upper:g}: it would cut what "
            "the clip lets through; raise it, or set 0 for none"
        )
