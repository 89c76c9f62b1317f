"""The check of an engine that divides each layer among two processes, on a CPU or on two GPUs."""

import time
from pathlib import Path

from actors.config import GeneratorConfig
from tests.integration.actors.engine_checks import (
    FLOAT32,
    LONG_PROMPT,
    NEVER,
    PROCESS_ENDS_S,
    Arithmetic,
    Policies,
)
from tests.integration.actors.generator_harness import Running, children, engine_process, gone
from tests.integration.learner.tiny_qwen3 import greedy, publish, save


def check_divided(config: GeneratorConfig, folder: Path, *, arithmetic: Arithmetic = FLOAT32) -> None:
    """Update between two greedy answers, and kill the generator: neither engine nor workers stay behind."""
    policies = Policies(tied=True, dtype=arithmetic.dtype)
    settings = {"max_tokens": 20, "temperature": 0.0, "stop_token_ids": NEVER}
    running = Running(config, save(policies[0], folder / "model"))
    try:
        engine = engine_process(running.process.pid)
        family = [engine, *workers(engine)]
        assert len(family) == 3, "an engine and two workers"
        actor = running.actor()
        before = running.ask(actor, "before", LONG_PROMPT, **settings)
        running.update(publish(policies[1], folder / "published", version=1), version=1)
        after = running.ask(actor, "after", LONG_PROMPT, **settings)
        assert (set(before.versions), set(after.versions)) == ({0}, {1})
        for version, answer in enumerate((before, after)):
            assert policies.largest_error(LONG_PROMPT, answer) < arithmetic.tolerance
            if arithmetic.exact:
                assert answer.ids == greedy(policies[version], LONG_PROMPT, 20)
        running.process.kill()
        running.process.join()
        deadline = time.monotonic() + PROCESS_ENDS_S
        while not all(map(gone, family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert [pid for pid in family if not gone(pid)] == []
    finally:
        running.close()


def workers(engine: int) -> list[int]:
    """Return the workers of an engine."""
    return [
        pid
        for pid in children(engine)
        if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
