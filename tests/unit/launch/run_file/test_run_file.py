"""Mistakes in a run file are found before anything starts, and the message names field, value and cure."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.errors import ConfigError
from launch.reference import configuration_page
from launch.run_file.load import check, load
from launch.run_folder import with_ports
from launch.supervise.posts import crowded, posts
from learner.settings.algorithm import FixedAggregation
from learner.settings.surrogates import ClipSurrogate, LagSurrogate, WeightedSurrogate

ROOT = Path(__file__).parents[4]
GOOD = {"model": {"path": "some/model"}, "env": {"name": "calculator"}}


def changed(**sections):
    data = {name: dict(section) for name, section in GOOD.items()}
    for name, section in sections.items():
        data.setdefault(name, {}).update(section)
    return data


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("*.toml")), ids=lambda p: p.stem)
def test_every_recipe_loads(path):
    assert load(path).learner.steps > 0


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"learner": {"learning_rate": 1e-3}}, ["learner.learning_rate", "unknown key", "0.001"]),
        ({"learner": {"steps": "many"}}, ["learner.steps", "'many'"]),
        ({"learner": {"steps": "3"}}, ["learner.steps", "'3'"]),
        ({"learner": {"steps": True}}, ["learner.steps", "True"]),
        ({"learner": {"optimizer": {"lr": float("inf")}}}, ["learner.optimizer.lr", "inf"]),
        ({"learner": {"optimizer": {"betas": [0.9, 2.0]}}}, ["betas", "2.0"]),
        (
            {"broker": {"endpoint": "tcp://0.0.0.0:5555"}, "security": {"encrypt": False}},
            ["broker.endpoint", "loopback", "offbeat keys make"],
        ),
        (
            {"generator": {"endpoint": "tcp://0.0.0.0:0"}, "security": {"encrypt": False}},
            ["generator.endpoint", "loopback", "offbeat keys make"],
        ),
        ({"broker": {"endpoint": "udp://127.0.0.1:5555"}}, ["broker.endpoint", "tcp://HOST:PORT"]),
        ({"broker": {"max_queued_tasks": 800}}, ["896", "max_queued_tasks is 800"]),
        ({"learner": {"data_timeout_s": 60.0}}, ["data_timeout_s 60", "raise it"]),
        ({"learner": {"step": 3}}, ["learner.step", "did you mean 'steps'"]),
        (
            {"learner": {"group_size": 16, "batch_trajectories": 8}},
            ["group_size is 16", "raise batch_trajectories"],
        ),
        ({"learner": {"group_size": 8, "batch_trajectories": 20}}, ["multiple", "use 16 or 24"]),
        ({"learner": {"group_size": 1, "batch_trajectories": 4}}, ["group_size is 1", "at least 2"]),
        (
            {
                "broker": {"max_queued_segments": 100},
                "learner": {"max_policy_lag": 3, "batch_trajectories": 64},
            },
            ["max_policy_lag 3", "max_queued_segments is 100", "never be reached"],
        ),
        (
            {
                "generator": {"max_model_len": 32},
                "learner": {"sampling": {"max_trajectory_tokens": 256}},
            },
            ["max_trajectory_tokens 256", "max_model_len 32"],
        ),
        (
            {
                "generator": {"max_model_len": 128},
                "learner": {"sampling": {"max_context_tokens": 256, "max_trajectory_tokens": 512}},
            },
            ["max_context_tokens 256", "max_model_len 128"],
        ),
        (
            {
                "generator": {"max_model_len": 512},
                "learner": {
                    "micro_batch_tokens": 128,
                    "sampling": {"max_context_tokens": 256, "max_trajectory_tokens": 512},
                },
            },
            ["micro_batch_tokens 128", "one branch of 256 tokens"],
        ),
        (
            {"learner": {"sampling": {"max_context_tokens": 256, "max_trajectory_tokens": 128}}},
            ["max_context_tokens 256 is above max_trajectory_tokens 128", "all branches together"],
        ),
        (
            {"learner": {"offload": "optimizer", "dtype": "float32"}},
            ['learner.offload is "optimizer"', "use zero_stage 2 or 3"],
        ),
        (
            {"learner": {"zero_stage": 1, "dtype": "bfloat16"}},
            ["learner.zero_stage is 1", "use zero_stage 2, 3"],
        ),
        ({"run": {"mode": "sync"}, "learner": {"publish_every": 2}}, ["publish_every is 2"]),
        ({"generator": {"backend": "http"}}, ["generator.url is empty"]),
        (
            {"generator": {"sleep_in_updates": True}},
            ["generator.sleep_in_updates is true", 'run.mode is "async"', "leave it out"],
        ),
        (
            {
                "run": {"mode": "sync"},
                "generator": {"sleep_in_updates": True, "backend": "http", "url": "http://127.0.0.1:1"},
            },
            ["generator.sleep_in_updates is true", 'generator.backend is "http"'],
        ),
        (
            {
                "run": {"mode": "sync"},
                "generator": {"sleep_in_updates": True},
                "learner": {"nodes": 2, "rendezvous": "10.0.0.1:29500"},
            },
            ["generator.sleep_in_updates is true", "learner.nodes is above 1"],
        ),
        (
            {"learner": {"sampling": {"max_trajectory_s": 59.0}}},
            ["max_trajectory_s 59", "generator_timeout_s 30", "env_timeout_s 30", "at least 60"],
        ),
        ({"learner": {"sampling": {"stop": ["a", ""]}}}, ["learner.sampling.stop.1", "''"]),
        (
            {"learner": {"evaluation": {"hard": {"samples": 4, "temperature": 0.0}}}},
            ["learner.evaluation.hard.samples is 4", "temperature is 0"],
        ),
        (
            {"learner": {"evaluation": {"hard": {"samples": 4, "pass_at": [2, 8]}}}},
            ["learner.evaluation.hard.pass_at has 8", "samples is 4"],
        ),
        (
            {"learner": {"evaluation": {"hard": {"sample": 4}}}},
            ["learner.evaluation.hard.sample: unknown key", "did you mean 'samples'"],
        ),
        (
            {"learner": {"evaluation": {"hard": {"env": "sums"}}}},
            ["learner.evaluation.hard.env is 'sums'", "one [env]"],
        ),
        (
            {
                "env": {
                    "name": "several",
                    "params": {"environments": [{"name": "a"}, {"name": "a", "label": "b"}]},
                },
                "learner": {"evaluation": {"hard": {"env": "sums"}}},
            },
            ["learner.evaluation.hard.env is 'sums'", "there are a, b"],
        ),
        ({"learner": {"evaluation": {"a b": {}}}}, ["learner.evaluation.a b", "pattern"]),
        (
            {"learner": {"evaluation": {"hard": {"tasks": 32_768, "samples": 4}}}},
            ["131072 evaluation tasks", "max_queued_tasks"],
        ),
        ({"learner": {"sampling": {"stop": "a"}}}, ["learner.sampling.stop", "'a'"]),
        ({"model": {"path": ""}}, ["model.path", "[model.tiny]"]),
        ({"learner": {"algorithm": {"updates_per_batch": 1000}}}, ["updates_per_batch is 1000"]),
        (
            {"learner": {"micro_batch_tokens": 64, "sampling": {"max_trajectory_tokens": 256}}},
            ["micro_batch_tokens 64", "raise it"],
        ),
        (
            {"learner": {"algorithm": {"kl": {"coefficient": 0.1}}}},
            [
                "learner.algorithm.kl: the form is not said",
                "add learner.algorithm.kl.kind",
                "convex",
            ],
        ),
        (
            {"learner": {"algorithm": {"surrogate": {"kind": "clipp"}}}},
            ["learner.algorithm.surrogate.kind: unknown kind 'clipp'", "balanced"],
        ),
        (
            {"learner": {"algorithm": {"surrogate": {"kind": "lag", "contractoin": 1.0}}}},
            ["learner.algorithm.surrogate.contractoin: unknown key", "did you mean 'contraction'"],
        ),
        (
            {"learner": {"algorithm": {"corrections": [{"kind": "truncated", "cap": 2.0}]}}},
            ["learner.algorithm.corrections.0.cap: unknown key", "known here: ceiling, kind, level"],
        ),
        ({"learner": {"replay": {"share": 1.0}}}, ["learner.replay.share", "1.0"]),
        ({"learner": {"lora": {"rank": 0}}}, ["learner.lora.rank", "0"]),
        (
            {"learner": {"lora": {"r": 8}}},
            ["learner.lora.r: unknown key", "known here: alpha, publish, rank, targets"],
        ),
        (
            {"learner": {"lora": {"targets": []}}},
            ["learner.lora.targets is empty", "nothing would be trained"],
        ),
        (
            {"learner": {"lora": {"targets": ["q_proj", "all-linear"]}}},
            ['has "all-linear" in a list', 'write targets = "all-linear", or names only'],
        ),
        ({"learner": {"algorithm": {"aggregation": {"kind": "fixed", "tokens": 0}}}}, ["aggregation.tokens"]),
        ({"learner": {"nodes": 2}}, ["learner.nodes is 2", "set learner.rendezvous to HOST:PORT"]),
        (
            {"learner": {"rendezvous": "a:29500"}},
            ["learner.rendezvous is a:29500", "learner.nodes is 1", "raise learner.nodes"],
        ),
        ({"learner": {"nodes": 2, "rendezvous": "a:0"}}, ["learner.rendezvous", "'a:0'"]),
    ],
)
def test_a_wrong_run_file_is_refused_with_the_cure(sections, words):
    with pytest.raises(ConfigError) as caught:
        check(changed(**sections), "run.toml")
    for word in words:
        assert word in str(caught.value)


def test_a_table_without_a_kind_has_the_kind_of_the_default():
    algorithm = {"surrogate": {"high": 0.5}, "advantage": {"scale": "none"}}
    config = check(changed(learner={"algorithm": algorithm}), "run.toml")
    assert config.learner.algorithm.surrogate == ClipSurrogate(high=0.5)
    assert config.learner.algorithm.advantage.kind == "group"
    with pytest.raises(ConfigError, match=r"surrogate\.hihg: unknown key .*did you mean 'high'"):
        check(changed(learner={"algorithm": {"surrogate": {"hihg": 0.5}}}), "run.toml")


def test_all_contradictions_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        check(changed(learner={"group_size": 1, "batch_trajectories": 7}, generator={"backend": "http"}), "x")
    assert len(str(caught.value).splitlines()) == 2


def test_overrides_reach_nested_fields_and_keep_types(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[env]\nname = "calculator"\n')
    config = load(path, ["learner.optimizer.lr=1e-5", "run.name=abc", "learner.filter_uniform_groups=false"])
    assert config.learner.optimizer.lr == 1e-5
    assert config.run.name == "abc"
    assert config.learner.filter_uniform_groups is False


@pytest.mark.parametrize("override", ["learner.steps", "=3", "run.name.x=1"])
def test_an_override_that_cannot_be_meant_is_refused(tmp_path, override):
    path = tmp_path / "run.toml"
    path.write_text('[model]\npath = "m"\n[run]\nname = "a"\n[env]\nname = "calculator"\n')
    with pytest.raises(ConfigError, match="override"):
        load(path, [override])


def written(tmp_path, **files):
    """Write run files into a folder. Return the folder."""
    for name, text in files.items():
        path = tmp_path / f"{name}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


BASE = """
[model]
path = "m"
[env]
name = "calculator"
[learner]
steps = 7
[learner.optimizer]
betas = [0.5, 0.6]
lr = 1e-5
[learner.algorithm]
aggregation = "sequence_mean"
[learner.algorithm.surrogate]
kind = "clip"
low = 0.1
high = 0.3
"""


def test_a_file_that_extends_another_is_merged_over_it(tmp_path):
    folder = written(
        tmp_path,
        base=BASE,
        middle='extends = "base.toml"\n[learner]\nbatch_trajectories = 16\nsteps = 8\n',
        top='extends = "middle.toml"\n[learner]\nsteps = 9\n[learner.optimizer]\nbetas = [0.7, 0.8]\n',
    )
    learner = load(folder / "top.toml").learner
    assert (learner.steps, learner.batch_trajectories) == (9, 16)
    assert (learner.optimizer.betas, learner.optimizer.lr) == ((0.7, 0.8), 1e-5)


def test_a_table_of_the_same_kind_is_merged_and_one_of_another_kind_replaced(tmp_path):
    surrogate = 'extends = "base.toml"\n[learner.algorithm.surrogate]\n'
    folder = written(
        tmp_path,
        base=BASE,
        same=surrogate + 'kind = "clip"\nlow = 0.2\n',
        unnamed=surrogate + "low = 0.2\n",
        other=surrogate + 'kind = "lag"\nlow = 0.2\n',
        weighted=surrogate + 'kind = "weighted"\ncentre = "proximal"\n',
    )
    for name in ("same", "unnamed"):
        assert load(folder / f"{name}.toml").learner.algorithm.surrogate == ClipSurrogate(low=0.2, high=0.3)
    assert load(folder / "other.toml").learner.algorithm.surrogate == LagSurrogate(low=0.2)
    weighted = WeightedSurrogate(centre="proximal")
    assert load(folder / "weighted.toml").learner.algorithm.surrogate == weighted


def test_extends_is_relative_to_the_file_that_says_it(tmp_path, monkeypatch):
    written(tmp_path, base=BASE, **{"inner/top": 'extends = "../base.toml"\n'})
    monkeypatch.chdir("/")
    assert load(tmp_path / "inner" / "top.toml").learner.steps == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('extends = "none.toml"', ["top.toml", "'none.toml'", "there is no file"]),
        ('extends = "top.toml"', ["circle: top.toml -> top.toml"]),
        ('extends = "second.toml"', ["second.toml: ", "circle: top.toml -> second.toml -> top.toml"]),
        ("extends = 3", ["extends is 3", "one file"]),
        ('extends = "broken.toml"', ["broken.toml: not valid TOML"]),
    ],
)
def test_what_cannot_be_extended_is_refused(tmp_path, text, words):
    folder = written(tmp_path, top=text, second='extends = "top.toml"', broken="[run")
    with pytest.raises(ConfigError) as caught:
        load(folder / "top.toml")
    for word in words:
        assert word in str(caught.value)


def test_a_shipped_recipe_is_found_by_name_and_by_its_old_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = ["bapo", "recipes/bapo.toml", str(ROOT / "recipes" / "bapo.toml")]
    texts = {name: f'extends = "{place}"' for name, place in zip("abc", places, strict=True)}
    written(tmp_path, **texts, bapo=BASE)
    bapo = load(ROOT / "recipes" / "methods" / "bapo.toml")
    assert all(load(Path(place)) == bapo for place in places)
    assert all(load(tmp_path / f"{name}.toml") == bapo for name in texts)
    assert load(Path("bapo.toml")) == load(tmp_path / "bapo.toml") != bapo, "a file that exists comes first"


@pytest.mark.parametrize("name", ["bappo", "bapo.toml", "other/bapo.toml"])
def test_other_names_are_no_shipped_recipes(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="name a run file, or one of `offbeat recipes`"):
        load(Path(name))
    with pytest.raises(ConfigError, match="there is no file"):
        load(written(tmp_path, top=f'extends = "{name}"') / "top.toml")


@pytest.mark.parametrize("backward", [False, True])
def test_an_override_of_a_kind_drops_the_other_keys_whatever_the_order(tmp_path, backward):
    name = "learner.algorithm.surrogate"
    overrides = [f"{name}.kind=lag", f"{name}.low=0.15", "learner.algorithm.aggregation.kind=fixed"]
    overrides += ["learner.algorithm.aggregation.tokens=9"]
    path = written(tmp_path, base=BASE) / "base.toml"
    algorithm = load(path, overrides[::-1] if backward else overrides).learner.algorithm
    assert algorithm.surrogate == LagSurrogate(low=0.15)
    assert algorithm.aggregation == FixedAggregation(tokens=9)
    assert load(path, [f"{name}.low=0.15"]).learner.algorithm.surrogate == ClipSurrogate(low=0.15, high=0.3)


def test_a_job_of_ones_own_takes_a_method_along(tmp_path):
    bapo = ROOT / "recipes" / "methods" / "bapo.toml"
    job = f'extends = "{bapo}"\n[model]\npath = "m"\n[env]\nname = "calculator"\n'
    written(tmp_path, job=job, same=job + "[env.params]\nmax_turns = 3\n")
    config, base = load(tmp_path / "job.toml"), load(bapo)
    assert config.learner == base.learner
    assert (config.model.path, config.env.name, config.env.params) == ("m", "calculator", {})
    assert load(tmp_path / "same.toml").env.params == {"max_turns": 3}
    assert load(bapo, ["env.params.seed=2"]).env.params == base.env.params | {"seed": 2}
    assert load(bapo, ["env.params.seed=2", "env.name=calculator"]).env.params == {"seed": 2}


@pytest.mark.parametrize(
    "title", ['title = ""', 'title = "t"\nsource = "a paper"', 'title = "t"\nnote = "n"']
)
def test_the_recipe_section_is_strict(tmp_path, title):
    with pytest.raises(ConfigError, match="recipe"):
        load(written(tmp_path, top=f"{BASE}[recipe]\n{title}\n") / "top.toml")


def test_missing_file_and_bad_toml(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path / "bad.toml")


def test_lengths_that_are_left_out_follow_from_others():
    fixed = {"learner": {"algorithm": {"aggregation": {"kind": "fixed"}}}}
    learner = check(changed(generator={"max_model_len": 300}, **fixed), "x").learner
    assert learner.sampling.max_trajectory_tokens == 300
    assert learner.algorithm.aggregation == FixedAggregation(tokens=300)
    fixed["learner"]["algorithm"]["aggregation"]["tokens"] = 9
    assert check(changed(**fixed), "x").learner.algorithm.aggregation == FixedAggregation(tokens=9)


def test_lockstep_has_no_lag():
    assert check(changed(run={"mode": "sync"}), "x").max_policy_lag == 0


def test_the_reference_page_is_up_to_date():
    assert (ROOT / "docs" / "run" / "configuration.md").read_text() == configuration_page(), "run `make docs`"


def test_the_command_line_starts_without_heavy_libraries():
    code = (
        "import sys, launch.cli, launch.supervise.supervisor; "
        "print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


JUDGED = {
    "model": {"path": "model"},
    "env": {
        "name": "rows",
        "params": {"train": "t.jsonl", "reward": {"good": {"judge": "own", "prompt": "judge.txt"}}},
    },
}


def test_an_own_judge_needs_its_section_and_the_section_needs_a_reward_that_asks():
    with pytest.raises(ConfigError, match=r"judge = \"own\", but there is no \[judge\]"):
        check(JUDGED, "run.toml")
    with pytest.raises(ConfigError, match=r"\[judge\] would start a model that nobody asks"):
        check({**JUDGED, "env": {"name": "calculator"}, "judge": {}}, "run.toml")
    with pytest.raises(ConfigError, match=r"judge.http"):
        check({**JUDGED, "judge": {"http": "0.0.0.0:80"}}, "run.toml")
    several = [{**JUDGED["env"], "weight": 1}, {"name": "calculator"}]
    assert check({**JUDGED, "env": several, "judge": {}}, "run.toml").judge is not None


def test_an_own_judge_is_a_post_of_the_crew_at_a_free_port():
    config = with_ports(check({**JUDGED, "judge": {"threads": 2}}, "run.toml"))
    assert config.judge is not None
    assert int(config.judge.http.removeprefix("127.0.0.1:")) > 0
    assert ("judge", 2) in [(post.name, post.threads) for post in posts(config)]
    assert crowded(config, cores=3)
    assert not crowded(config, cores=4)


def test_a_judge_from_the_hub_lets_the_hub_be_asked(tmp_path):
    folder = {**JUDGED, "model": {"path": str(tmp_path)}}
    assert check({**folder, "judge": {}}, "run.toml").local_models
    assert check({**folder, "judge": {"model": str(tmp_path)}}, "run.toml").local_models
    assert not check({**folder, "judge": {"model": "Qwen/Qwen3-0.6B"}}, "run.toml").local_models


@pytest.mark.parametrize(
    ("sections", "rate"),
    [
        ({}, 1e-6),
        ({"learner": {"lora": {}}}, 2e-5),
        ({"learner": {"lora": {}, "optimizer": {"warmup_steps": 3}}}, 2e-5),
        ({"model": {"tiny": {}}}, 3e-4),
        ({"model": {"tiny": {}}, "learner": {"optimizer": {"lr": 1e-6}}}, 1e-6),
    ],
)
def test_the_learning_rate_suits_what_is_trained(sections, rate):
    data = {"model": {"path": "m"}, "env": {"name": "calculator"}} | sections
    assert check(data, "run.toml").learner.optimizer.lr == rate
