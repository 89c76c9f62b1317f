"""Measure what a version costs with adapters (LoRA): bytes, the learner's copy, and the pause of the engine.

Both forms of `learner.lora.publish` are published by the real learner's engine and loaded by a real vLLM engine on this
host's CPU, in the middle of an answer. The column tokens/s says what an adapter apart costs while sampling, one request
at a time.

    python -m benchmarks.adapters [--sizes 1M smollm2] [--rank 16] [--tokens 40] [--json build/adapters.json]
"""

import argparse
import asyncio
import json
import multiprocessing
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from actors.config import GeneratorConfig
from actors.generator.engine import Request
from benchmarks.generation.program import PRETRAINED, SIZES, model_folder, named
from benchmarks.report import save_results, shown

Form = Literal["adapter", "merged"]
FORMS: tuple[Form, ...] = ("merged", "adapter")
VERSIONS = 9
"""Versions of each form; the first is left out of the medians."""
PROMPT = list(range(5, 25))
ARM_S = 1_800.0


async def measure(model: str, form: Form, rank: int, tokens: int, root: Path) -> dict[str, Any]:
    """Return what versions of one form cost.

    Args:
        tokens: length of each answer.
    """
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
        asked = Request(name, PROMPT, max_tokens=tokens, temperature=1.0, top_p=1.0, top_k=0, seed=1, stop=[])
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
        "parameters": engine.parameters.whole,
        "form": form,
        "bytes": nbytes,
        "copy_ms": [round(1_000 * value, 2) for value in copies[1:]],
        "pause_ms": [round(1_000 * value, 2) for value in pauses[1:]],
        "tokens_per_s": [round(value, 1) for value in speeds],
    }


def run(size: str, form: Form, arguments: argparse.Namespace, file: Path) -> None:
    """Measure one arm, and write its row to a file."""
    shared = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="offbeat-adapters-", dir=shared if shared.is_dir() else None))
    try:
        model = str(model_folder(size, root / "model"))
        row = asyncio.run(measure(model, form, arguments.rank, arguments.tokens, root))
        file.write_text(json.dumps({"model": named(size), **row}))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table.

    Example:
        >>> print(table([{"model": "tiny", "parameters": 1_200_000, "form": "merged", "bytes": 4096, "copy_ms": [2.0],
        ...     "pause_ms": [1.0, 3.0], "tokens_per_s": [600.0, 604.0]}]))
        | model | form | bytes of a version | copy in the learner, ms | pause, ms | tokens/s |
        |---|---|---|---|---|---|
        | tiny, 1.2 M | merged | 4,096 | 2 | 2 [1, 3] | 602 [600, 604] |
    """
    lines = [
        "| model | form | bytes of a version | copy in the learner, ms | pause, ms | tokens/s |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        cells = [f"{row['model']}, {row['parameters'] / 1e6:.1f} M", row["form"], f"{row['bytes']:,}"]
        cells += [shown(row[name]) for name in ("copy_ms", "pause_ms", "tokens_per_s")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measure both forms for each model, each in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, PRETRAINED], default=["1M", PRETRAINED])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=40, help="length of each answer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = list[dict[str, Any]]()
    for size in arguments.sizes:
        for form in FORMS:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "row.json"
                process = multiprocessing.get_context("spawn").Process(
                    target=run, args=(size, form, arguments, file)
                )
                process.start()
                process.join(ARM_S)
                if process.is_alive():
                    process.kill()
                    process.join(60.0)
                if process.exitcode != 0:
                    sys.stderr.write(f"{size}, {form}: ended with {process.exitcode}\n")
                    return 1
                rows.append(json.loads(file.read_text()))
    if arguments.json is not None:
        save_results(arguments.json, {"arms": table(rows)}, rows)
    sys.stdout.write(table(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
