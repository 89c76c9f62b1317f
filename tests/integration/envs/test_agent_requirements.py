"""What the endpoint of agents must do, by number. Each requirement comes from what real harnesses send.

1. The session is found from the path, the key from the bearer; unknown fields are ignored and counted; 16 MiB fit.
2. Tokens are made once: what was sampled is never rendered again, however it comes back.
3. A prefix that breaks is a branch. Text that renders to the same tokens goes on.
4. The episode is the member of its group: one trajectory, one return. A request that fails does not fail it.
5. Which turns are trained is the user's choice; titles are not by default.
6. Sampling is the learner's: bounds and stop strings are obeyed, the rest is recorded or counted.
7. Streams in all dialects, with comments while they wait.
8. Retries join the first request.
9. Each token has the version that sampled it.
10. Rewards and ends come over HTTP; time-outs are the user's choice.
11. Limits come back as the provider's errors.
12. Waiting is normal.
"""

import asyncio
import json
import threading

import pytest

import envs.agent.endpoint as endpoint
from tests.integration.envs.agent_play import decline, played

AGENTS = '''
import asyncio, io, json, pathlib
import aiohttp

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SEEN = pathlib.Path(__file__).with_name("seen")


class Client:
    """A client without a library, so that each byte is known."""

    def __init__(self, url, key):
        self.url, self.key = url, key

    async def post(self, path, body, url=None, **headers):
        headers = {"Authorization": f"Bearer {self.key}", **headers}
        data = io.BytesIO(json.dumps(body).encode())
        async with aiohttp.ClientSession() as client:
            async with client.post((url or self.url) + path, data=data, headers=headers) as answer:
                text = await answer.text()
                with SEEN.open("a") as file:
                    file.write(json.dumps([answer.status, dict(answer.headers), text]) + "\\n")
                return answer.status, text

    async def ask(self, messages, **more):
        status, text = await self.post("/chat/completions", {"messages": messages, **more})
        assert status == 200, text
        return json.loads(text)["choices"][0]["message"]

    async def said(self, text, **more):
        return await self.ask([{"role": "user", "content": text}], **more)


def agent(work):
    async def run(row, url, key):
        return await work(Client(url, key))
    return run


async def _sessions(client):
    status, _ = await client.post("/chat/completions", {"messages": []}, Authorization="Bearer no")
    assert status == 401
    status, _ = await client.post("/chat/completions", {"messages": []}, url=client.url.replace("/s/", "/s/9"))
    assert status == 410
    big = "a" * 2**21
    await client.said("Hi", prompt_cache_key="k", service_tier="auto", metadata={"big": big})
    return 1.0
sessions = agent(_sessions)


async def _respelled(client):
    talk = [{"role": "user", "content": "12 + 7?"}]
    message = await client.ask(talk, tools=[ADD])
    assert message["reasoning_content"] == "Hm.", message
    first, second = message["tool_calls"]
    for call in (first, second):
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
    talk += [{"role": "assistant", "content": None, "tool_calls": [first, second]}]
    talk += [{"role": "tool", "tool_call_id": call["id"], "content": "19"} for call in (first, second)]
    await client.ask(talk, tools=[ADD])
    return 1.0
respelled = agent(_respelled)


async def _branches(client):
    first = await client.said("a")
    begun = [{"role": "user", "content": "a"}, first]
    await client.ask([*begun, {"role": "user", "content": "b"}])
    await client.ask([*begun, {"role": "user", "content": "c"}])
    await client.said("d")
    return 1.0
branches = agent(_branches)


async def _thinks_twice(client):
    first = await client.said("a")
    await client.ask([{"role": "user", "content": "a"}, first, {"role": "user", "content": "b"}])
    return 1.0
thinks_twice = agent(_thinks_twice)


async def _unrendered(client):
    await client.said("a")
    status, text = await client.post("/chat/completions", {"messages": [{"role": "user", "content": "REFUSE"}]})
    assert status == 400 and "no such word" in json.loads(text)["error"]["message"], text
    assert json.loads(text)["error"]["type"] == "invalid_request_error"
    await client.said("b")
    return 1.0
unrendered = agent(_unrendered)


async def _unrendered_first(client):
    status, _ = await client.post("/chat/completions", {"messages": [{"role": "user", "content": "REFUSE"}]})
    assert status == 400
    await client.said("b")
    return 1.0
unrendered_first = agent(_unrendered_first)


async def _broken_texts(client):
    half, deep = "\\ud83d", {}
    for _ in range(900):
        deep = {"properties": deep}
    asked = [{"role": "user", "content": "a"}]
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": [half]})}}
    answered = [{"role": "assistant", "content": "", "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "1", "content": "2"}]
    named = {"type": "function", "function": {"name": "x" + half}}
    nested = {"type": "function", "function": {"name": "add", "parameters": deep}}
    for body, place in (
        ({"messages": [{"role": "user", "content": half}]}, "character 1 of a message is"),
        ({"messages": asked, "tools": [named]}, "character 2 of tools[0].function.name is"),
        ({"messages": asked, "tools": [nested]}, "tools[0].function.parameters.properties"),
        ({"messages": [*asked, *answered]}, "character 1 of messages[1].tool_calls[0].function.arguments.a[0] is"),
        ({"messages": [{**asked[0], "name": half}]}, "character 1 of messages[0].name is"),
    ):
        status, text = await client.post("/chat/completions", body)
        assert status == 400 and place in json.loads(text)["error"]["message"], text
    await client.said("b")
    return 1.0
broken_texts = agent(_broken_texts)


async def _title(client):
    await client.said("Write a title.")
    await client.said("Work.", tools=[ADD])
    return 1.0
title = agent(_title)


async def _wishes(client):
    more = {"temperature": 0.1, "seed": 7, "tool_choice": "required", "tools": [ADD]}
    short = await client.said("one two three", max_completion_tokens=3, **more)
    assert short["content"] == "one", short
    stopped = await client.said("one two three", stop=["two"], **more)
    assert stopped["content"] == "one ", stopped
    broken = await client.said('<tool_call>{"name": "add"', **more)
    assert "tool_calls" not in broken, broken
    status, text = await client.post("/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2})
    error = json.loads(text)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error") and "n = 2" in error["message"], text
    return 1.0
wishes = agent(_wishes)


async def _streams(client):
    user = {"role": "user", "content": "Hi"}
    bodies = {
        "/chat/completions": {"messages": [user]},
        "/responses": {"input": [user]},
        "/messages": {"messages": [user], "max_tokens": 9},
    }
    for path, body in bodies.items():
        status, text = await client.post(path, {**body, "stream": True})
        assert status == 200 and text.count(": keep-alive\\n\\n") >= 2, text
        assert text.startswith(": keep-alive\\n\\n") and "Hi" in text, text
    return 1.0
streams = agent(_streams)


async def _retries(client):
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answers = await asyncio.gather(
        client.post("/chat/completions", body),
        client.post("/chat/completions", body, **{"x-stainless-retry-count": "1"}),
    )
    again = await client.post("/chat/completions", body, **{"x-stainless-retry-count": "2"})
    assert len({text for _, text in [*answers, again]}) == 1, answers
    return 1.0
retries = agent(_retries)


async def _rewarded(client):
    _, text = await client.post("/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    first = json.loads(text)["id"]
    await client.said("b")
    base = client.url.removesuffix("/v1")
    assert (await client.post("/reward", {"value": 0.25, "turn": first}, url=base))[0] == 200
    assert (await client.post("/reward", {"value": 0.25, "turn": "chatcmpl-9-0"}, url=base))[0] == 400
    assert (await client.post("/reward", {"rewards": {"exact": 1}}, url=base))[0] == 200
    assert (await client.post("/end", {}, url=base))[0] == 200
    status, _ = await client.post("/chat/completions", {"messages": [{"role": "user", "content": "c"}]})
    assert status == 410
    return None
rewarded = agent(_rewarded)


async def _dawdles(client):
    await client.said("a")
    await client.post("/reward", {"value": 0.5}, url=client.url.removesuffix("/v1"))
    await asyncio.sleep(600)
dawdles = agent(_dawdles)


async def _endless(client):
    talk = []
    while True:
        talk.append({"role": "user", "content": "Hi"})
        status, text = await client.post("/chat/completions", {"messages": talk})
        assert status == 200, text
        talk.append(json.loads(text)["choices"][0]["message"])
        if len(talk) == 2:
            base, turn = client.url.removesuffix("/v1"), json.loads(text)["id"]
            assert (await client.post("/reward", {"value": 0.25, "turn": turn}, url=base))[0] == 200
endless = agent(_endless)


async def _streamed_to_the_end(client):
    await client.post("/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True})
    await asyncio.sleep(600)
streamed_to_the_end = agent(_streamed_to_the_end)


async def _compacts(client):
    talk = [{"role": "user", "content": "Hi"}]
    while True:
        status, text = await client.post("/chat/completions", {"messages": talk})
        if status == 400:
            assert json.loads(text)["error"]["code"] == "context_length_exceeded", text
            break
        talk += [json.loads(text)["choices"][0]["message"], {"role": "user", "content": "x" * 50}]
    await client.said("short")
    return 1.0
compacts = agent(_compacts)


async def _gives_up(client):
    await client.post("/reward", {"value": 0.5}, url=client.url.removesuffix("/v1"))
    talk = [{"role": "user", "content": "Hi"}]
    while True:
        talk += [await client.ask(talk), {"role": "user", "content": "x" * 50}]
gives_up = agent(_gives_up)


async def _once(client):
    await client.said("Hi")
    return 1.0
once = agent(_once)
'''


