"""An agent on OpenAI's own client is trained as it is, with two sub-agents that ask at a time."""

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.test_rows_train import RUN_FILE, rows

pytestmark = pytest.mark.timeout(600)

AGENT = '''
import asyncio

from openai import AsyncOpenAI


async def run(row, base_url, api_key):
    """Have three letters spelled, by two sub-agents, too, and then ask once more."""
    question = row["prompt"][0]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            return answer.choices[0].message

        first = await ask([question])
        await asyncio.gather(*(ask([{**question, "content": question["content"] + end}]) for end in "?!"))
        message = await ask([question, first, question])
    right = row["ground_truth"]
    return {"letters": sum(a == b for a, b in zip(message.content, right)) / len(right)}
'''
ENV = """
name = "agent"
[env.params]
run = "agent.py:run"
train = "train.jsonl"
[generator]
"""


def with_messages(row):
    """Return the row with a conversation from which a tiny model is warm-started."""
    turn = [*row["prompt"], {"role": "assistant", "content": row["answer"]}]
    return {**row, "messages": turn * 2}


def test_an_agent_on_openais_client_trains_a_model(tmp_path, root):
    job = tmp_path / "job"
    job.mkdir()
    (job / "train.jsonl").write_text("".join(json.dumps(with_messages(row)) + "\n" for row in rows()))
    (job / "agent.py").write_text(AGENT)
    text = RUN_FILE.format(folder=tmp_path, cache=tmp_path / "models")
    before, after = text.index('name = "rows"'), text.index("[generator]")
    text = text[:before] + ENV.strip() + text[after + len("[generator]") :]
    (job / "run.toml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "train", str(job / "run.toml"), "learner.steps=3"],
        cwd=root, capture_output=True, text=True, timeout=500, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["episodes"]["failed"] == 0, summary["episodes"]
    assert summary["tokens_trained"] > 0
    out = tmp_path / "out.jsonl"
    take = ["journal", "export", str(tmp_path / "run"), "--out", str(out)]
    subprocess.run([sys.executable, "-m", "launch.cli", *take], cwd=root, check=True, timeout=120)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    rewards = [reward for line in lines for reward in line["rewards"]]
    assert {reward["name"] for reward in rewards} == {"letters"}
    turns = {(t["index"], t["action"], t["back"]) for line in lines for t in line["turns"]}
    # Two requests of sub-agents begin anew; the last one follows the first answer.
    assert turns == {
        (0, False, 1), (1, True, 1), (2, False, 0), (3, True, 1), (4, False, 0), (5, True, 1),
        (6, False, 5), (7, True, 1),
    }  # fmt: skip
    assert {reward["turn"] for reward in rewards} == {7}
