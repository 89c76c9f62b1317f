"""Tokens per second through a generator process, compared with a bare AsyncLLM and the same prompts.

    python benchmarks/generator_throughput.py [--concurrent 64] [--requests 1024] [--profile FILE]

A random Qwen3 of 1.2 million parameters, prompts of 25 tokens, answers of 16. Both sides keep the same number
of requests running; the first round of each is not counted. On shared cores only the ratio means something.
"""

import argparse
import asyncio
import cProfile
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from actors.config import GeneratorConfig
from protocol.codec import decode, encode, encode_arrays
from protocol.link import dealer, router
from protocol.messages import Generate, Hello, Welcome

PROMPT_TOKENS, ANSWER_TOKENS, VOCAB = 25, 16, 96
CONFIG = GeneratorConfig(kv_cache_mb=128)


def save_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 32}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB, **shape, **heads)).float().save_pretrained(folder)


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(0, VOCAB, (count, PROMPT_TOKENS)).tolist()


async def bare(model: str, requests: int, concurrent: int, rounds: int, results: Any) -> None:
    """A loop around AsyncLLM with nothing else in it."""
    from actors.engine import Request
    from actors.vllm_engine import VllmEngine

    engine = await VllmEngine.start(CONFIG, model=model, seed=0)
    llm, todo = engine._llm, prompts(requests)
    sampling = engine._sampling(Request("", [0], ANSWER_TOKENS, 1.0, 1.0, 0, None, []))

    async def worker(queue: list[tuple[int, list[int]]]) -> None:
        while queue:
            number, prompt = queue.pop()
            async for _ in llm.generate({"type": "token", "prompt_token_ids": prompt}, sampling, str(number)):
                pass

    for _ in range(rounds):
        queue = list(enumerate(todo))
        began = time.perf_counter()
        await asyncio.gather(*(worker(queue) for _ in range(concurrent)))
        results.put(time.perf_counter() - began)
    await engine.close()


def run_bare(*arguments: Any) -> None:
    asyncio.run(bare(*arguments))


def run_generator(profile: str, **arguments: Any) -> None:
    from actors.generator import serve_generator

    if not profile:
        return serve_generator(CONFIG, **arguments)
    profiler = cProfile.Profile()
    try:
        profiler.runcall(serve_generator, CONFIG, **arguments)
    finally:
        profiler.dump_stats(profile)


def through_generator(model: str, requests: int, concurrent: int, rounds: int, profile: str) -> list[float]:
    broker = router(zmq.Context.instance())
    broker.bind("tcp://127.0.0.1:0")
    arguments = {"name": "g", "broker": broker.getsockopt_string(zmq.LAST_ENDPOINT), "model": model}
    process = multiprocessing.get_context("spawn").Process(
        target=run_generator, args=(profile,), kwargs=arguments | {"run": "bench", "seed": 0}
    )
    process.start()
    peer, *frames = broker.recv_multipart()
    hello = decode(frames)[0]
    assert isinstance(hello, Hello)
    broker.send_multipart([peer, *encode(Welcome(run="bench", epoch=0, heartbeat_s=3600, policy_version=0))])
    actor = dealer(zmq.Context.instance(), "actor")
    actor.connect(hello.endpoint)
    seconds = [one_round(actor, prompts(requests), concurrent, n) for n in range(rounds)]
    process.terminate()
    process.join(30.0)
    return seconds


def one_round(actor: Any, todo: list[list[int]], concurrent: int, number: int) -> float:
    def ask(index: int) -> None:
        message = Generate(request_id=f"{number}-{index}", max_tokens=ANSWER_TOKENS, stop_token_ids=[VOCAB])
        actor.send_multipart(encode_arrays(message, {"token_ids": np.array(todo[index], dtype="<i4")}))

    began = time.perf_counter()
    asked = finished = 0
    while finished < len(todo):
        while asked < min(len(todo), finished + concurrent):
            ask(asked)
            asked += 1
        chunk, _ = decode(actor.recv_multipart())
        if chunk.finish_reason:  # type: ignore[union-attr]
            finished += 1
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--profile", default="")
    options = parser.parse_args()
    tokens = options.requests * ANSWER_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        results: Any = multiprocessing.get_context("spawn").Queue()
        loads = (options.requests, options.concurrent, options.rounds)
        process = multiprocessing.get_context("spawn").Process(
            target=run_bare, args=(folder, *loads, results)
        )
        process.start()
        figures = {"bare AsyncLLM": [results.get() for _ in range(options.rounds)]}
        process.join()
        figures["generator"] = through_generator(folder, *loads, options.profile)
    for name, seconds in figures.items():
        rates = [tokens / s for s in seconds[1:]]  # the first round warms up
        print(f"{name:14} {statistics.median(rates):6.0f} tokens/s ({min(rates):.0f} - {max(rates):.0f})")


if __name__ == "__main__":
    main()
