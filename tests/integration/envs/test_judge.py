"""Test a judge behind a real HTTP server: scores, cache, limits, repetitions, and failures that are nobody's fault."""

import asyncio

import pytest
from aiohttp import web

from actors.environments import EnvironmentRunner
from envs.base import StepResult
from envs.errors import EnvError, ServiceFailed
from envs.registry import make_suite
from envs.rows.judge import Judge, JudgeSettings, load_judge

QUESTION = "Question: {prompt}\nAnswer: {completion}\nHow good is it, from 0 to 10? {not a column}"


class Server:
    """Answers as a script says: a text, a number as HTTP status, or None for a connection that is cut."""

    def __init__(self, *script, after=None):
        self.script, self.after, self.asked, self.keys = list(script), after, [], []
        self.running = self.most = 0

    async def answer(self, request):
        body = await request.json()
        self.asked.append(body["messages"][0]["content"])
        self.keys.append(request.headers.get("Authorization", ""))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        try:
            said = self.script.pop(0) if self.script else self.after
            if said == "wait":
                await asyncio.Event().wait()
            if said is None:
                request.transport.close()
                return web.Response()
            if isinstance(said, int):
                return web.Response(status=said, text="no")
            return web.json_response({"choices": [{"message": {"content": said}}]})
        finally:
            self.running -= 1

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *error):
        await self.runner.cleanup()