@pytest.fixture
def play(tmp_path):
    """Play an agent of `AGENTS`, with a policy that says the last user's words."""
    (tmp_path / "agents.py").write_text(AGENTS)

    def run(agent, answer=echo, **more):
        return played(tmp_path, f"{tmp_path}/agents.py:{agent}", answer, **more)

    return run


def echo(prompt):
    return prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]


def seen(folder):
    """Return status, headers and body of what the agent has got last."""
    return json.loads((folder / "seen").read_text().splitlines()[-1])


def finished(done):
    assert done.last.status == "finished", done.last
    return done


def test_requirement_1_the_session_is_in_the_path_and_unknown_fields_are_counted(play):
    done = finished(play("sessions"))
    assert endpoint.BODY_BYTES >= 16 * 2**20
    assert done.gauges["agent_fields_ignored_total"] == 3
    assert done.gauges["agent_requests_total"] == 1


def test_requirement_2_tokens_are_made_once_and_results_are_rendered_together(play):
    calls = '<tool_call>\n{"name": "add", "arguments": {"b":7,  "a": 12}}\n</tool_call>'

    def answer(prompt):
        return "19" if "<tool_response>" in prompt else f"<think>Hm.</think>\n{calls}\n{calls}"

    done = finished(play("respelled", answer))
    first, second = done.policy.prompts
    assert second.startswith(f"{first}<think>Hm.</think>\n{calls}\n{calls}<|im_end|>")
    assert second.count("<|im_start|>user\n<tool_response>") == 1
    assert second.count("<tool_response>\n19") == 2
    assert done.branches_trained_once() == 1
    assert done.gauges["agent_calls_total"] == 2


