"""`offbeat eval` gives the figures of a run's last evaluation, from its model and from its checkpoint."""

import json
import subprocess

import pytest

pytestmark = pytest.mark.timeout(900)

SETS = (
    "learner.evaluation_tasks=32",
    "learner.evaluation.sampled.tasks=8",
    "learner.evaluation.sampled.samples=4",
)


# A learning rate with which four steps are seen: the merged weights are not those of the model before.
ADAPTERS = ("learner.lora.rank=8", "learner.optimizer.lr=0.01", "learner.optimizer.warmup_steps=0")


@pytest.mark.parametrize(
    "settings_of_run", [pytest.param((), marks=pytest.mark.soak), ADAPTERS], ids=["all weights", "adapters"]
)
def test_a_run_is_evaluated_by_its_model_and_by_its_checkpoint(
    offbeat, train_command, root, tmp_path, settings_of_run
):
    every = "learner.evaluation.sampled.every=2"
    run = offbeat("spell_backward", *SETS, "learner.steps=4", every, *settings_of_run)
    parameters = run.summary["parameters"]
    assert (parameters["trained"] < parameters["whole"]) == bool(settings_of_run)
    found = [(e["set"], e["tag"]) for e in run.summary["evaluations"]]
    assert found == [
        ("", "before"), ("sampled", "before"), ("sampled", "step 2"), ("", "after"), ("sampled", "after"),
    ]  # fmt: skip
    assert "evaluation sampled at step 2: held-out accuracy " in run.output
    after = next(e for e in run.summary["evaluations"] if (e["set"], e["tag"]) == ("", "after"))
    python, *_, recipe = train_command("spell_backward")[:5]
    settings = train_command("spell_backward", *SETS)[5:]
    out = tmp_path / "eval.json"
    for source in ("after its last step, 4", "the checkpoint of step 4"):
        command = [python, "-m", "launch.cli", "eval", str(run.folder), recipe, *settings, "--json", str(out)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        assert source in done.stdout
        greedy, sampled = json.loads(out.read_text())["evaluations"]
        # Batches differ, and with them the last digits of a probability.
        assert greedy["accuracy"] == pytest.approx(after["accuracy"], abs=2 / 32)
        assert greedy["return_mean"] == pytest.approx(after["return_mean"], abs=0.05)
        assert (greedy["step"], greedy["answered"], sampled["answered"]) == (4, 32, 32)
        assert set(sampled["pass_at"]) == {"1", "4"}
        # Without its result the run looks like one that has not ended.
        (run.folder / "result.json").unlink(missing_ok=True)