def run(server, play, **settings):
    async def main():
        async with server:
            judge = Judge(
                JudgeSettings(**{"judge": server.url, "model": "m", "prompt": "p", **settings}), QUESTION
            )
            try:
                return await play(judge)
            finally:
                await judge.close()

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_the_last_number_is_the_score_and_an_equal_question_is_asked_once(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server = Server("First 3, then better. 8", after="10")

    async def play(judge):
        row = {"prompt": "1 + 1"}
        both = await asyncio.gather(judge("2", row), judge("2", row))
        return [*both, await judge("3", row)]

    assert run(server, play, api_key_env="JUDGE_KEY") == [0.8, 0.8, 1.0]
    assert server.asked == [
        f"Question: 1 + 1\nAnswer: {answer}\nHow good is it, from 0 to 10? {{not a column}}"
        for answer in ("2", "3")
    ]
    assert set(server.keys) == {"Bearer secret"}


def test_a_busy_judge_a_cut_connection_and_an_answer_without_number_are_asked_again():
    server = Server(503, None, "no idea", "it is 5 of 10: 5")
    assert run(server, lambda judge: judge("2", {"prompt": "q"})) == 0.5
    assert len(server.asked) == 4


@pytest.mark.parametrize(
    ("script", "why"),
    [("wait", "did not answer within 4 s"), (503, "HTTP status 503"), ("11", "has no number from 0 to 10")],
)
def test_a_judge_that_gives_no_score_in_time_fails_as_a_service_and_is_asked_anew_later(script, why):
    server = Server(script, after=script)

    async def play(judge):
        with pytest.raises(ServiceFailed, match=rf"judge m at http://127.*{why}"):
            await judge("2", {"prompt": "q"})
        server.after = "4"
        return await judge("2", {"prompt": "q"})

    assert run(server, play, timeout_s=4.0) == 0.4


def test_no_more_requests_run_at_a_time_than_allowed():
    server = Server(after="1")

    async def play(judge):
        return await asyncio.gather(*(judge(str(i), {"prompt": "q"}) for i in range(12)))

    assert run(server, play, concurrent=3) == [0.1] * 12
    assert server.most <= 3


def test_a_judge_that_refuses_the_key_is_a_mistake_of_the_user():
    async def play(judge):
        with pytest.raises(EnvError, match=r"HTTP status 401: no; correct the settings") as error:
            await judge("2", {"prompt": "q"})
        assert not isinstance(error.value, ServiceFailed)

    run(Server(401), play)


@pytest.mark.parametrize(
    ("template", "changes", "words"),
    [
        ("no {answer} in it", {}, r"write \{completion\}"),
        ("{completion} {other}", {}, "has no column 'other'"),
        ("{completion}", {"scale": 0.0}, r"params.reward.good.scale: Input should be greater than 0"),
        ("{completion}", {"modle": "x"}, r"params.reward.good.modle: Extra inputs"),
        ("{completion}", {"model": ""}, r"model is missing: name the model at this URL"),
        ("{completion}", {"judge": "own"}, r"so it takes neither model nor api_key_env"),
        ("{completion}", {"prompt": "nowhere.txt"}, r"nowhere.txt.*cannot be read"),
    ],
)
def test_bad_settings_are_refused(tmp_path, monkeypatch, template, changes, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.txt").write_text(template)
    table = {"judge": "http://h/v1", "model": "m", "prompt": "judge.txt", **changes}
    with pytest.raises(EnvError, match=words):
        load_judge("good", table, ("prompt",), "train.jsonl")


def test_a_judge_is_one_of_the_rewards_of_rows(tmp_path, monkeypatch):
    """The suite runs as in an actor: functions that block in a thread, the judge in the environments' loop."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(
        '{"prompt": "1 + 1", "sum": "2"}\n{"prompt": "2 + 2", "sum": "4"}\n'
    )
    (tmp_path / "judge.txt").write_text("{prompt} {completion} {sum}")
    (tmp_path / "rewards.py").write_text("def exact(answer, row):\n    return answer == row['sum']\n")

    async def main():
        async with Server("7") as server:
            judge = {"judge": server.url, "model": "m", "prompt": "judge.txt"}
            reward = {"exact": "rewards.py:exact", "good": judge}
            suite = make_suite(
                "rows", {"train": "train.jsonl", "reward": reward, "correct": "exact", "heldout": 0.0}
            )
            runner = EnvironmentRunner(calls=1)
            try:
                env = suite.episode()
                ask = {"what": "test", "timeout_s": 60.0}
                [message] = await runner.call(env.reset, {"index": 0, "split": "train"}, **ask)
                answer = str(eval(message["content"]))
                result = await runner.call(env.step, answer, **ask)
                await runner.call(suite.close, **ask)
            finally:
                runner.close()
            return server.asked, message["content"], answer, result

    asked, prompt, answer, result = asyncio.run(asyncio.wait_for(main(), 60))
    assert asked == [f"{prompt} {answer} {answer}"]
    assert isinstance(result, StepResult)
    assert result.rewards == {"exact": 1.0, "good": 0.7}
    assert result.correct is True


TOOLS = """
import threading

class Counter:
    def __init__(self):
        # A lock cannot be copied.
        self.lock, self.value = threading.Lock(), 0

    def add(self, number: int) -> int:
        \"\"\"Add a number.\"\"\"
        with self.lock:
            self.value += number
        return self.value

def at_two(completions, environments, **columns):
    return [float(e.value == 2) for e in environments]
"""


def test_a_judge_is_one_of_the_rewards_of_tools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "Count to 2."}\n')
    (tmp_path / "judge.txt").write_text("{prompt} {completion}")
    (tmp_path / "tools.py").write_text(TOOLS)

    async def main():
        async with Server("3", after="wait") as server:
            judge = {"judge": server.url, "model": "m", "prompt": "judge.txt", "timeout_s": 5.0}
            params = {"reward": {"good": judge, "at_two": "tools.py:at_two"}, "tools": "tools.py:Counter"}
            suite = make_suite(
                "tools", {"train": "train.jsonl", "correct": "at_two", "heldout": 0.0, **params}
            )
            runner, ask = EnvironmentRunner(calls=1), {"what": "test", "timeout_s": 60.0}
            try:
                env = suite.episode()
                await runner.call(env.reset, {"index": 0, "split": "train"}, **ask)
                called = '<tool_call>{"name": "add", "arguments": {"number": 2}}</tool_call>'
                await runner.call(env.step, called, **ask)
                result = await runner.call(env.step, "It is 2.", **ask)
                with pytest.raises(ServiceFailed, match=r"judge m at http.* did not answer within 5 s"):
                    await runner.call(env.step, "Still 2.", **ask)
                await runner.call(suite.close, **ask)
            finally:
                runner.close()
            return server.asked, result

    asked, result = asyncio.run(asyncio.wait_for(main(), 120))
    assert asked[0] == "Count to 2. It is 2."
    assert (result.rewards, result.correct) == ({"good": 0.3, "at_two": 1.0}, True)
