"""Our generator's engine and a bare AsyncLLM on the same requests, a load into it, and the gap to the learner.

The bare side is the engine's own AsyncLLM, with the same sampling parameters and without our layer. The step `system`
measures broker and actors, too.
"""

import asyncio
import gc
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.config import GeneratorConfig
from actors.generator.engine import Request
from actors.generator.vllm_engine.engine import VllmEngine
from benchmarks.gpu.setting import MODELS, GpuSetting, load, make_model
from benchmarks.report import Figure
from learner.weight_copy import OutgoingWeights
from protocol.weights.files import NewVersion
from protocol.weights.format import DATA, Manifest, read_shapes

RELOADS = 20
Answers = list[tuple[list[int], list[int], list[float]]]
"""Prompt, sampled tokens, and their log-probabilities, of each request."""


def measure(setting: GpuSetting) -> list[Figure]:
    """Measure each model, without CUDA graphs and with them; the CPU has none."""
    modes = (True,) if setting.tiny or not setting.cuda else (False,) if setting.quick else (True, False)
    return [
        figure
        for name in setting.models
        for eager in modes
        for figure in asyncio.run(engine_figures(setting, name, eager=eager))
    ]


async def engine_figures(setting: GpuSetting, name: str, *, eager: bool) -> list[Figure]:
    """Start an engine, measure it, and end it."""
    folder = make_model(name, setting.shelf, setting.dtype, setting.device)
    config = GeneratorConfig(
        dtype=setting.dtype_name,  # type: ignore[arg-type]
        max_model_len=256 if setting.tiny else 2048,
        max_num_seqs=8 if setting.tiny else 1024,
        gpu_memory_utilization=0.1 if setting.tiny else 0.5,
        enforce_eager=eager,
    )
    engine = await VllmEngine.start(config, model=str(folder), seed=0)
    where = f"{name}, {'without graphs' if eager else 'with graphs'}"
    try:
        figures = [
            await rates(setting, engine, name, where, requests)
            for requests in ((4,) if setting.tiny else (64, 256, 1024))
        ]
        before = gap(setting, name, folder, await answers(engine, name, 4 if setting.tiny else 64, 16))
        figures += await reloads(setting, engine, folder, where)
        after = gap(setting, name, folder, await answers(engine, name, 4 if setting.tiny else 64, 16))
    finally:
        await engine.close()
    return [
        *figures,
        *gap_figures(f"{where}: gap to float32", before),
        *gap_figures(f"{where}: gap to float32 after the loads", after),
    ]


def requests_of(name: str, count: int, tokens: int, *, tag: str, length: int | None = None) -> list[Request]:
    """Return requests with random prompts, the same for each tag.

    Args:
        tokens: most tokens of an answer.
        length: tokens of a prompt; None: the usual number.
    """
    rng, length = np.random.default_rng(0), length or (16 if name == "tiny" else 128)
    prompts = rng.integers(3, MODELS[name].vocabulary, (count, length)).tolist()
    return [Request(f"{tag}-{i}", prompt, tokens, 1.0, 1.0, 0, i, []) for i, prompt in enumerate(prompts)]


async def answers(engine: VllmEngine, name: str, count: int, tokens: int, tag: str = "answers") -> Answers:
    """Run requests at the same time through our engine, and return what was sampled."""

    async def one(request: Request) -> tuple[list[int], list[int], list[float]]:
        ids, logps = list[int](), list[float]()
        async for sampled in engine.generate(request):
            ids += sampled.token_ids.tolist()
            logps += sampled.logp_behaviour.tolist()
        return request.prompt, ids, logps

    return list(await asyncio.gather(*map(one, requests_of(name, count, tokens, tag=f"{tag}-{count}"))))


