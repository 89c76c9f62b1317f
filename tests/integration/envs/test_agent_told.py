"""A call that cannot be read never reaches an agent as an answer: the model reads the error, and writes it again."""

import pytest

from tests.integration.envs.agent_play import played

GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
AGENT = """
import json
import openai

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

async def run(row, url, key):
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        talk = [{"role": "user", "content": "Add 1."}]
        while True:
            answer = await client.chat.completions.create(model="policy", messages=talk, tools=[TOOL])
            message = answer.choices[0].message
            talk.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                assert json.loads(call.function.arguments) == {"a": 1}, call
                talk.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        assert [m["role"] for m in talk if isinstance(m, dict)] == ["user", "tool"], talk
        return float(message.content == "It is 2.")
"""


@pytest.mark.parametrize("by_steps", [False, True], ids=["by requests", "by steps"])
@pytest.mark.parametrize("history", ["sampled", "template"])
@pytest.mark.parametrize(
    ("broken", "errors"),
    [
        ('<tool_call>\n{"name": "add"', ["the call has no </tool_call>"]),
        ("<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>", ["'a' is not closed by"]),
        (f"{GOOD}\n<tool_call>\nnonsense\n</tool_call>",
         ["it was not run, because another call of this answer cannot be read", "the call is not JSON"]),
    ],
)  # fmt: skip
def test_a_model_that_writes_a_broken_call_is_told_and_the_agent_gets_the_next_one(
    tmp_path, broken, errors, history, by_steps
):
    def answer(prompt):
        whole = "It is 2." if "<tool_response>\n2" in prompt else GOOD if "Error: " in prompt else broken
        # In steps, each window of a turn is a request, which begins with what was sampled of the turn.
        return whole.removeprefix(prompt.rpartition("<|im_start|>assistant\n")[2])

    (tmp_path / "agents.py").write_text(AGENT)
    bounds = {"bounds": {"in_step": True}} if by_steps else {}
    done = played(tmp_path, f"{tmp_path}/agents.py:run", answer, history=history, **bounds)
    assert done.last.status == "finished", done.last
    assert done.trajectory.return_ == 1.0
    for error in errors:
        assert any(f"Error: {error}" in prompt for prompt in done.policy.prompts)
    assert by_steps or len(done.policy.prompts) == 3
    gauges = done.gauges
    assert (gauges["agent_requests_total"], gauges["agent_calls_total"]) == (2, 1)
    assert gauges["agent_calls_unreadable_total"] == 1
    # The broken answer and its error stay in the context, so all is one conversation and trained once.
    branches = done.branches_trained_once()
    assert branches == 1 or history == "template"
    assert done.trajectory.auxiliary == []


def test_a_model_that_never_writes_a_call_that_can_be_read_gets_no_reward(tmp_path):
    """Its episode ends at the limit of turns, as with the suite `tools`. The agent would be paid for the text."""
    agent = AGENT.replace('float(message.content == "It is 2.")', "1.0")
    (tmp_path / "agents.py").write_text(agent)
    done = played(
        tmp_path, f"{tmp_path}/agents.py:run", lambda prompt: "<tool_call>{2}", bounds={"max_turns": 4}
    )
    assert done.last.status == "truncated"
    assert len(done.policy.prompts) == 4
    assert done.rewards == []
    assert done.gauges["agent_calls_unreadable_total"] == 4
