"""How TRL's trainer gets our environments: a function for each arm returns the trainer's arguments."""

import asyncio
from typing import Any, Protocol

from envs.base import Suite
from envs.user_code import load_callable
from launch.run_file.sections import RunConfig

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
    """What notes times and rewards: the trainer's callback."""

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