def test_requirement_3_a_prefix_that_breaks_is_a_branch(play):
    done = finished(play("branches"))
    assert done.branches_trained_once() == 3
    assert [turn.back for turn in done.trajectory.turns if not turn.action] == [1, 1, 3, 0]


def test_requirement_3_the_template_may_decide_on_the_history(play):
    def answer(prompt):
        return f"<think>\nHm.\n</think>\n\n{echo(prompt)}"

    kept = finished(play("thinks_twice", answer))
    assert kept.branches_trained_once() == 1
    assert "Hm." in kept.policy.prompts[1]
    changed = finished(play("thinks_twice", answer, history="template"))
    assert changed.branches_trained_once() == 2
    assert "Hm." not in changed.policy.prompts[1]


@pytest.mark.parametrize("agent", ["unrendered", "unrendered_first"])
def test_requirement_4_an_episode_is_one_trajectory_and_outlives_a_request_that_fails(
    play, monkeypatch, agent
):
    decline(monkeypatch)
    done = finished(play(agent))
    assert {cut.segment.trajectory_id for cut in done.cuts} == {"t.0"}
    assert done.rewards == [("reward", 1 if agent == "unrendered_first" else 3, 1.0)]
    assert done.gauges["agent_refused_total"] == 1
    assert done.trajectory.return_ == 1.0


@pytest.mark.parametrize("by_steps", [False, True], ids=["by requests", "by steps"])
def test_requirement_4_texts_that_no_tokenizer_takes_are_refused_with_their_place(play, by_steps):
    """A model that writes half of a surrogate pair into the JSON of a call makes agents send such texts."""
    done = finished(play("broken_texts", **({"bounds": {"in_step": True}} if by_steps else {})))
    assert done.gauges["agent_refused_total"] == 5
    assert done.trajectory.return_ == 1.0


@pytest.mark.parametrize(("trained", "auxiliary"), [("tools", [1]), ("all", [])])
def test_requirement_5_a_title_is_trained_only_if_the_user_says_so(play, trained, auxiliary):
    assert finished(play("title", trained=trained)).trajectory.auxiliary == auxiliary


