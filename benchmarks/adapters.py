"""Measure what a version costs with adapters (LoRA): bytes, the learner's copy, and the pause of the engine.

Both forms of `learner.lora.publish` are published by the real learner's engine and loaded by a real vLLM engine on this
host's CPU, in the middle of an answer. The columns tokens/s say what an adapter apart costs while sampling.

    python -m benchmarks.adapters MODEL_FOLDER [MODEL_FOLDER ...] [--rank 16]
"""

import argparse
import asyncio
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from actors.config import GeneratorConfig
from actors.generator.engine import Request

Form = Literal["adapter", "merged"]
FORMS: tuple[Form, ...] = ("merged", "adapter")
VERSIONS = 9
"""Versions of each form; the first is left out of the medians."""
PROMPT = list(range(5, 25))
TOKENS = 120
ARM_S = 900.0


async def measure(model: str, form: Form, rank: int, root: Path) -> dict[str, object]:
    """Return what versions of one form cost."""
    from actors.generator.vllm_engine.engine import VllmEngine
    from learner.settings.learner import LearnerConfig, LoraConfig
    from learner.update.engine import TrainingEngine
    from protocol.weights.files import NewVersion
    from protocol.weights.format import DATA

    config = LearnerConfig(lora=LoraConfig(rank=rank, publish=form))
    engine = TrainingEngine(config, model=model, total_steps=10, seed=0)
    for name, factor in engine.deepspeed.module.lm.named_parameters():
        if ".lora_B." in name:
            # As after some training: zero factors would not be merged.
            factor.data.normal_(0.0, 0.01)
    taken = rank if form == "adapter" else 0
    settings = GeneratorConfig(kv_cache_mb=64, max_model_len=256, adapter_rank=taken)
    generator = await VllmEngine.start(settings, model=model, seed=0)

    async def sample(name: str) -> float:
        began, count = time.monotonic(), 0
        asked = Request(name, PROMPT, max_tokens=TOKENS, temperature=1.0, top_p=1.0, top_k=0, seed=1, stop=[])
        async for sampled in generator.generate(asked):
            count += len(sampled.token_ids)
        return count / (time.monotonic() - began)

    copies, pauses, nbytes = list[float](), list[float](), 0
    try:
        speeds = [await sample(f"alone-{i}") for i in range(3)]
        for version in range(1, VERSIONS + 1):
            began = time.perf_counter()
            weights = engine.weights()
            new = NewVersion(root, weights.shapes, None)
            weights.copy_into(new.memory, new.places, new.written)()
            copies.append(time.perf_counter() - began)
            path, manifest = new.finish(run="adapters", epoch=0, version=version)
            nbytes = manifest.nbytes
            running = asyncio.create_task(sample(f"during-{version}"))
            await asyncio.sleep(0)
            pauses.append(await generator.apply_weights(manifest, path.with_name(DATA)))
            await running
    finally:
        await generator.close()
    engine.close()
    return {
        "model": Path(model).name,
        "parameters": engine.parameters.whole,
        "form": form,
        "bytes": nbytes,
        "copy_ms": round(1_000 * statistics.median(copies[1:]), 2),
        "pause_ms": round(1_000 * statistics.median(pauses[1:]), 2),
        "pause_ms_most": round(1_000 * max(pauses[1:]), 2),
        "tokens_per_s": round(max(speeds), 1),
    }


def run(model: str, form: Form, rank: int) -> None:
    """Measure one arm, and print a line of JSON."""
    shared = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="offbeat-adapters-", dir=shared if shared.is_dir() else None))
    try:
        line = json.dumps(asyncio.run(measure(model, form, rank, root)))
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main() -> int:
    """Measure both forms for each model, each in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="model folders")
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    failed = 0
    for model in arguments.models:
        for form in FORMS:
            process = multiprocessing.get_context("spawn").Process(
                target=run, args=(model, form, arguments.rank)
            )
            process.start()
            process.join(ARM_S)
            if process.is_alive():
                process.kill()
                process.join(60.0)
            failed += process.exitcode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
