"""The run file's sections: one for each role, and sections that all roles share."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from actors.config import ActorConfig, GeneratorConfig
from broker.config import BrokerConfig, FleetConfig
from envs.registry import EnvConfig
from learner.settings.learner import LearnerConfig, LoraConfig
from learner.settings.trackers import DEFAULT_TRACKERS, TrackerName
from protocol.section import Section
from protocol.security.addresses import is_loopback

MOST_RANK = 512
"""Largest rank of adapters that vLLM takes."""
ADAPTERS_LR = 2e-5
"""Learning rate of adapters, where the run file has none."""
TINY_LR = 3e-4
"""Learning rate of a tiny model that is made here, where the run file has none."""
NO_CAPACITY_MINUTES = 5.0
"""Minutes that the learner waits without generators or actors, where no other host can join."""


class RunSection(Section):
    """`[run]`: name, seed, mode and time limit of a run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder."""
    dir: Path = Field(Path("runs"), strict=False)
    """Folder that contains the run folders."""
    seed: int = Field(0, ge=0)
    """Seed of the random numbers of the learner and the generators."""
    mode: Literal["async", "sync"] = "async"
    """"async": generators sample while the learner trains. "sync" runs the same roles in lockstep: generate a
    batch, train on it, update, repeat."""
    max_minutes: float = Field(60.0, gt=0)
    """Training ends after this many minutes, whatever step it has reached."""
    trackers: list[TrackerName] = Field(default_factory=lambda: list(DEFAULT_TRACKERS))
    """Where the learner's report goes, besides `metrics.jsonl`: "tensorboard", "wandb", "mlflow", "swanlab", "trackio".
    Each but the first is an extra of its name: `pip install 'offbeat[wandb]'`. See docs/run/trackers.md."""
    project: str = Field("offbeat", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Project or experiment of the run at its trackers."""

    def contradictions(self, field: str) -> Iterator[str]:
        twice = sorted({name for name in self.trackers if self.trackers.count(name) > 1})
        if twice:
            yield f"{field}.trackers names {', '.join(twice)} twice; name each tracker once"


class WarmStartSection(Section):
    """`[model.tiny.warm_start]`: supervised training on solutions that the environment provides."""

    steps: int = Field(300, ge=0)
    """Upper limit of the optimizer steps."""
    stop_at: float = Field(1.0, gt=0, le=1)
    """Training stops when this share of unseen training tasks is solved, so that the rest is left to RL."""
    batch: int = Field(64, ge=1)
    """Solutions per optimizer step."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of AdamW."""
    warmup_steps: int = Field(20, ge=0)
    """Optimizer steps over which the learning rate rises to `lr`."""
    demonstrations: int = Field(2000, ge=1)
    """Number of training tasks whose solutions are used."""
    lessons: bool = False
    """Show also how the tasks of `learner.family` are answered: what a judgement or a reflection looks like, and a
    solution behind a note or behind a mistake. A tiny model has never read a note. With `learner.algorithm.siblings`: a
    task behind its solution. With `learner.selection.instructions`: right answers behind the first instruction, and
    mistakes behind the others. With `learner.family.lessons` that is the first of these, and all of these are shown as
    proposals."""


class TinyModel(Section):
    """`[model.tiny]`: a small Qwen3 model with its own tokenizer, made here unless it is cached."""

    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(384, ge=8)
    """Width of the feed-forward layers."""
    layers: int = Field(4, ge=1)
    """Transformer layers."""
    heads: int = Field(4, ge=1)
    """Attention heads per layer."""
    head_dim: Literal[32, 64, 80, 96, 112, 128] = 32
    """Width of an attention head. vLLM's attention on CPU supports these sizes only."""
    rope_theta: float = Field(500.0, gt=1)
    """Base of the rotary position embedding. The default is small because tiny models see short texts."""
    tie_embeddings: bool = False
    """Use one matrix for the input embeddings and the output layer."""
    seed: int = 0
    """Seed of the initial weights and of the warm start."""
    warm_start: WarmStartSection = WarmStartSection()


class ModelSection(Section):
    """`[model]`: the model that training starts from: an existing model, or a tiny one made here."""

    path: str = ""
    """Hugging Face name or folder of a causal language model, or a GGUF file, which is converted once. `smollm2` is
    SmolLM2-135M-Instruct, from the hub or, without one, from a Python package. If it is set, `[model.tiny]` is
    not used."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Variables that the chat template gets with every prompt, for example `enable_thinking = false`."""
    special_tokens_in_messages: bool = False
    """Let special tokens in system, user and tool messages, such as `<|im_end|>`, become these tokens. By default they
    stay text, so that a row or a tool's result cannot pretend to be another turn. Needed for prompts that hold a
    whole rendered conversation."""
    tiny: TinyModel | None = None
    cache: Path = Field(Path("runs/models"), strict=False)
    """Folder in which tiny models are kept for later runs. Other settings, other files of the environment, other code
    of its solutions or other lessons make another one."""

    @property
    def local(self) -> bool:
        """Whether the model is on this host or is made here, so that no hub is asked for it."""
        return not self.path or Path(self.path).exists()

    def contradictions(self, field: str) -> Iterator[str]:
        if not self.path and self.tiny is None:
            yield f"{field}: set {field}.path (a Hugging Face name or folder), or add the section [{field}.tiny]"


