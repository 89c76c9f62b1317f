"""Tools of a real MCP server that runs as a process beside the episode, and speaks over stdin and stdout."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from envs.errors import EnvError
from envs.registry import make_suite
from launch.processes import free_port

SERVER = '''
import os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")
print("pid", os.getpid(), file=sys.stderr, flush=True)


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def pid() -> int:
    """Return the process."""
    return os.getpid()


@server.tool()
def divide(a: int, b: int) -> float:
    """Divide two numbers."""
    return a / b


@server.tool()
def talk(kilobytes: int) -> str:
    """Write to stderr."""
    sys.stderr.write("x" * 1023 * kilobytes + "!\\n")
    sys.stderr.flush()
    return str(os.fstat(2).st_size)


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''
REWARD = """
def exact(answer, row):
    return float(answer == row["answer"])
"""


@pytest.fixture
def made(tmp_path):
    """Return a function that makes a suite with the server; all suites are closed at the end."""
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    suites = []

    def make(*entries, **params):
        entries = entries or (f"{sys.executable} {tmp_path}/server.py",)
        given = {
            "train": f"{tmp_path}/train.jsonl",
            "reward": f"{tmp_path}/rewards.py:exact",
            "mcp": list(entries),
        }
        suites.append(make_suite("tools", given | params))
        return suites[-1]

    yield make
    for suite in suites:
        asyncio.run(suite.close())


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answered(suite, *calls):
    episode = suite.episode()
    episode.reset({"index": 0, "split": "train"})
    return [message["content"] for message in episode.step("\n".join(calls)).messages()]


def test_the_tools_of_a_server_answer_calls(made):
    suite = made()
    episode = suite.episode()
    episode.reset({"index": 0, "split": "train"})
    schemas = {tool["function"]["name"]: tool["function"] for tool in episode.tool_schemas()}
    assert set(schemas) == {"add", "pid", "divide", "leave", "talk"}
    assert schemas["add"]["description"] == "Add two numbers."
    assert schemas["add"]["parameters"]["required"] == ["a"]
    results = episode.step(call("add", a=2, b=3) + call("add", a=1)).messages()
    assert [message["content"] for message in results] == ["5", "2"]
    one, other, failed, wrong = answered(
        suite, call("pid"), call("pid"), call("divide", a=1, b=0), call("add", a="x")
    )
    assert one == other, "one process serves all episodes"
    assert failed == "Error: Error executing tool divide", "what the server says of its own error"
    assert wrong.startswith("Error: ")
    gauges = suite.gauges()
    assert (gauges["tool_calls_total"], gauges["tool_calls_failed_total"]) == (6, 2)


def test_the_server_ends_with_the_suite(made):
    suite = made()
    (pid,) = answered(suite, call("pid"))
    asyncio.run(suite.close())
    deadline = time.monotonic() + 60.0
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_a_server_that_dies_fails_the_episode_and_not_the_model(made):
    suite = made()
    with pytest.raises(EnvError, match=r"mcp server .*server\.py.* has ended"):
        answered(suite, call("leave"))
    with pytest.raises(EnvError, match=r"has ended.*its stderr ends: .*pid \d+"):
        answered(suite, call("add", a=1))


def test_what_a_server_writes_to_stderr_takes_no_more_than_a_bounded_file(made):
    suite = made()
    (large,) = answered(suite, call("talk", kilobytes=1100))
    assert int(large) > 1 << 20
    (small,) = answered(suite, call("talk", kilobytes=1))
    assert 1000 < int(small) < 2000
    with pytest.raises(EnvError, match=r"has ended.*its stderr ends: .*x!"):
        answered(suite, call("leave"))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('no key in the environment')", "no key in the environment"),
        ("raise KeyError('token')", "KeyError: 'token'"),
    ],
)
def test_a_server_that_does_not_start_is_refused_with_its_stderr(made, tmp_path, program, words):
    (tmp_path / "broken.py").write_text(textwrap.dedent(program))
    with pytest.raises(EnvError, match=r"mcp server .*broken.py' did not start: ") as caught:
        made(f"{sys.executable} {tmp_path}/broken.py")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_program_that_does_not_exist_is_named(made):
    with pytest.raises(EnvError, match=r"mcp server 'no-such-program' did not start: .*no-such-program"):
        made("no-such-program --x")


def test_a_server_may_be_a_url(made, tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    with pytest.raises(EnvError, match=r"mcp server 'http://127.0.0.1:.*/mcp' did not start: "):
        made(url)
    program = subprocess.Popen(
        [sys.executable, f"{tmp_path}/server.py", str(port)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120.0
        while not listens(port):
            assert program.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        suite = made(url)
        assert answered(suite, call("add", a=2, b=3), call("pid")) == ["5", str(program.pid)]
        asyncio.run(suite.close())
        assert program.poll() is None, "a server of others goes on"
    finally:
        program.kill()
        program.wait(60.0)


def listens(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0):
        return True
    return False


def test_two_servers_with_a_tool_of_one_name_are_refused(made, tmp_path):
    entry = f"{sys.executable} {tmp_path}/server.py"
    with pytest.raises(EnvError, match="there is a tool 'add' already; rename one"):
        made(entry, entry)
