"""Program for torchrun: two ranks train, meet a NaN, save and resume; rank 0 writes the results.

Usage: torchrun --nproc_per_node 2 -- tests/integration/learner/two_ranks.py MODEL OUT STAGE-DTYPE ...

A case STAGE-DTYPE-adapters trains adapters, STAGE-DTYPE-sums measures how the model is loaded and gradients are summed,
and STAGE-DTYPE-resume continues from the checkpoint in OUT/one/CASE; any other third part is a method of
`tests.methods`.
"""

import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[3]))

from learner.settings.learner import LearnerConfig, LoraConfig, OptimizerConfig
from learner.update.engine import TrainingEngine
from tests.integration.learner.large.gradient_sums import gradient_errors
from tests.integration.learner.large.loading import loaded
from tests.integration.learner.published import weights_of
from tests.methods import method
from tests.trajectories import make_batch_of_groups, make_group, with_routes

OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-5, max_grad_norm=0.5)
ADAPTERS, SUMS, RESUME = "adapters", "sums", "resume"
ONE = "one"
"""Folder with the checkpoints of one rank, by case."""


def settings(stage, dtype, processes, *, adapters=False):
    return LearnerConfig(
        processes=processes,
        zero_stage=stage,
        dtype=dtype,
        optimizer=OPTIMIZER,
        micro_batch_tokens=40,
        lora=LoraConfig(rank=4) if adapters else None,
    )


def batches():
    """Return three batches; the last has one trajectory, so that one of two ranks has nothing to do."""
    return [make_batch_of_groups(3, 3), make_batch_of_groups(2, 4), make_batch_of_groups(2, 2)[:1]]


def method_settings(name, processes):
    return {
        "processes": processes,
        "optimizer": OPTIMIZER,
        "micro_batch_tokens": 40,
        "max_policy_lag": 4,
        "algorithm": method(name),
    }


def method_batches(name=""):
    """Return two batches with lags 0 to 2, behaviour policies near the current one, and unequal lengths.

    For a method with given experts, tokens have them.
    """
    batches = [
        [*make_batch_of_groups(2, 3, version=2), *make_group("h", [0.1, 0.9, 0.4], version=1, spread=0.2)],
        [*make_batch_of_groups(1, 4, version=0), *make_group("i", [1.0, 0.0, 0.3], version=2, spread=0.2)],
    ]
    return [list(map(with_routes, batch)) for batch in batches] if name.startswith("given") else batches


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


def lead(engine, out):
    first, second, third = batches()
    reports = [engine.update(batch, current_version=0) for batch in (first, second, third)]
    trained = weights_of(engine)
    save_file(trained, out / "trained.safetensors")
    engine.save(out / "checkpoints", {"cursor": 17})

    poisoned = second[3].logp_behaviour.copy()
    poisoned[-1] = np.nan
    bad = [*second[:3], dataclasses.replace(second[3], logp_behaviour=poisoned), *second[4:]]
    skipped = engine.update(bad, current_version=0)
    unchanged = equal(weights_of(engine), trained)

    engine.update(first, current_version=0)
    onward = weights_of(engine)
    client = engine.load(out / "checkpoints")
    engine.update(first, current_version=0)
    engine.save_pretrained(out / "final")
    result = {
        "metrics": [report.metrics for report in reports],
        "tokens": [len(report.histograms["ratio_proximal_behaviour"]) for report in reports],
        "skipped": not skipped.applied and skipped.nonfinite,
        "unchanged": unchanged,
        "client": client,
        "resumed_bit_equal": equal(weights_of(engine), onward),
        "moved": not equal(onward, trained),
    }
    (out / "result.json").write_text(json.dumps(result))


def lead_resumed(engine, out):
    """Save what was loaded, then train on, and save again."""
    client = engine.load(out.parent / ONE / out.name)
    engine.save(out / "loaded", client)
    metrics = engine.update(batches()[0], current_version=0).metrics
    save_file(weights_of(engine), out / "trained.safetensors")
    engine.save(out / "trained", client)
    (out / "result.json").write_text(json.dumps(metrics))


def lead_method(engine, out):
    name = out.name.split("-")[2]
    metrics = [engine.update(batch, current_version=2).metrics for batch in method_batches(name)]
    save_file(weights_of(engine), out / "trained.safetensors")
    (out / "result.json").write_text(json.dumps(metrics))


def main():
    warnings.simplefilter("ignore")
    model, out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    for case in cases:
        stage, dtype, *name = case.split("-")
        special = not name or name[0] in (ADAPTERS, SUMS, RESUME)
        if special:
            chosen = settings(int(stage), dtype, 2, adapters=name == [ADAPTERS])
        else:
            chosen = LearnerConfig(**method_settings(name[0], 2), zero_stage=int(stage))
        engine = TrainingEngine(chosen, model=model, total_steps=10, seed=5)
        found = {}
        if name == [SUMS]:
            found = {"errors": gradient_errors(engine)}
            found |= {"loaded": loaded(model, chosen, 2)} if stage == "3" else {}
        if engine.rank > 0:
            engine.follow()
            continue
        folder = Path(out) / case
        folder.mkdir()
        if found:
            (folder / "result.json").write_text(json.dumps(found))
        elif name == [RESUME]:
            lead_resumed(engine, folder)
        else:
            lead(engine, folder) if special else lead_method(engine, folder)
        if case == cases[-1]:
            engine.close()
        else:
            engine.release()
    sys.stdout.flush()
    # A normal interpreter shutdown would race with gloo's threads.
    os._exit(0)


if __name__ == "__main__":
    main()
