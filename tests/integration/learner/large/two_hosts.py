"""Program for torchrun: ranks of a learner on two hosts, as `launch.role` runs them, but without a broker.

Usage: torchrun ... -- tests/integration/learner/large/two_hosts.py MODEL FOLDER MICRO_BATCH_TOKENS
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[4]))

from learner.errors import HostsDiffer
from learner.process import SharedGpu, Stop, lead, leave
from tests.integration.learner.published import weights_of
from tests.integration.learner.two_ranks import batches, settings


def main():
    warnings.simplefilter("ignore")
    model, folder, tokens = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    two = {"processes": 1, "nodes": 2, "micro_batch_tokens": tokens}
    config = settings(3, "float32", 1).model_copy(update=two)
    try:
        engine = lead(
            config, Stop(), SharedGpu(None, 0.0), model=model, seed=5, segment_tokens=None, run_dir=folder
        )
    except HostsDiffer as error:
        sys.exit(f"refused: {error}")
    first, second, _ = batches()
    metrics = engine.update(first, current_version=0).metrics
    engine.save(folder / "checkpoints", {"cursor": 3})
    engine.update(second, current_version=0)
    onward = weights_of(engine)
    client = engine.load(folder / "checkpoints")
    engine.update(second, current_version=0)
    again = weights_of(engine)
    save_file(again, folder / "trained.safetensors")
    equal = all(torch.equal(again[name], onward[name]) for name in onward)
    (folder / "result.json").write_text(
        json.dumps({"metrics": metrics, "client": client, "resumed": equal, "ranks": engine.ranks})
    )
    engine.close()
    leave()


if __name__ == "__main__":
    main()