class SupervisorSection(Section):
    """`[supervisor]`: how `offbeat train` keeps its processes alive."""

    max_restarts: int = Field(5, ge=0)
    """Restarts of one process in a row, after ever longer delays. If it ends once more, the run stops and
    shows the end of that process's log."""
    settled_s: float = Field(60.0, gt=0)
    """A process that has lived this long begins a new row of restarts, see `max_restarts`."""
    silence_s: float = Field(7.0, gt=0)
    """A process that the broker has not heard for this long, or that has been stopped (SIGSTOP) for this
    long, is killed and started again. So is a broker whose `/status` has not answered for this long."""
    computing_silence_s: float = Field(60.0, gt=0)
    """Replaces `silence_s` for a silent process that uses the processor, for example an actor whose
    environment blocks it."""
    start_timeout_s: float = Field(600.0, gt=0)
    """A process that has not joined the broker within this time is started again. A learner on several hosts
    (`learner.nodes`) gets ten minutes more, in which its hosts meet."""
    learner_stall_s: float = Field(600.0, gt=0)
    """A learner that works for this long without finishing a step or receiving data is started again."""

    def contradictions(self, field: str) -> Iterator[str]:
        if self.computing_silence_s < self.silence_s:
            yield (
                f"{field}.computing_silence_s {self.computing_silence_s:g} is less than {field}.silence_s "
                f"{self.silence_s:g}; raise it"
            )


class RecipeSection(Section):
    """`[recipe]`: title and source of a shipped run file. No role reads it."""

    title: str = Field(min_length=1)
    """Name of the method, and what it does."""
    source: str = Field("", pattern=r"^(\d{4}\.\d{5}(, \d{4}\.\d{5})*)?$")
    """arXiv ids of the method's papers. Empty: the method comes from no paper."""


class WeightsSection(Section):
    """`[weights]`: how policy versions reach generators on other hosts, see docs/understand/weights.md."""

    http: str = Field("", pattern=r"^$|:\d+$")
    """HOST:PORT on the learner's host at which a separate process serves policy versions, for example
    0.0.0.0:5757. Empty: all generators run on the learner's host. An address that other hosts can reach needs
    `security.encrypt`, because the server then asks for the run's token."""
    advertised_host: str = ""
    """Name or address at which generators reach the learner's host. Empty: the host's name if `http` listens
    on all addresses, else the address it listens on."""


class JudgeSection(Section):
    """`[judge]`: a language model on this host that gives rewards, for `judge = "own"` in a table of rewards.

    Its engine has the settings of `[generator]`. Its weights never change."""

    model: str = ""
    """Model, as in `model.path`. Empty: the model that the run starts from, which stays as it was."""
    http: str = Field("127.0.0.1:0", pattern=r"^127\.0\.0\.1:\d+$")
    """Address at which the actors of this host ask. Port 0 takes a free port at start."""
    max_model_len: int = Field(0, ge=0)
    """Longest question plus answer, in tokens. 0: `generator.max_model_len`."""
    threads: int = Field(1, ge=1)
    """OpenMP threads of its engine (CPU only)."""


class SecurityConfig(Section):
    """`[security]`: encryption and keys; docs/run/security.md says what they protect against."""

    encrypt: bool = True
    """Encrypt and authenticate every connection between processes. False: all processes must run on this
    machine, and all its users have access."""
    keys: str = ""
    """Folder of the keys. `offbeat keys make` makes it; `offbeat keys bundle` copies from it what another
    host needs. Empty: the folder `keys` in the run folder, made at the first start."""
    http_token: Literal["always", "beyond_loopback"] = "always"
    """When the broker's `/status` and `/metrics` are encrypted and ask for the token. "always": on every
    address. "beyond_loopback": not on loopback, so that all users of this machine can read them, for example
    in a browser."""


