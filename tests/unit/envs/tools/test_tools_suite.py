"""Episodes with tools: calls are run, errors are read by the model, and the end is rewarded."""

import asyncio
import json
import textwrap

import pytest

from envs.errors import EnvError
from envs.registry import beside, make_suite

CLASS = '''
class Counter:
    def reset(self, start, **row):
        self.total = start
        return f" It is {start}."

    def add(self, number: int) -> int:
        """Add a number to the counter.

        Args:
            number: what to add
        """
        self.total += number
        return self.total

    async def double(self) -> str:
        """Double the counter."""
        self.total *= 2
        return f"doubled: {self.total}"

    def fail(self):
        """Fail."""
        raise ValueError("no \\ud800 luck")

    def get_reward(self):
        return {"total": self.total, "half": 0.5}

    def _hidden(self):
        pass


def multiply(a: int, b: int = 2) -> dict:
    """Multiply two numbers."""
    return {"product": a * b}


def goal(completions, environments, answer, **columns):
    return [1.0 if str(e.total) == a else 0.0 for e, a in zip(environments, answer)]


def shown(environments, **columns):
    return [e.total for e in environments]


def short(answer, row):
    return -len(answer)
'''
ROWS = [{"prompt": f"Reach {n}.", "start": n, "answer": str(n + 1)} for n in range(20)]


@pytest.fixture
def made(tmp_path):
    """Return a function that makes a suite; all are closed at the end."""
    (tmp_path / "counter.py").write_text(textwrap.dedent(CLASS))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    suites = []

    def make(tools="Counter", **params):
        names = [f"{tmp_path}/counter.py:{name}" for name in tools.split()]
        if "reward" in params:
            params["reward"] = f"{tmp_path}/counter.py:{params['reward']}"
        suites.append(make_suite("tools", {"train": f"{tmp_path}/train.jsonl", "tools": names, **params}))
        return suites[-1]

    yield make
    for suite in suites:
        asyncio.run(suite.close())


def begun(suite, index=0):
    episode = suite.episode()
    return episode, episode.reset({"index": index, "split": "train"})


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_public_methods_become_tools(made):
    episode, _ = begun(made())
    assert [tool["function"]["name"] for tool in episode.tool_schemas()] == ["add", "double", "fail"]
    add = episode.tool_schemas()[0]["function"]
    assert add["description"] == "Add a number to the counter."
    assert add["parameters"]["properties"] == {"number": {"type": "integer", "description": "what to add"}}


def test_the_text_of_reset_stands_behind_the_prompt(made):
    _, messages = begun(made())
    (message,) = messages
    start = message["content"].removeprefix("Reach ").partition(".")[0]
    assert message["content"] == f"Reach {start}. It is {start}."


def test_all_calls_of_a_turn_are_answered_in_one_observation(made):
    suite = made(tools="Counter multiply")
    episode, messages = begun(suite)
    start = int(messages[0]["content"].split()[-1].rstrip("."))
    result = episode.step(call("add", number=5) + "\n" + call("double") + "\n" + call("multiply", a=4))
    assert not result.done
    assert result.messages() == [
        {"role": "tool", "content": str(start + 5), "tool_call_id": "call00000", "name": "add"},
        {
            "role": "tool",
            "content": f"doubled: {2 * (start + 5)}",
            "tool_call_id": "call00001",
            "name": "double",
        },
        {"role": "tool", "content": '{"product": 8}', "tool_call_id": "call00002", "name": "multiply"},
    ]
    end = episode.step("Done.")
    assert (end.done, end.rewards) == (True, {"total": 2.0 * (start + 5), "half": 0.5})
    assert end.info["end"] == "answered"
    assert (end.info["turns"], end.info["calls"], end.info["failed_calls"]) == (2, 3, 0)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (call("ad", number=1), "Error: there is no tool 'ad'; the tools are: add, double, fail"),
        (call("add"), "Error: missing a required argument: 'number'"),
        (call("add", n=1), "Error: missing a required argument: 'number'"),
        (call("_hidden"), "Error: there is no tool '_hidden'; the tools are: add, double, fail"),
        (call("get_reward"), "Error: there is no tool 'get_reward'; the tools are: add, double, fail"),
        (call("add", number="x"), "Error: 'number' is 'x', and not of type integer"),
        (call("fail"), "Error: ValueError: no ? luck"),
        ("<tool_call>{</tool_call>", "Error: the call is not JSON: "),
    ],
)
def test_a_call_that_fails_is_an_error_that_the_model_reads(made, action, text):
    suite = made()
    episode, _ = begun(suite)
    (message,) = episode.step(action).messages()
    assert message["content"].startswith(text)
    message["content"].encode()
    unreadable = int("not JSON" in text)
    gauges = suite.gauges()
    assert gauges["tool_calls_total"] == 1
    assert (gauges["tool_calls_unreadable_total"], gauges["tool_calls_failed_total"]) == (
        unreadable,
        1 - unreadable,
    )


