"""Whole runs: adapters are published alone, and policies are taught by themselves after training."""

import json
import shutil

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1_500)]

FEW = ("learner.evaluation_tasks=128",)
LONG = ("run.max_minutes=25.0",)


def test_a_run_publishes_adapters_alone_and_leaves_them_with_a_card(offbeat):
    run = offbeat(
        "spell_backward", *FEW, "learner.steps=12", "learner.lora.rank=8", "learner.lora.publish=adapter",
        "learner.optimizer.lr=2e-3",
        timeout_s=700.0,
    )  # fmt: skip
    summary = run.summary
    assert summary["steps"] == 12
    assert summary["parameters"]["trained"] < summary["parameters"]["whole"] / 2
    # Tokens of later versions were sampled, so generators took adapters.
    assert summary["policy_version"] == 12
    assert summary["policy_lag"]["mean_versions"] < 12
    assert not summary["restart_reasons"]
    adapter = run.folder / "model" / "adapter"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 8
    assert "adapters: rank 8" in (run.folder / "model" / "README.md").read_text()
    assert "library_name: peft" in (adapter / "README.md").read_text()


def test_a_policy_learns_from_itself_after_training_without_rewards(offbeat, tmp_path):
    teacher = offbeat("spell_backward", *FEW, "learner.steps=120", timeout_s=700.0)
    trained = teacher.summary["accuracy"]
    assert trained["after"] > trained["before"] + 0.15
    shutil.move(teacher.folder / "model", tmp_path / "teacher")
    shutil.rmtree(teacher.folder)
    taught = offbeat(
        "spell_backward", *FEW, "learner.steps=60",
        f"learner.algorithm.distillation.teacher={tmp_path / 'teacher'}", timeout_s=700.0,
    )  # fmt: skip
    distances = [step["learner/kl_proximal_teacher_nats"] for step in taught.steps]
    assert sum(distances[-5:]) < 0.7 * sum(distances[:5])
    assert (
        taught.summary["accuracy"]["after"] > trained["before"] + (trained["after"] - trained["before"]) / 2
    )


@pytest.mark.timeout(3_600)
def test_a_pretrained_model_learns_from_itself_after_training_without_rewards(offbeat, tmp_path):
    """SmolLM2 learns sums by rewards; then SmolLM2 as it was learns them from that model alone."""
    teacher = offbeat("smollm2", *LONG, "learner.steps=24", "learner.evaluation_every=0", timeout_s=1_700.0)
    trained = teacher.summary["accuracy"]
    assert trained["after"] > trained["before"] + 0.3
    shutil.move(teacher.folder / "model", tmp_path / "teacher")
    shutil.rmtree(teacher.folder)
    taught = offbeat(
        "smollm2", *LONG, "method=distillation", f"learner.algorithm.distillation.teacher={tmp_path / 'teacher'}",
        "learner.steps=16", "learner.evaluation_every=8", timeout_s=1_700.0,
    )  # fmt: skip
    assert taught.summary["steps"] == 16
    distances = [step["learner/kl_proximal_teacher_nats"] for step in taught.steps]
    assert sum(distances[-3:]) < 0.7 * sum(distances[:3])
    reached = taught.summary["accuracy"]
    assert reached["before"] == pytest.approx(trained["before"], abs=0.1), (
        "the student began as the teacher did"
    )
    assert reached["after"] > reached["before"] + (trained["after"] - trained["before"]) / 2