class RunConfig(Section):
    """The whole run file."""

    method: str = ""
    """Name of the method that the settings of `[learner]` come from. `launch.run_file.load` puts its settings there."""
    recipe: RecipeSection | None = None
    run: RunSection = RunSection()
    model: ModelSection
    env: EnvConfig
    broker: BrokerConfig = BrokerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    actor: ActorConfig = ActorConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsSection = WeightsSection()
    judge: JudgeSection | None = None
    supervisor: SupervisorSection = SupervisorSection()
    fleet: FleetConfig = FleetConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, data: Any) -> Any:
        """Fill in values that follow from other values, where the run file leaves them out."""
        # Values of a wrong type are reported by the fields themselves.
        return _with_adapters(_with_routes(_with_rate(_with_constant(_with_longest(data)))))

    @property
    def local_models(self) -> bool:
        """Whether all models are on this host or are made here, so that no hub is asked for one."""
        judge = self.judge.model if self.judge else ""
        return self.model.local and (not judge or Path(judge).exists())

    @property
    def no_capacity_s(self) -> float:
        """Seconds for which the learner waits without generators or actors; infinite for "for ever"."""
        minutes = self.fleet.no_capacity_minutes
        if minutes == "auto":
            here = self.no_other_hosts and self.actor.count and self.generator.count
            minutes = NO_CAPACITY_MINUTES if here else 0.0
        return minutes * 60 or math.inf

    @property
    def no_other_hosts(self) -> bool:
        """Whether no process of another host can reach the broker."""
        endpoint = self.broker.endpoint
        return not endpoint.startswith("tcp://") or is_loopback(
            endpoint.removeprefix("tcp://").rpartition(":")[0]
        )

    @property
    def max_policy_lag(self) -> int:
        """Lag bound in force: in lockstep `learner.forced_lag`, else `learner.max_policy_lag`."""
        return self.learner.forced_lag if self.run.mode == "sync" else self.learner.max_policy_lag

    @property
    def windows_in_step(self) -> bool:
        """Whether trajectories wait at the end of each window until it is trained (lockstep with windows)."""
        return self.run.mode == "sync" and self.learner.train_on == "windows"


def _with_longest(data: Any) -> Any:
    """Return a run file's content with `learner.sampling.max_trajectory_tokens`."""
    generator, learner = (_table(data, name) for name in ("generator", "learner"))
    sampling = _table(learner, "sampling")
    lengths = (
        generator.get("max_model_len", GeneratorConfig().max_model_len),
        learner.get("micro_batch_tokens", LearnerConfig().micro_batch_tokens),
    )
    if "max_trajectory_tokens" in sampling or not all(type(length) is int for length in lengths):
        return data
    if not all(
        isinstance(part, dict) for part in (data, data.get("learner", {}), learner.get("sampling", {}))
    ):
        return data
    sampling = {**sampling, "max_trajectory_tokens": min(lengths)}
    return {**data, "learner": {**learner, "sampling": sampling}}


def _with_rate(data: Any) -> Any:
    """Return a run file's content with the learning rate that suits what is trained."""
    learner, model = _table(data, "learner"), _table(data, "model")
    optimizer = _table(learner, "optimizer")
    adapters = learner.get("lora") is not None
    tiny = not model.get("path") and model.get("tiny") is not None
    if "lr" in optimizer or not (adapters or tiny):
        return data
    if not isinstance(learner.get("optimizer", {}), dict):
        return data
    optimizer = {**optimizer, "lr": TINY_LR if tiny else ADAPTERS_LR}
    return {**data, "learner": {**learner, "optimizer": optimizer}}


def _with_routes(data: Any) -> Any:
    """Return a run file's content with generators that record experts, if the learner replays them."""
    generator, learner = _table(data, "generator"), _table(data, "learner")
    if _table(learner, "algorithm").get("routes") != "behaviour" or "routes" in generator:
        return data
    if not isinstance(data.get("generator", {}), dict):
        return data
    return {**data, "generator": {**generator, "routes": True}}


def _with_constant(data: Any) -> Any:
    """Return a run file's content with the constant of an aggregation of kind "fixed"."""
    learner = _table(data, "learner")
    algorithm = _table(learner, "algorithm")
    aggregation = _table(algorithm, "aggregation")
    longest = _table(learner, "sampling").get("max_trajectory_tokens")
    if aggregation.get("kind") != "fixed" or "tokens" in aggregation or type(longest) is not int:
        return data
    algorithm = {**algorithm, "aggregation": {**aggregation, "tokens": longest}}
    return {**data, "learner": {**learner, "algorithm": algorithm}}


def _table(data: Any, name: str) -> dict[str, Any]:
    """Return a table of unchecked data; an empty one if it is missing or no table."""
    table = data.get(name, {}) if isinstance(data, dict) else {}
    return table if isinstance(table, dict) else {}


def _with_adapters(data: Any) -> Any:
    """Return a run file's content in which learner and generators agree on whether versions are adapters."""
    generator, learner = _table(data, "generator"), _table(data, "learner")
    lora = learner.get("lora")
    if not isinstance(lora, dict) or not isinstance(data.get("generator", {}), dict):
        return data
    rank, publish = lora.get("rank", LoraConfig().rank), lora.get("publish", "merged")
    if publish != "adapter" or "adapter_rank" in generator or type(rank) is not int or rank > MOST_RANK:
        return data
    return {**data, "generator": {**generator, "adapter_rank": rank}}
