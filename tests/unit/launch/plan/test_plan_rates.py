"""Test the rates of `offbeat plan`: their file, mistakes in the file, and how they are read from a run."""

import random
import statistics

import pytest

from launch.errors import ConfigError
from launch.plan.observations import Observations, Probe, quantiles, read
from launch.plan.parts import Setting, between, draw_turns
from launch.plan.rates import Law, check_rates, format_rates, load_rates

BY_HAND = """
[generator]
decode = [{ sequences = 1, tokens_per_second = 45 }, { sequences = 64, tokens_per_second = 1800.0 }]

[learner]
seconds_per_token = 2e-5

[episode]
turns = { uniform = [2, 6] }
turn_tokens = { log_normal = [120, 0.7] }
tool_seconds = { log_uniform = [0.2, 2.0] }
"""


def written(tmp_path, text):
    path = tmp_path / "rates.toml"
    path.write_text(text)
    return path


def test_a_file_by_hand_is_read_and_written_again(tmp_path):
    rates = load_rates(written(tmp_path, BY_HAND))
    assert rates.generator.step_seconds(64) == pytest.approx(64 / 1800)
    assert rates.episode.tool_seconds.log_uniform == (0.2, 2.0)
    assert rates.sharing.slow(4) == 1.0
    assert load_rates(written(tmp_path, format_rates(rates, ["a heading"]))) == rates


def test_a_rate_on_the_command_line_takes_the_place_of_that_in_the_file(tmp_path):
    rates = load_rates(
        written(tmp_path, BY_HAND),
        ["learner.seconds_per_token=1e-4", "episode.turns=3", "actor.start_seconds=2.5"],
    )
    assert rates.learner.seconds_per_token == 1e-4
    assert rates.episode.turns == Law(fixed=3.0)
    assert rates.actor.start_seconds == 2.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("seconds_per_token = 2e-5", "seconds_per_token = -1.0"), ["learner.seconds_per_token", "-1.0"]),
        (("seconds_per_token = 2e-5", ""), ["learner.seconds_per_token", "missing", "--calibrate"]),
        (("tool_seconds", "tool_second"), ["episode.tool_second", "unknown key", "tool_seconds"]),
        (("{ uniform = [2, 6] }", "{ uniform = [6, 2] }"), ["episode.turns", "[6.0, 2.0]", "[least, most]"]),
        (("{ uniform = [2, 6] }", "{ fixed = 1, values = [2] }"), ["episode.turns", "one form"]),
        (("{ uniform = [2, 6] }", "{}"), ["episode.turns", "none", "log_normal"]),
        (("{ uniform = [2, 6] }", "-1"), ["episode.turns", "greater than or equal to 0", "-1"]),
        (
            ("tokens_per_second = 45", "tokens_per_second = 0"),
            ["generator.decode.0.tokens_per_second", "got 0"],
        ),
        (("[learner]", "[learner"), ["not valid TOML"]),
    ],
)
def test_a_mistake_is_named_with_place_value_and_cure(tmp_path, change, said):
    assert change[0] in BY_HAND
    path = written(tmp_path, BY_HAND.replace(*change))
    with pytest.raises(ConfigError) as error:
        load_rates(path)
    for part in (str(path), *said):
        assert part in str(error.value)


@pytest.mark.parametrize("wrong", ["turns=3", "episode.turns", "episode.turns=[", "generator.decode.x=1"])
def test_a_rate_that_cannot_be_set_is_refused(tmp_path, wrong):
    with pytest.raises(ConfigError) as error:
        load_rates(written(tmp_path, BY_HAND), [wrong])
    assert f"--rate {wrong!r}" in str(error.value)


def test_without_a_file_the_cure_is_to_calibrate(tmp_path):
    with pytest.raises(ConfigError, match="--calibrate 30"):
        load_rates(tmp_path / "none.toml")


def test_laws_have_the_means_they_should(tmp_path):
    rng = random.Random(1)
    for law, mean in (
        (Law(fixed=2.5), 2.5),
        (Law(uniform=(2, 6)), 4.0),
        (Law(values=(1, 2, 6)), 3.0),
        (Law(log_normal=(10, 0.5)), 10 * 2.718281828**0.125),
    ):
        drawn = [law.draw_count(rng, 0) for _ in range(20_000)]
        assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.02)


def test_quantiles_keep_the_mean_and_the_tail():
    values = [1.0] * 900 + [50.0] * 100
    law = quantiles(values)
    assert statistics.fmean(law.values) == pytest.approx(statistics.fmean(values), rel=0.01)
    assert max(law.values) == 50.0


