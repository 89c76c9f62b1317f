"""The run file's sections: one for each role, and what all roles share."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from actors.config import ActorConfig, GeneratorConfig
from broker.config import BrokerConfig
from envs.config import EnvConfig
from learner.config import LearnerConfig
from protocol.section import Section


class RunSection(Section):
    """`[run]`."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder."""
    dir: Path = Field(Path("runs"), strict=False)
    """Folder of run folders."""
    seed: int = Field(0, ge=0)
    mode: Literal["async", "sync"] = "async"
    """"sync" runs the same roles in lockstep: generate a batch, train on it, update, repeat."""
    max_minutes: float = Field(60.0, gt=0)
    """Training ends after so long, whatever step it has reached."""


class WarmStartSection(Section):
    """`[model.tiny.warm_start]`: supervised steps on solutions that the task library gives."""

    steps: int = Field(300, ge=0)
    """At most so many optimizer steps."""
    stop_at: float = Field(1.0, gt=0, le=1)
    """Stop as soon as this share of unseen training tasks is solved, so that the rest is left to RL."""
    batch: int = Field(64, ge=1)
    lr: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(20, ge=0)
    demonstrations: int = Field(2000, ge=1)
    """Solved training tasks to learn from."""


class TinyModel(Section):
    """`[model.tiny]`: a small Qwen3 that is made on the spot, with its own tokenizer."""

    hidden_size: int = Field(128, ge=8)
    intermediate_size: int = Field(384, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    head_dim: Literal[32, 64, 80, 96, 112, 128] = 32
    """Sizes that vLLM's attention on CPU takes."""
    rope_theta: float = Field(500.0, gt=1)
    """Base of the rotary positions. Small: tiny models see short texts."""
    tie_embeddings: bool = False
    seed: int = 0
    warm_start: WarmStartSection = WarmStartSection()


class ModelSection(Section):
    """`[model]`: a Hugging Face name or folder, or a tiny model that is made here."""

    path: str = ""
    """Hugging Face name or folder of a causal language model; takes the place of a tiny one."""
    tiny: TinyModel | None = None
    cache: Path = Field(Path("runs/models"), strict=False)
    """Where made models are kept."""

    @property
    def local(self) -> bool:
        """Whether it is a folder, or is made here: no hub is asked for it."""
        return not self.path or Path(self.path).is_dir()


class SupervisorSection(Section):
    """`[supervisor]`: how `offbeat train` keeps its processes alive."""

    max_restarts: int = Field(5, ge=0)
    """Restarts of one process in a row, after ever longer delays; then the run stops with the end of its log."""
    settled_s: float = Field(60.0, gt=0)
    """A process that has lived for so long begins a new row."""
    silence_s: float = Field(7.0, gt=0)
    """A process that the broker has not heard for so long, or that is stopped, is killed and started again; so is a
    broker whose `/status` does not answer."""
    computing_silence_s: float = Field(60.0, gt=0)
    """The same for a process that uses the processor meanwhile, as with an environment that blocks its actor."""
    start_timeout_s: float = Field(600.0, gt=0)
    """A process that has not joined the broker by then is started again."""
    learner_stall_s: float = Field(600.0, gt=0)
    """A learner that works for so long without finishing a step or taking in data is started again."""


class RecipeSection(Section):
    """`[recipe]`: what a shipped run file is; no role reads it."""

    title: str = Field(min_length=1)
    source: str = Field("", pattern=r"^(\d{4}\.\d{5}(, \d{4}\.\d{5})*)?$")
    """arXiv ids; empty: of our own making."""


class WeightsSection(Section):
    """`[weights]`: how versions reach generators on other hosts; docs/understand/weights.md explains it."""

    http: str = Field("", pattern=r"^$|:\d+$")
    """HOST:PORT, on the learner's host, where a process of its own serves versions, for example 0.0.0.0:5757. Empty:
    all generators share the learner's host. Beyond loopback only with `security.encrypt`, for its token."""
    advertised_host: str = ""
    """Name or address of the learner's host, as generators are told it. Empty: where it listens on all addresses, the
    host's name; else the one it listens on."""


class SecurityConfig(Section):
    """`[security]` of the run file; docs/run/security.md says who is kept from what."""

    encrypt: bool = True
    """Encrypt and authenticate every connection between processes. False: this machine only, open to all its users."""
    keys: str = ""
    """Folder of the keys; made by `offbeat keys make`, or brought here by `offbeat keys bundle`. Where it is not set:
    `keys` in the run folder, made at the first start."""
    http_token: Literal["always", "beyond_loopback"] = "always"
    """When `/status` and `/metrics` ask for the token and are encrypted: "beyond_loopback" lets all users of this
    machine read them, as with a browser."""


class RunConfig(Section):
    """The whole run file."""

    recipe: RecipeSection | None = None
    run: RunSection = RunSection()
    model: ModelSection
    env: EnvConfig
    broker: BrokerConfig = BrokerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    actor: ActorConfig = ActorConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsSection = WeightsSection()
    supervisor: SupervisorSection = SupervisorSection()
    security: SecurityConfig = SecurityConfig()

    @property
    def max_policy_lag(self) -> int:
        """The lag bound in force: in lockstep only what is forced."""
        return self.learner.forced_lag if self.run.mode == "sync" else self.learner.max_policy_lag

    @property
    def windows_in_step(self) -> bool:
        """Lockstep in which trajectories stand still at the end of each window until it is trained."""
        return self.run.mode == "sync" and self.learner.train_on == "windows"
