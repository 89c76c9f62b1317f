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
from typing import Any, Protocol

from benchmarks.versus_trl.runs import Run, Spec
from envs.base import Suite
from envs.registry import make_suite
from envs.rows.suite import RowsSuite
from envs.user_code import load_callable
from launch.run_file.load import check
from launch.run_file.sections import RunConfig
from learner.settings.learner import OptimizerConfig
from learner.settings.surrogates import ClipSurrogate

TOOL_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}{{ call.function.name }}{{ call.function.arguments }}{% endfor %}"
    "{{ eos_token }}{% elif m['role'] == 'tool' %}<tool>{{ m['content'] }}"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The model's own chat template, extended to write an assistant's tool calls. TRL refuses tools otherwise."""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "repeats": True,
            "content": "text",
            "open_pattern": r"(?!<eos>)(?=[\s\S])",
            "close_pattern": r"<eos>|$",
            "transform": {
                "type": "function",
                "function": {"name": "answer", "arguments": {"text": "{content}"}},
            },
        },
        "content": {"close_pattern": r"<eos>|$", "content": "text"},
    },
}
"""Template that reads every response as a call of the one tool, because our episodes, too, step the
environment with every response."""


class Stopwatch(Protocol):
    """The trainer's callback, which notes times and rewards."""

    spent: dict[str, float]
    """Seconds by what they were spent on."""

    @property
    def now(self) -> float:
        """Seconds since the beginning of training."""

    def note(self, rewards: list[float]) -> None:
        """Take the rewards of trajectories that have just ended."""


def one_turn(suite: Suite, clock: Stopwatch) -> dict[str, Any]:
    """Return the trainer's arguments for tasks of one turn."""

    async def reward(completions: list[Any], index: list[int], **columns: Any) -> list[float]:
        before = clock.now
        talks = zip(index, completions, strict=True)
        rewards = await asyncio.gather(*(_score(suite, i, talk[-1]["content"]) for i, talk in talks))
        clock.spent["tools and rewards"] += clock.now - before
        clock.note(rewards)
        return rewards

    return {"reward_funcs": reward}


def rows(config: RunConfig, clock: Stopwatch) -> dict[str, Any]:
    """Return the trainer's arguments for rows and a reward function of TRL's form."""
    function = load_callable(config.env.params["reward"], "reward")

    def reward(completions: list[Any], **columns: Any) -> list[float]:
        before = clock.now
        rewards: list[float] = function(completions=completions, **columns)
        clock.spent["tools and rewards"] += clock.now - before
        clock.note(rewards)
        return rewards

    return {"reward_funcs": reward}


async def _score(suite: Suite, index: int, text: str) -> float:
    episode = suite.episode()
    await episode.reset({"index": index, "split": "train"})
    return sum((await episode.step(text)).rewards.values())


def environment(suite: Suite, clock: Stopwatch) -> dict[str, Any]:
    """Return the trainer's arguments for several turns through `environment_factory`."""

    class Tool:
        """One conversation with the environment."""

        def reset(self, index: int, **columns: Any) -> None:
            self._episode, self._earned = suite.episode(), 0.0
            asyncio.run(self._episode.reset({"index": index, "split": "train"}))

        async def answer(self, text: str) -> str:
            """
            Hand in an answer.

            Args:
                text: The answer.

            Returns:
                What to answer next.
            """
            before = clock.now
            result = await self._episode.step(text)
            clock.spent["tools and rewards"] += clock.now - before
            self._earned += sum(result.rewards.values())
            return "".join(message["content"] for message in result.messages())

        async def _last(self, message: dict[str, Any]) -> float:
            calls = message.get("tool_calls")
            text = calls[0]["function"]["arguments"]["text"] if calls else message["content"]
            result = await self._episode.step(text)
            return self._earned + sum(result.rewards.values())

    async def reward(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
        before = clock.now
        pairs = zip(environments, completions, strict=True)
        rewards = await asyncio.gather(*(tool._last(talk[-1]) for tool, talk in pairs))
        clock.spent["tools and rewards"] += clock.now - before
        clock.note(rewards)
        return rewards

    return {"environment_factory": Tool, "reward_funcs": reward}


def rollout(suite: Suite, clock: Stopwatch, questions: dict[str, int]) -> dict[str, Any]:
    """Return the trainer's arguments for several turns through `rollout_func`."""

    def roll(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        episodes = [suite.episode() for _ in prompts]
        for episode, prompt in zip(episodes, prompts, strict=True):
            index = questions[prompt[-1]["content"]]
            asyncio.run(episode.reset({"index": index, "split": "train"}))
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        talks: list[list[int]] = [list(ids) for ids in prompt_ids]
        masks: list[list[int]] = [[] for _ in prompts]
        returns, open_ = [0.0] * len(prompts), list(range(len(prompts)))
        while open_:
            answers, _ = trainer._generate_single_turn([talks[i] for i in open_], None, {}, 1)
            before = clock.now
            texts = trainer.processing_class.batch_decode(answers, skip_special_tokens=True)
            results = asyncio.run(_all(episodes[i].step(t) for i, t in zip(open_, texts, strict=True)))
            clock.spent["tools and rewards"] += clock.now - before
            going = []
            for i, answer, result in zip(open_, answers, results, strict=True):
                talks[i] += answer
                masks[i] += [1] * len(answer)
                returns[i] += sum(result.rewards.values())
                if not result.done:
                    message = {**result.observation, "name": "answer"}
                    suffix = trainer._get_tool_suffix_ids([message])
                    talks[i] += suffix
                    masks[i] += [0] * len(suffix)
                    going.append(i)
            open_ = going
        clock.note(returns)
        answers = [talk[len(ids) :] for talk, ids in zip(talks, prompt_ids, strict=True)]
        return {
            "prompt_ids": prompt_ids, "completion_ids": answers, "logprobs": None, "env_mask": masks, "returns": returns
        }  # fmt: skip

    def reward(returns: list[float], **columns: Any) -> list[float]:
        return returns

    return {"rollout_func": roll, "reward_funcs": reward}


async def _all(steps: Any) -> list[Any]:
    return await asyncio.gather(*steps)


try:
    import datasets
    import torch
    import transformers
    import trl
except ImportError as error:
    sys.exit(
        f"benchmarks.versus_trl.peer: {error}. The peer is an optional dependency: install the extra `bench` "
        "(pip install '.[cpu,bench]'), or leave out the arms that begin with trl"
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
        if self.now > self._spec.seconds or self._spec.over(self.rewards):
            control.should_training_stop = True

    def note(self, rewards: list[float]) -> None:
        self.rewards += [(self.now, reward) for reward in rewards]


def arguments(config: RunConfig, spec: Spec, turns: int) -> Any:
    """Return the trainer's settings that correspond to the run file."""
    learner = config.learner
    surrogate = learner.algorithm.surrogate
    assert isinstance(surrogate, ClipSurrogate)
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