@pytest.mark.parametrize(("episodes", "seconds"), [(12, 0.05), (48, 0.2), (96, 0.2)])
def test_the_queue_in_an_actor_is_shorter_with_fewer_episodes(episodes, seconds):
    data = {
        "generator": {"decode": [{"sequences": 1, "tokens_per_second": 1.0}]},
        "learner": {"seconds_per_token": 0.0},
        "episode": {"turn_tokens": 4, "between_seconds": 0.2},
    }
    setting = Setting(concurrent_episodes=episodes)
    assert between(check_rates(data, "by hand"), setting) == 0.2, (
        "of rates given by hand nothing else is known"
    )
    measured = check_rates(data | {"measured": {"concurrent_episodes": 48}}, "test")
    assert between(measured, setting) == pytest.approx(seconds)


def test_turns_read_the_prompt_first_and_observations_then():
    episode = check_rates(
        {
            "generator": {"decode": [{"sequences": 1, "tokens_per_second": 1.0}]},
            "learner": {"seconds_per_token": 0.0},
            "episode": {
                "turns": 3, "prompt_tokens": 9, "turn_tokens": 4, "observation_tokens": 2, "tool_seconds": 0.5,
                "between_seconds": 0.25,
            },
        },
        "test",
    ).episode  # fmt: skip
    turns = draw_turns(episode, random.Random(0), 0.25)
    assert [(turn.read, turn.sampled, turn.after_s) for turn in turns] == [
        (9, 4, 0.75),
        (2, 4, 0.75),
        (2, 4, 0.75),
    ]


# --- from a run ---------------------------------------------------------------------------------------------


def line(step, tokens, uniform):
    return {
        "step": step,
        "learner/trained_tokens": tokens,
        "learner/step_seconds": 0.1 + 0.001 * tokens,
        "learner/publish_seconds": 0.02,
        "learner/wait_seconds": 0.5,
        "learner/policy_lag_mean_versions": 1.5,
        "rollout/uniform_trajectories": uniform,
    }


def seen(**changes):
    tokens = [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]
    lines = [line(n, count, 60.0 * n) for n, count in enumerate(tokens, start=1)]
    generator = {"running_requests": 10.0, "update_pause_seconds": 0.03, "updates_applied_total": 5.0}
    episode = {
        "turns": [
            {"action": False, "start": 0, "end": 8},
            {"action": True, "start": 8, "end": 18},
            {"action": False, "start": 18, "end": 20},
            {"action": True, "start": 20, "end": 30},
        ]
    }
    found = Observations(
        seconds=12.7,
        lines=lines,
        before=line(0, 100, 0.0),
        sampled=6350.0,
        generators=[
            [{**generator, "idle_seconds_total": 1.0 + n, "serving_seconds_total": 10.0 * n}] for n in (1, 2)
        ],
        actors=[[{"episodes_running": 12.0, "env_seconds": 0.02}]],
        episodes=[episode] * 5,
        cores=2,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


PROBE = Probe(decode=[(1, 100.0), (16, 1600.0)], turn_seconds=0.0)


def test_rates_of_a_run_are_read_from_its_metrics():
    rates = read(
        seen(), PROBE, Setting(sync=True, members=5, baselines=1, batch_groups=10), run="r", machine="m"
    )
    assert rates.learner.step_seconds == pytest.approx(0.1)
    assert rates.learner.seconds_per_token == pytest.approx(0.001)
    assert rates.learner.publish_seconds == pytest.approx(0.02)
    # 12.7 s less 10 steps of 0.5 s waiting, 0.1 + 0.001 * 550 s update and 0.02 s publishing.
    assert rates.learner.after_seconds == pytest.approx(0.1)
    assert rates.generator.pause_seconds == 0.03
    assert rates.episode.turns == rates.episode.turns.model_copy(update={"fixed": 2.0})
    assert rates.episode.observation_tokens.fixed == 2.0
    assert rates.episode.tool_seconds.fixed == 0.01
    # Two more episodes than requests at 50 turns a second are 40 ms a turn, 10 ms in the environment.
    assert rates.episode.between_seconds == pytest.approx(0.03)
    assert rates.episode.filtered_groups == pytest.approx(0.6, abs=1e-4)
    assert rates.sharing.slowdown == 1.0
    assert rates.measured.generator_idle_share == 0.1
    assert rates.measured.sampled_tokens_per_second == 500.0


def test_what_generators_lose_to_the_learner_is_the_slowdown():
    rates = read(seen(), PROBE, Setting(), run="r", machine="m")
    # Alone, the generator gives about 1,100 tokens a second with 11 requests; the run showed 500 / 0.9.
    assert rates.sharing.slowdown > 1.5
    assert rates.learner.seconds_per_token < 0.001 / 1.4
    each, tenth = (
        read(seen(sampled=9_000.0), PROBE, Setting(publish_every=n), run="r", machine="m").sharing.slowdown
        for n in (1, 10)
    )
    assert 1.0 < each < tenth < 4.0, "pauses for a version in ten steps explain less of it"
    fast = read(seen(sampled=30_000.0), PROBE, Setting(), run="r", machine="m")
    assert fast.sharing.slowdown == 1.0
    assert fast.learner.seconds_per_token == pytest.approx(0.001)
