"""`launch.role` with the counting engine in place of vLLM; the arguments are the same."""

import contextlib
import os
from pathlib import Path

from actors.generator import generator as process
from launch.role import main
from tests.integration.hosts.counting_engine import CountingEngine


@contextlib.asynccontextmanager
async def engine(config, *, model, seed):
    yield CountingEngine(Path(model), float(os.environ.get("COUNTING_PAUSE_S", "0")))


if __name__ == "__main__":
    process.engine_of = engine
    main()
