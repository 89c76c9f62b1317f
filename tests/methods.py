"""Settings for every part of the objective, for tests that must hold for each of them."""

from pathlib import Path

from learner.settings.algorithm import AlgorithmConfig

OWN = str(Path(__file__).with_name("own_formulas.py"))
"""File of formulas as a user writes them: copies of shipped ones."""

MASKS = [
    {"kind": "interval", "low": 0.6, "high": 1.6, "level": "sequence", "weight": False},
    {"kind": "interval", "low": 0.4, "high": 2.5, "weight": False},
]
CRITIC = {"advantage": {"kind": "gae", "ignored_tail": 1}, "corrections": [], "imitation_coefficient": 0.1}

METHODS = {
    "grpo": {"surrogate": {"kind": "clip", "centre": "behaviour"}, "corrections": []},
    "dual_clip": {"surrogate": {"kind": "clip", "dual": 3.0}},
    "gspo": {"surrogate": {"kind": "clip", "level": "sequence"}, "aggregation": "sequence_mean"},
    "turn_level": {
        "surrogate": {"kind": "clip", "level": "turn"},
        "corrections": [{"kind": "truncated", "level": "turn"}],
    },
    "group_level": {
        "corrections": [
            {"kind": "interval", "low": 0.1, "high": 9.0, "level": "group", "weight": False},
            {"kind": "truncated", "level": "group"},
        ],
        "updates_per_batch": 2,
    },
    "icepop": {"corrections": [{"kind": "interval"}]},
    "interpolated": {"proximal": "interpolated"},
    "rloo": {"advantage": {"kind": "leave_one_out"}, "proximal": "behaviour", "corrections": []},
    "batch_mean": {"advantage": {"kind": "batch_mean"}},
    "turn_return": {"advantage": {"kind": "turn_return", "discount": 0.9}},
    "turn_comparisons": {
        "advantage": {
            "kind": "compared",
            "terms": [{}, {"of": "turn", "value": "return_to_go", "among": ["group", "position"]}],
            "whiten": "tokens",
        }
    },
    "uncorrected": {"surrogate": {"kind": "weighted", "low": 1.0, "high": 1.0}, "corrections": []},
    "cispo": {"surrogate": {"kind": "weighted", "high": 1.5}, "corrections": []},
    "minirl": {"surrogate": {"kind": "minirl"}, "corrections": []},
    "hispo": {"surrogate": {"kind": "triplet"}, "corrections": MASKS},
    "ipa": {"surrogate": {"kind": "chunk"}},
    "bapo": {"surrogate": {"kind": "balanced", "target": 0.5}, "corrections": []},
    "hapo": {"surrogate": {"kind": "entropy"}, "advantage": {"kind": "token_group"}},
    "lag_clip": {"surrogate": {"kind": "lag"}},
    "mix": {"surrogate": {"kind": "window"}, "corrections": [], "updates_per_batch": 2, "passes": 2},
    "convex": {"kl": {"kind": "convex", "coefficient": 0.1, "hold": 0, "every": 1}, "updates_per_batch": 2},
    "reference": {"kl": {"kind": "penalty", "coefficient": 0.1, "estimator": "k2"}},
    "r2vpo": {"surrogate": {"kind": "ratio_variance"}, "corrections": []},
    "gbpo": {"surrogate": {"kind": "bounded"}},
    "mdpo": {"surrogate": {"kind": "mirror_descent"}, "passes": 3},
    "fixed": {"aggregation": {"kind": "fixed", "tokens": 16}},
    "ess": {"lr_by_ess": "linear"},
    "entropy_target": {"entropy": {"coefficient": 0.01, "target": 9.0, "change": 0.01, "maximum": 0.5}},
    "kept_gradient": {
        "surrogate": {"kind": "clip", "centre": "behaviour", "keep_gradient": True, "dual": 3.0},
        "corrections": [],
    },
    "by_entropy": {"advantage_by_entropy": 0.2},
    "covariance": {"covariance": {"low": 0.0, "share": 0.3}},
    "risk": {"advantage": {"kind": "risk", "bundle": 2}},
    "entropy_band": {"entropy": {"coefficient": 0.1, "band": {"low": 1.0, "high": 1.0, "coefficient": 1.0}}},
    "trust": {
        "surrogate": {"kind": "trust_region", "statistic": "binary_kl", "bound": 0.01},
        "corrections": [],
    },
    "second_moment": {"surrogate": {"kind": "second_moment"}, "corrections": []},
    "tail": {"surrogate": {"kind": "tail"}, "corrections": []},
    "pull": {"surrogate": {"kind": "quadratic_pull"}, "corrections": []},
    "gamma": {"surrogate": {"kind": "gamma"}, "corrections": []},
    "reject": {
        "surrogate": {"kind": "weighted", "low": 0.7, "high": 6.0, "outside": "reject", "centre": "proximal"},
        "corrections": [
            {"kind": "divergence", "statistic": "binary_tv", "level": "turn", "over": "max", "bound": 0.2},
            {"kind": "divergence", "bound": 0.1, "weight": False},
        ],
        "optimal_baseline": True,
    },
    "balance": {"surrogate": {"kind": "trajectory_balance", "beta": 0.5}, "advantage": {"kind": "group"}},
    "own": {
        "surrogate": {"kind": f"{OWN}:clip", "high": 0.28, "centre": "behaviour"},
        "corrections": [{"kind": f"{OWN}:truncated", "ceiling": 2.0}],
        "advantage": {"kind": f"{OWN}:group"},
        "updates_per_batch": 2,
    },
    "value_head": CRITIC | {"critic": {"model": "head"}},
    "critic": CRITIC | {"critic": {"model": "separate"}},
    "regression": CRITIC | {"critic": {"model": "head"}, "surrogate": {"kind": "regression", "beta": 2.0}},
    "vtrace": CRITIC | {"critic": {"model": "separate", "target": "vtrace", "steps": 2}},
    "success_head": CRITIC
    | {"critic": {"model": "head", "target": "success", "clip_low": 0.0, "clip_high": 0.0}},
    "lambda_head": CRITIC | {"critic": {"model": "head", "target": "lambda"}},
}


LEVELS = ("token", "turn", "sequence", "product", "group")
COMPARED = {
    f"compared_{level}": {
        "surrogate": {"kind": "entropy"},
        "corrections": [{"kind": "truncated", "level": level}],
        "kl": {"kind": "convex", "coefficient": 0.1, "hold": 0, "every": 1},
    }
    for level in LEVELS
}
"""Settings that need every kind of score: a signal and a weight that compare tokens, and frozen policies."""


MIXTURE = {"routes": {"routes": "proximal"}, "given": {"routes": "behaviour"}}
"""Settings for a mixture of experts only."""


def method(name: str) -> AlgorithmConfig:
    """Return the algorithm settings with this name; "hapo+2x3" has 2 updates per batch in each of 3 passes."""
    name, _, steps = name.partition("+")
    settings = {"surrogate": {"kind": "clip"}} | (METHODS | COMPARED | MIXTURE)[name]
    if steps:
        updates, passes = steps.split("x")
        settings |= {"updates_per_batch": int(updates), "passes": int(passes)}
    return AlgorithmConfig.model_validate(settings)