async def bare(engine: VllmEngine, name: str, count: int, tokens: int, tag: str) -> int:
    """Run the same requests through vLLM alone, and return the number of sampled tokens."""
    llm: Any = engine._llm

    async def one(request: Request) -> int:
        sampled = 0
        async for output in llm.generate(engine._prompt(request), engine._sampling(request), request.id):
            sampled += len(output.outputs[0].token_ids)
        return sampled

    return sum(await asyncio.gather(*map(one, requests_of(name, count, tokens, tag=f"bare-{tag}-{count}"))))


async def rates(setting: GpuSetting, engine: VllmEngine, name: str, where: str, count: int) -> Figure:
    """Return the tokens per second of so many requests at a time, beside vLLM alone; both take turns."""
    tokens, clock = 8 if setting.tiny else 256, asyncio.get_running_loop().time
    ours, theirs = list[float](), list[float]()
    await answers(engine, name, count, 8, tag="warm-up")
    for repetition in range(setting.repetitions):
        began = clock()
        found = await answers(engine, name, count, tokens, tag=f"ours-{repetition}")
        between = clock()
        alone = await bare(engine, name, count, tokens, tag=str(repetition))
        theirs.append(alone / (clock() - between))
        ours.append(sum(len(ids) for _, ids, _ in found) / (between - began))
    return Figure(f"{where}: {count} requests", "tokens/s", ours, "bare AsyncLLM", theirs)


def published(folder: Path, root: Path) -> tuple[Manifest, Path]:
    """Write the tensors of a model folder as a version, and return its manifest and data file."""
    from safetensors.torch import load_file

    shapes, tensors = read_shapes(folder / "model.safetensors"), load_file(folder / "model.safetensors")
    new = NewVersion(root, shapes)
    try:
        weights = OutgoingWeights(shapes, ((name, tensors[name]) for name in shapes))
        weights.copy_into(new.memory, new.places, new.written)()
        path, manifest = new.finish(run="benchmark", epoch=1, version=1)
    except BaseException:
        new.discard()
        raise
    return manifest, path.with_name(DATA)


async def reloads(setting: GpuSetting, engine: VllmEngine, folder: Path, where: str) -> list[Figure]:
    """Load the weights that the engine has, again and again, and return the pauses, beside vLLM's own reload."""
    manifest, file = published(folder, setting.folder / "reload")
    clock, llm = asyncio.get_running_loop().time, engine._llm
    loads = 3 if setting.tiny else 6 if setting.quick else RELOADS
    pauses = [await engine.apply_weights(manifest, file) for _ in range(loads)]
    alone = list[float]()
    for _ in pauses:
        began = clock()
        await llm.collective_rpc("reload_weights")
        alone.append(clock() - began)
    # What vLLM's own reload leaves behind is not our business.
    await engine.apply_weights(manifest, file)
    # The first load allocates.
    return [Figure(f"{where}: pause for a load", "s", pauses[1:], "vLLM's reload from the folder", alone[1:])]


def gap(setting: GpuSetting, name: str, folder: Path, found: Answers) -> np.ndarray[Any, Any]:
    """Return the differences of the engine's log-probabilities to those of a float32 forward pass of the model."""
    model = load(folder, torch.float32, setting.device).eval()
    gaps = []
    with torch.no_grad():
        for prompt, ids, logps in found:
            row = torch.tensor([prompt + ids], device=setting.device)
            logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
            exact = torch.log_softmax(logits.float(), -1).gather(-1, row[0, len(prompt) :, None])[:, 0]
            gaps.append(np.array(logps) - exact.cpu().numpy())
    del model
    gc.collect()
    return np.concatenate(gaps)


def gap_figures(where: str, gaps: np.ndarray[Any, Any]) -> list[Figure]:
    """Return the sizes of the differences, in nats, and the largest ratio of probabilities."""
    size = np.abs(gaps)
    return [
        Figure(f"{where}, mean", "nats", [float(size.mean())]),
        Figure(f"{where}, 99th percentile", "nats", [float(np.quantile(size, 0.99))]),
        Figure(f"{where}, largest ratio", "ratio", [float(np.exp(size.max()))]),
    ]