def test_the_last_turn_runs_its_calls_and_is_rewarded(made):
    episode, messages = begun(made(max_turns=1))
    start = int(messages[0]["content"].split()[-1].rstrip("."))
    result = episode.step(call("add", number=3))
    assert (result.done, result.rewards["total"], result.info["end"]) == (True, start + 3, "no turns left")


def test_reward_functions_see_the_object_of_the_class(made):
    suite = made(reward="goal", correct="goal")
    episode, _ = begun(suite)
    episode.step(call("add", number=1))
    result = episode.step("Done.")
    assert (result.rewards["goal"], result.correct) == (1.0, True)
    other, _ = begun(suite)
    assert other.step("Done.").correct is False


def test_a_reward_function_may_take_nothing_but_the_object(made):
    episode, messages = begun(made(reward="shown"))
    start = int(messages[0]["content"].split()[-1].rstrip("."))
    episode.step(call("add", number=3))
    assert episode.step("Done.").rewards["shown"] == start + 3


def test_functions_alone_are_tools_with_a_reward_function(made):
    episode, messages = begun(made(tools="multiply", reward="short"))
    assert messages[0]["content"].endswith(".")
    assert episode.step(call("multiply", a=4)).messages()[0]["content"] == '{"product": 8}'
    result = episode.step("8")
    assert (result.rewards, result.correct) == ({"short": -1.0}, False)


def test_episodes_do_not_share_the_object(made):
    suite = made()
    one, messages = begun(suite)
    other, _ = begun(suite)
    start = int(messages[0]["content"].split()[-1].rstrip("."))
    one.step(call("add", number=100))
    assert other.step(call("add", number=1)).messages()[0]["content"] == str(start + 1)


@pytest.mark.parametrize(
    ("tools", "params", "words"),
    [
        ("multiply", {}, "there is no reward: name a function, or give the class a get_reward"),
        ("", {"reward": "short"}, "there are no tools; name a class, functions, or MCP servers"),
        ("Counter Counter", {}, "is a second class; an episode has one object"),
        ("Counter multiply multiply", {}, "there is a tool 'multiply' already; rename one"),
        ("Countr", {}, "has no callable 'Countr'; did you mean 'Counter'?"),
        (
            "multiply",
            {"reward": "short", "correct": "shrt"},
            "no reward has this name; did you mean 'short'? (rewards",
        ),
        ("Counter", {"max_turns": 0}, "params.max_turns = 0: write a number above 0"),
        ("Counter", {"call_timeout_s": "9"}, "params.call_timeout_s = '9': write a number above 0"),
        (
            "Counter",
            {"mcp": "server"},
            "params.mcp = 'server': write a list of texts, such as mcp = [\"...\"]",
        ),
        ("Counter", {"mcp": [3]}, "params.mcp = [3]: write a list of texts"),
    ],
)
def test_settings_that_cannot_work_are_refused(made, tools, params, words):
    with pytest.raises(EnvError) as caught:
        made(tools=tools, **params)
    assert words in str(caught.value)


def test_a_reward_that_is_no_number_fails_the_episode(made, tmp_path):
    file = tmp_path / "counter.py"
    file.write_text(file.read_text().replace('return {"total": self.total, "half": 0.5}', 'return "good"'))
    episode, _ = begun(made())
    with pytest.raises(EnvError, match=r"Counter\.get_reward returned 'good'; return a finite number"):
        episode.step("Done.")


def test_a_coroutine_that_takes_too_long_is_an_error_that_the_model_reads(made, tmp_path):
    file = tmp_path / "counter.py"
    file.write_text(
        file.read_text().replace("self.total *= 2", "import asyncio; await asyncio.Event().wait()")
    )
    episode, _ = begun(made(call_timeout_s=0.1))
    (message,) = episode.step(call("double")).messages()
    assert message["content"] == "Error: TimeoutError: it took longer than 0.1 s"


def test_the_final_channel_of_gpt_oss_is_the_answer(made):
    episode, _ = begun(made(tools="multiply", reward="short"))
    assert episode.step("<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>8").rewards == {
        "short": -1.0
    }


def test_files_are_found_beside_the_run_file(tmp_path, made):
    params = {
        "train": "train.jsonl",
        "tools": ["counter.py:Counter", "os.path:join"],
        "mcp": ["python server.py"],
    }
    _, found = beside("tools", params, tmp_path)
    assert found["tools"] == [f"{tmp_path}/counter.py:Counter", "os.path:join"]
    assert (found["train"], found["mcp"]) == (f"{tmp_path}/train.jsonl", ["python server.py"])


def test_a_heldout_file_without_a_column_that_a_reward_needs_is_refused(made, tmp_path):
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text('{"prompt": "Reach 5.", "start": 5}\n')
    with pytest.raises(EnvError, match=r"it needs 'answer', but .*heldout\.jsonl has no such column"):
        made(reward="goal", heldout=str(heldout))
    suite = made(heldout=str(heldout))
    assert suite.facts().heldout_tasks == 1
