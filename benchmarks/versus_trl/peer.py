"""TRL's side of `benchmarks.versus_trl`, run as a process.

Usage: `python -m benchmarks.versus_trl.peer SPEC.json OUT.json`.

TRL's `GRPOTrainer` trains the same model on the same tasks. The tasks come from our environment classes in
all arms. The arms differ in how they attach the environments:

- trl: one turn; the reward function steps all environments of the batch concurrently;
- trl-environment: several turns through `environment_factory`, as TRL documents it for tasks with state. The
  tool is an async method, and the trainer awaits the calls of one trajectory after those of another;
- trl-rollout: several turns through the experimental `rollout_func`. It awaits the tool calls of the whole
  batch at once, turn by turn, which is the most concurrency possible within the trainer's step.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.versus_trl.attached import (
    RESPONSE_TEMPLATE,
    TOOL_TEMPLATE,
    environment,
    one_turn,
    rollout,
    rows,
)
from benchmarks.versus_trl.runs import Run, Spec
from envs.base import Suite
from envs.registry import make_suite
from envs.rows.suite import RowsSuite
from launch.run_file.load import check
from launch.run_file.sections import RunConfig
from learner.settings.learner import OptimizerConfig

try:
    import datasets
    import torch
    import transformers
    import trl
except ImportError as error:
    sys.exit(
        f"benchmarks.versus_trl.peer: {error}. The peer is an optional dependency: install the extra `bench` "
        "(pip install 'offbeat[cpu,bench]'), or leave out the arms that begin with trl"
    )


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that notes when each step ended, and ends the run when its time is up."""

    def __init__(self, spec: Spec, started: float) -> None:
        self._spec, self._started = spec, started
        self.ends: list[tuple[float, int]] = []
        self.rewards: list[tuple[float, float]] = []
        self.spent = {"generating": 0.0, "tools and rewards": 0.0}
        self.trainer: Any = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._warm_up()
        self._began = time.monotonic()
        self.startup = self._began - self._started

    def _warm_up(self) -> None:
        """Allocate memory and load kernels now, so that no step pays for it. No weight changes."""
        prompts = [[1, 3, 20, 4]] * self.trainer.args.per_device_train_batch_size
        answers, _ = self.trainer._generate_single_turn(prompts, None, {}, 1)
        width = max(map(len, answers))
        ids = torch.tensor([p + a + [0] * (width - len(a)) for p, a in zip(prompts, answers, strict=True)])
        self.trainer.model(input_ids=ids, labels=ids).loss.backward()
        self.trainer.model.zero_grad()
        self.spent["generating"] = 0.0

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mean = self.trainer._metrics["train"]["completions/mean_length"][-1]
        self.ends.append((self.now, round(mean * args.per_device_train_batch_size)))
        if self.now > self._spec.seconds:
            control.should_training_stop = True

    def note(self, rewards: list[float]) -> None:
        self.rewards += [(self.now, reward) for reward in rewards]


def arguments(config: RunConfig, spec: Spec, turns: int) -> Any:
    """Return the trainer's settings that correspond to the run file."""
    learner = config.learner
    surrogate = learner.algorithm.surrogate
    assert surrogate.kind == "clip"
    assert surrogate.low == surrogate.high
    assert learner.algorithm.aggregation == "token_mean"
    assert learner.algorithm.advantage.kind == "group"
    budget = learner.sampling.max_trajectory_tokens - 8 if turns > 1 else learner.sampling.max_turn_tokens
    engine = _engine(spec.arm)
    own = None if "use_vllm" in engine else {"max_new_tokens": learner.sampling.max_turn_tokens}
    return trl.GRPOConfig(
        output_dir=spec.folder,
        use_cpu=True,
        bf16=config.learner.dtype_used == "bfloat16",
        seed=config.run.seed,
        max_steps=spec.steps,
        per_device_train_batch_size=learner.batch_trajectories,
        gradient_accumulation_steps=1,
        num_generations=learner.group_size,
        max_completion_length=budget,
        generation_kwargs=own,
        max_tool_calling_iterations=turns - 1,
        shuffle_dataset=False,
        temperature=learner.sampling.temperature,
        beta=0.0,
        epsilon=surrogate.high,
        loss_type="dapo",
        scale_rewards="group",
        **_optimizer(learner.optimizer),
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **engine,
    )


def _engine(arm: str) -> dict[str, Any]:
    """Return the settings of what samples; {} for the trainer's own way."""
    match arm:
        case "trl-vllm":
            # TRL's correction for differences between engine and trainer costs a forward pass. It is off, because
            # our side makes no such pass and uses the engine's log-probabilities.
            return {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_correction": False}
        case "trl-batching":
            return {"use_transformers_continuous_batching": True}
        case _:
            return {}


def _optimizer(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the settings of the optimizer."""
    return {
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
    }


def train(spec: Spec, started: float) -> Run:
    """Build the trainer, train, and return the result."""
    torch.set_num_threads(spec.threads)
    config = check(spec.config, spec.arm)
    suite = make_suite(config.env.name, config.env.params)
    turns = len(suite.demonstration(0, "train")) // 2
    data, questions = _data(config, suite, spec.steps)
    tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model, padding_side="left")
    if turns > 1:
        tokenizer.chat_template = TOOL_TEMPLATE
    clock = Clock(spec, started)
    match spec.arm:
        case "trl-environment":
            tokenizer.response_template = RESPONSE_TEMPLATE
            task = environment(suite, clock)
        case "trl-rollout":
            task = rollout(suite, clock, questions)
        case _:
            task = rows(config, clock) if isinstance(suite, RowsSuite) else one_turn(suite, clock)
    trainer = trl.GRPOTrainer(
        model=spec.model,
        args=arguments(config, spec, turns),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[clock],
        **task,
    )
    clock.trainer = trainer
    _time_generation(trainer, clock)
    trainer.train()
    count = max(1, len(clock.ends))
    return Run(
        startup=clock.startup,
        steps=clock.ends,
        rewards=clock.rewards,
        phases={name: seconds / count for name, seconds in clock.spent.items()},
        notes={"trl": trl.__version__, "threads": torch.get_num_threads()},
    )


def _data(config: RunConfig, suite: Suite, steps: int) -> tuple[Any, dict[str, int]]:
    """Return the prompts of all steps in the trainer's form, and the index of each question."""
    first, groups = (
        config.run.seed * 1_000_000,
        config.learner.batch_trajectories // config.learner.group_size,
    )
    indices = range(first, first + groups * steps)
    prompts = [asyncio.run(suite.episode().reset({"index": i, "split": "train"})) for i in indices]
    questions = [messages[-1]["content"] for messages in prompts]
    columns: dict[str, list[Any]] = {"index": list(indices)}
    if isinstance(suite, RowsSuite):
        columns = {"answer": [suite.row(i, "train").values["answer"] for i in indices]}
    data = datasets.Dataset.from_dict({"prompt": prompts, **columns})
    return data, dict(zip(questions, indices, strict=True))


def _time_generation(trainer: Any, clock: Clock) -> None:
    plain = trainer._generate_single_turn

    def timed(*args: Any, **kwargs: Any) -> Any:
        before = time.monotonic()
        answer = plain(*args, **kwargs)
        clock.spent["generating"] += time.monotonic() - before
        return answer

    trainer._generate_single_turn = timed


def main() -> None:
    started = time.monotonic()
    spec = Spec.read(Path(sys.argv[1]))
    train(spec, started).write(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
