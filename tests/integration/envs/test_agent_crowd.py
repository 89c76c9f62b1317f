"""Two hundred agents at a time, of which half hang up and ask again: no turn is sampled twice, no answer lost."""

import asyncio
import json

from actors.environments import EnvironmentRunner
from envs.base import TurnFacts
from envs.registry import make_suite

AGENTS, TURNS = 200, 3
CODE = '''
import aiohttp


async def run(row, base_url, api_key):
    """Ask three times. Agents with an odd number hang up while their second request waits, and send it again."""
    talk, seen = [], []
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for turn in range(3):
            talk.append({"role": "user", "content": f"{row['number']} {turn}"})
            body = {"messages": talk}
            if turn == 1 and row["number"] % 2:
                try:
                    await client.post(f"{base_url}/chat/completions", json=body,
                        timeout=aiohttp.ClientTimeout(total=0.2))
                except TimeoutError:
                    pass
            async with client.post(f"{base_url}/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                message = (await answer.json())["choices"][0]["message"]
            talk.append(message)
            seen.append(message["content"])
    return float(seen == [f"answer to {row['number']} {turn}" for turn in range(3)])
'''


def test_two_hundred_agents_of_which_half_hang_up_are_sampled_once_each(tmp_path):
    (tmp_path / "agent.py").write_text(CODE)
    rows = "".join(json.dumps({"number": number}) + "\n" for number in range(AGENTS))
    (tmp_path / "rows.jsonl").write_text(rows)
    params = {"run": f"{tmp_path}/agent.py:run", "train": f"{tmp_path}/rows.jsonl", "heldout": 0.0}
    sampled: list[str] = []

    async def main():
        suite, runner = make_suite("agent", params), EnvironmentRunner(calls=AGENTS)

        async def ask(function, *arguments, on_loop=False):
            return await runner.call(function, *arguments, what="test", timeout_s=60.0, on_loop=on_loop)

        async def episode(index):
            env = await ask(suite.episode, on_loop=True)
            messages = await ask(env.reset, {"index": index, "split": "train"})
            while True:
                question = messages[-1]["content"]
                sampled.append(question)
                if question.endswith(" 1"):
                    # Longer than an agent waits that hangs up.
                    await asyncio.sleep(0.5)
                await ask(env.turn_facts, TurnFacts(5, 3, cut=False), on_loop=True)
                result = await ask(env.step, f"answer to {question}")
                if result.done:
                    await ask(env.close)
                    return result.rewards, result.after
                assert (
                    result.after
                    == len([text for text in sampled if text.split()[0] == question.split()[0]]) - 1
                )
                messages = result.messages()

        try:
            return await asyncio.gather(*(episode(index) for index in range(AGENTS)))
        finally:
            await ask(suite.close)
            runner.close()

    ended = asyncio.run(main())
    assert [rewards for rewards, _ in ended] == [{"reward": 1.0}] * AGENTS
    assert sorted(sampled) == sorted(f"{number} {turn}" for number in range(AGENTS) for turn in range(TURNS))