def test_requirement_6_bounds_and_stops_are_obeyed_and_the_rest_is_recorded(play):
    done = finished(play("wishes", lambda prompt: "Sorry." if "Error: " in echo(prompt) else echo(prompt)))
    # The last answer has a call that cannot be read: the model is told, and asked once more.
    assert [request.max_tokens for request in done.policy.requests] == [3, 512, 512, 512]
    assert {request.sampling.temperature for request in done.policy.requests} == {1.0}
    asked = done.last.extra["info"]["asked"]
    assert asked == {"temperature": 0.1, "seed": 7, "tool_choice": "required"}
    assert done.gauges["agent_calls_missing_total"] == 3
    assert done.gauges["agent_calls_unreadable_total"] == 1
    assert done.gauges["agent_refused_total"] == 1


def test_requirement_7_streams_are_kept_alive_in_all_dialects(play, monkeypatch):
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_S", 0.05)

    async def behind(number):
        await asyncio.sleep(0.4)

    assert finished(play("streams", behind=behind)).gauges["agent_requests_total"] == 3


def test_requirement_8_a_retry_joins_the_first_request(play):
    done = finished(play("retries"))
    assert len(done.policy.prompts) == 1
    assert done.gauges["agent_repeats_total"] == 2


def test_requirement_9_each_token_has_the_version_that_sampled_it(play):
    done = finished(play("branches"))
    versions = done.trajectory.policy_version[done.trajectory.action_mask]
    meant = [v for n, ids in enumerate(done.policy.sampled)
             for v in [2 * n] * (len(ids) // 2) + [2 * n + 1] * (len(ids) - len(ids) // 2)]  # fmt: skip
    assert versions.tolist() == meant


def test_requirement_10_rewards_of_turns_and_the_end_come_over_http(play):
    done = finished(play("rewarded"))
    assert done.rewards == [("reward", 1, 0.25), ("exact", 3, 1.0)]


@pytest.mark.parametrize("choice", ["score", "fail"])
def test_requirement_10_a_time_out_is_scored_or_fails(play, choice):
    done = play("dawdles", timeout_s=3.0, at_timeout=choice)
    if choice == "score":
        assert finished(done).rewards == [("reward", 1, 0.5)]
    else:
        assert (done.last.status, "params.timeout_s = 3" in done.last.error) == ("failed", True)


def test_requirement_11_limits_are_the_providers_errors(play, tmp_path):
    done = play("endless", bounds={"max_turns": 2})
    assert (done.last.status, done.last.stop_reason) == ("truncated", "max_turns")
    assert done.rewards == [("reward", 1, 0.25)], (
        "what was posted for an answer counts, whoever ended the episode"
    )
    status, _, text = seen(tmp_path)
    assert (status, json.loads(text)["error"]["code"]) == (400, "context_length_exceeded")


def test_requirement_11_an_agent_whose_context_is_full_may_go_on_with_fewer_messages(play):
    bounds = {"max_context_tokens": 300, "max_trajectory_tokens": 2_000}
    done = finished(play("compacts", sampling=bounds))
    branches = done.trajectory.branches()
    assert len(branches) == 2
    assert max(len(branch.places) for branch in branches) <= 300
    assert done.rewards == [("reward", done.trajectory.turns[-1].index, 1.0)]
    assert done.branches_trained_once() == 2
    ended = finished(play("gives_up", sampling=bounds))
    assert [(name, value) for name, _, value in ended.rewards] == [("reward", 0.5)]


@pytest.mark.parametrize("agent", ["endless", "streamed_to_the_end"])
def test_requirement_11_an_actor_that_drains_is_a_503_with_retry_after(play, tmp_path, monkeypatch, agent):
    """The actor gives up what has not ended in time, and the agent hears that nobody is at fault."""
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_S", 0.05)
    asked = threading.Event()

    async def behind(number):
        asked.set()
        await asyncio.sleep(60.0)

    async def end_after():
        assert await asyncio.to_thread(asked.wait, 60.0)
        await asyncio.sleep(0.3)

    done = play(agent, behind=behind, end_after=end_after)
    assert done.last.status == "unfinished" if done.last else True
    status, headers, text = seen(tmp_path)
    if agent == "endless":
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(text)["error"]["type"] == "server_error"
    else:
        # The stream has begun, so the error is its last event.
        assert status == 200
        assert "nobody's fault" in json.loads(text.rpartition("data: ")[2])["error"]["message"]


def test_requirement_12_a_request_may_wait_for_an_update(play, monkeypatch):
    monkeypatch.setattr(endpoint, "KEEP_ALIVE_S", 0.05)

    async def behind(number):
        await asyncio.sleep(1.0)

    assert finished(play("once", behind=behind)).rewards == [("reward", 1, 1.0)]
