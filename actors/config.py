"""Settings of actors and generators."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from protocol.section import Section

OWN_GPU_SHARE = 0.9
"""Share of its memory that an engine takes of a GPU of its own. CUDA graphs and other libraries need the rest."""


class Teacher(Section):
    """A model that writes in place of the policy: answers to tasks, for a family of kind "taught", or judgements, for
    one of kind "verdict". It is an OpenAI-compatible server, or the run's own model of `[judge]`. It needs no tokenizer
    of ours, because its words become our tokens."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")
    """Name in `learner.family.teachers` or `learner.family.judge`, in logs and in counts of failures."""
    url: str = Field(pattern=r"^(https?://[^@?#\s]+|own)$")
    """Base URL, up to and with `/v1`, without a key in it; or "own", the model of `[judge]` in the run file."""
    model: str = ""
    """Name of the model at this URL."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable of the actors with the key. If it is not set, none is sent."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the teacher."""
    max_tokens: int | None = Field(None, ge=1)
    """Most tokens of an answer, as the teacher counts them. Absent: as many as its server allows."""
    concurrent: int = Field(4, ge=1)
    """Most requests at a time, of each actor."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time for one answer, waits and repetitions included. Then the answer is left out."""
    rest_s: float = Field(30.0, ge=0)
    """Seconds for which an actor does not ask a teacher again that gave no answer. Its tasks fail at once meanwhile."""

    @property
    def words(self) -> str:
        """The teacher, for people."""
        return f"teacher {self.name}"

    def contradictions(self, field: str) -> Iterator[str]:
        if self.url == "own" and (self.model or "api_key_env" in self.model_fields_set):
            yield f'{field}.url is "own", the model of [judge]; take model and api_key_env out'
        if self.url != "own" and not self.model:
            yield f"{field}.model is empty; name the model at {self.url}"


class ActorConfig(Section):
    """Section `[actor]` of the run file."""

    count: int = Field(2, ge=0)
    """Actor processes that `offbeat train` starts. 0: all actors are on other hosts."""
    concurrent_episodes: int = Field(32, ge=1)
    """Episodes that one actor runs at the same time, in one event loop."""
    segment_tokens: int = Field(512, ge=1)
    """Tokens after which a segment is cut. The end of an action turn cuts it earlier."""
    max_turns: int = Field(32, ge=1)
    """Action turns after which an episode is truncated."""
    generator_timeout_s: float = Field(30.0, gt=0)
    """Longest silence of a generator during a request: generators report every 5 s that a request is under way.
    Then the actor aborts the request and sends it to a different generator."""
    env_timeout_s: float = Field(30.0, gt=0)
    """Longest time that an environment's reset or step may take. A longer one fails its episode."""
    drain_timeout_s: float = Field(10.0, gt=0)
    """Longest time that running episodes may take to end after SIGTERM. Then the actor gives them up."""
    teachers: tuple[Teacher, ...] = Field((), strict=False)
    """Models that write in place of the policy, for `learner.family.teachers` or `.judge`. Absent: none."""

    def contradictions(self, field: str) -> Iterator[str]:
        names = [teacher.name for teacher in self.teachers]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{field}.teachers has {name!r} twice; give each a name of its own"


