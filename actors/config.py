"""Settings of actors and generators."""

from typing import Literal

from pydantic import Field

from protocol.section import Section


class ActorConfig(Section):
    """`[actor]` of the run file."""

    count: int = Field(2, ge=1)
    """Actor processes that `offbeat train` starts."""
    concurrent_episodes: int = Field(32, ge=1)
    """Episodes one actor runs at a time in its event loop."""
    segment_tokens: int = Field(512, ge=1)
    """A segment is cut after so many tokens, or at the end of a turn, whichever comes first."""
    max_turns: int = Field(32, ge=1)
    """Action turns after which an episode is truncated."""
    generator_timeout_s: float = Field(30.0, gt=0)
    """Without a token for so long, a request is aborted and sent to another generator."""
    env_timeout_s: float = Field(30.0, gt=0)
    """An environment's reset or step that takes longer fails its episode."""
    drain_timeout_s: float = Field(10.0, gt=0)
    """After SIGTERM, running episodes get so long to end; then they are given up."""


class GeneratorConfig(Section):
    """`[generator]` of the run file."""

    count: int = Field(1, ge=1)
    """Generator processes that `offbeat train` starts."""
    backend: Literal["vllm", "http"] = "vllm"
    """"vllm": an engine inside the generator process. "http": a vLLM server run by others, at `url`."""
    url: str = ""
    """Base URL of the server for backend = "http"."""
    endpoint: str = "tcp://127.0.0.1:0"
    """Where it listens for actors, for example tcp://0.0.0.0:0 to be reached from other hosts. Port 0: a free port is
    chosen at start."""
    advertised_host: str = ""
    """Name or address of this host, as actors are told it. Empty: where it listens on all addresses, the one from which
    it reaches the broker; else the one it listens on."""
    weights_http: str = Field("", pattern=r"^$|:\d+$")
    """HOST:PORT where it serves other hosts the versions that its own has fetched, for example 0.0.0.0:0. Port 0: a
    free port is chosen at start. Empty: it serves none."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: int = Field(1024, ge=8)
    """Longest prompt plus continuation, in tokens."""
    max_num_seqs: int = Field(128, ge=1)
    """Requests the engine runs at a time."""
    kv_cache_mb: int = Field(128, ge=16)
    """Memory of the KV cache (CPU), in MiB."""
    gpu_memory_utilization: float = Field(0.5, gt=0, le=1)
    """Share of GPU memory (GPU only)."""
    block_size: int | None = None
    """Tokens per KV block; None leaves it to vLLM (32 is used on CPU)."""
    enforce_eager: bool = True
    """False compiles the model: slower start, faster decoding on GPUs."""
    kv_on_update: Literal["recomputed", "kept"] = "recomputed"
    """What happens to running requests' KV at a weight update. "kept" is faster, but one forward pass cannot
    reproduce the behaviour probabilities; it is recorded in every segment."""
    stream_interval: int = Field(16, ge=1)
    """Tokens per chunk on the way to the actor."""
    stall_timeout_s: float = Field(8.0, gt=0)
    """With work and without a token for so long, the generator ends with an error and is replaced."""
    warm_up_s: float = Field(60.0, gt=0)
    """The same until its first token: an engine may compile or allocate for its first requests."""
    load_timeout_s: float = Field(300.0, gt=0)
    """Longest pause for loading a version; for a small model it is `stall_timeout_s` and a second per 50 MB."""
    threads: int = Field(1, ge=1)
    """OpenMP threads of the engine (CPU)."""