class GeneratorConfig(Section):
    """Section `[generator]` of the run file."""

    count: int = Field(1, ge=0)
    """Generator processes that `offbeat train` starts. 0: all generators are on other hosts."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] = Field((), strict=False)
    """GPUs of all generators, as places in CUDA_VISIBLE_DEVICES or numbers on this host; each takes the next
    `tensor_parallel_size` of them. Absent: those that the learner leaves, or all if it leaves too few."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs, or processes on a CPU, among which a generator divides each layer. For models that one cannot hold."""
    backend: Literal["vllm", "http"] = "vllm"
    """Inference engine. "vllm" runs inside the generator; "http" is a vLLM server run by others, at `url`."""
    url: str = ""
    """Base URL of the server for backend = "http"."""
    endpoint: str = "tcp://127.0.0.1:0"
    """ZeroMQ address on which the generator listens for actors. Port 0 takes a free port at start. Use
    tcp://0.0.0.0:0, for example, so that other hosts reach it."""
    advertised_host: str = ""
    """Name or address of this host that actors connect to. Empty means the address that the generator listens
    on or, if it listens on all addresses, the one from which it reaches the broker."""
    weights_http: str = Field("", pattern=r"^$|:\d+$")
    """HOST:PORT at which the generator serves the weight versions that its host has fetched to other hosts,
    for example 0.0.0.0:0. Port 0 takes a free port at start. Empty means that it serves none."""
    rack: str = Field("", max_length=200)
    """Name of the rack, zone or switch of this host. Hosts of one rack fetch weights from each other where they can."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Float type of the engine. "auto": bfloat16 on GPUs that compute in it, else float32."""
    max_model_len: int = Field(1024, ge=8)
    """Longest prompt plus continuation, in tokens. Absent: 1024, or the model's own limit where that is smaller and
    `model.path` is a folder."""
    evaluators: int = Field(0, ge=0)
    """Generators, of `count`, that answer evaluation tasks alone: `generator-0` and so on. Training goes on meanwhile,
    and each keeps the evaluated version until the evaluation is over. 0: the learner stands during evaluations."""
    max_num_seqs: int = Field(128, ge=1)
    """Requests that the engine runs at the same time."""
    kv_cache_mb: int = Field(128, ge=16)
    """Memory of the KV cache, in MiB (CPU only)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Share of the GPU memory that vLLM may use (GPU only). "auto": 0.9 on a GPU of its own; on a shared one a part,
    see docs/run/gpus.md."""
    block_size: int | None = None
    """Tokens per KV block. None means 32 on a CPU and vLLM's default on a GPU."""
    enforce_eager: Literal["auto", True, False] = "auto"
    """True runs the model without compiling it. False compiles it: slower start, faster decoding on GPUs. "auto":
    false on a GPU, true on a CPU."""
    kv_on_update: Literal["auto", "recomputed", "kept"] = "auto"
    """Treatment of running requests' KV cache at a weight update. "recomputed" drops it. "kept" is faster,
    but one forward pass cannot reproduce the behaviour probabilities. Every segment records the choice. "auto": "kept"
    where a GPU would compute for more than about a second at each update, else "recomputed"."""
    sleep_in_updates: Literal["auto", True, False] = "auto"
    """True if engines give their GPU to the learner while it updates, which needs `run.mode` "sync". "auto": where they
    share one in lockstep."""
    routes: bool = False
    """True if the engine records which experts of a mixture of experts each token goes through. Absent: where
    `learner.algorithm.routes` is "behaviour", which needs it."""
    adapter_rank: int = Field(0, ge=0, le=512)
    """Largest rank of the adapters that versions are; 0: versions are whole weights. Absent: `learner.lora.rank` where
    `learner.lora.publish` comes to "adapter"."""
    stream_interval: int = Field(16, ge=1)
    """Tokens per chunk that the generator sends to an actor."""
    stall_timeout_s: float = Field(8.0, gt=0)
    """Least time for which the engine may make no step while requests run. It is longer where steps take
    long: eight times the longest step that was measured at the start or seen lately. Then the generator
    fails, and is replaced."""
    warm_up_s: float = Field(300.0, gt=0)
    """Longest time for the engine's first steps, which the generator makes before it takes requests. They may
    compile and allocate, and their time is measured."""
    load_timeout_s: float = Field(300.0, gt=0)
    """Longest time that loading a version may take. For a small model it is `stall_timeout_s` plus 1 s per
    50 MB."""
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """OpenMP threads of the engine (CPU only). "auto": an equal part of the host's cores for each process that
    computes, 1 for models below 20 million parameters, and 1 by hand."""

    # `launch.preflight.hardware` decides each "auto" from the GPUs. Where nobody has, the engine runs as on a CPU.

    @property
    def dtype_used(self) -> Literal["float32", "bfloat16", "float16"]:
        """Float type of the engine, with "auto" resolved."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def threads_used(self) -> int:
        """OpenMP threads of the engine; an "auto" that `launch.preflight.hardware` has not resolved is 1."""
        return 1 if self.threads == "auto" else self.threads

    @property
    def enforce_eager_used(self) -> bool:
        """Whether the model is not compiled, with "auto" resolved."""
        return self.enforce_eager is not False

    @property
    def kv_on_update_used(self) -> Literal["recomputed", "kept"]:
        """Treatment of running requests' KV cache at a weight update, with "auto" resolved."""
        return "recomputed" if self.kv_on_update == "auto" else self.kv_on_update

    @property
    def gpu_memory_utilization_used(self) -> float:
        """Share of the GPU memory that vLLM may use, with "auto" resolved."""
        share = self.gpu_memory_utilization
        return OWN_GPU_SHARE if isinstance(share, str) else share

    def contradictions(self, field: str) -> Iterator[str]:
        relay = self.weights_http
        if self.count > 1 and relay and not relay.endswith(":0"):
            yield (
                f"{field}.weights_http is {relay}, but {field}.count is {self.count}: one port cannot serve several "
                "processes; use port 0"
            )
        if self.evaluators and self.evaluators >= self.count:
            yield (
                f"{field}.evaluators is {self.evaluators} of {field}.count = {self.count} generators, so that none is "
                f"left for training; raise {field}.count"
            )
        if self.evaluators and self.backend == "http":
            yield f'{field}.evaluators needs {field}.backend = "vllm": a server run by others keeps no version'
        if self.backend == "http" and self.adapter_rank:
            yield (
                f'{field}.adapter_rank is {self.adapter_rank}, but {field}.backend is "http", which takes whole '
                'weights; leave it out, and set learner.lora.publish to "merged"'
            )
        if self.backend == "http" and not self.url:
            yield f'{field}.backend is "http" but {field}.url is empty; name the server, e.g. http://127.0.0.1:8000'
