"""Episodes are played by real server processes, which are killed, come back, and outlive their clients."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

import aiohttp
import pytest

from envs.base import HasFacts, HasGauges, HasTools, HasTurnFacts, HasTurnLimit, TurnFacts
from envs.errors import EnvError, RemoteFailed, ServerLost, ServiceFailed
from envs.registry import make_suite
from protocol.security import key_files
from tests.integration.envs.test_agent import Played, gone, in_loop

GAME = """
import asyncio, os, time
from envs.base import StepResult, SuiteFacts
from envs.errors import ServiceFailed

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


class Game:
    def __init__(self, log):
        self.log = log

    def episode(self):
        return Episode(self.log)

    def demonstration(self, index, split):
        if index:
            raise LookupError("only task 0 has a solution")
        return [{"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}]

    def facts(self):
        return SuiteFacts(heldout_tasks=3, reward_names=("exact",), longest_tasks=(("train", 1, "here"),))

    def gauges(self):
        return {"played_total": 1.0}

    async def close(self):
        pass


class Episode:
    def __init__(self, log):
        self.log, self.seen = log, []

    def note(self, word):
        with open(self.log, "a") as file:
            file.write(f"{word} {os.getpid()}\\n")

    async def reset(self, data):
        self.data = data
        self.note("reset")
        return [{"role": "user", "content": f"{data['split']} {data['index']}"}]

    def tool_schemas(self):
        return [ADD]

    def turn_limit(self):
        return 7 + len(self.seen) if self.seen else None

    def turn_facts(self, facts):
        self.seen.append(facts.answer_tokens)

    def step(self, action):
        if action == "fail":
            table = {}
            return table["answer"]
        if action == "service":
            raise ServiceFailed("the judge is gone")
        if action == "slow":
            time.sleep(5)
        if action == "odd":
            return 5
        if action == "end":
            info = {"seen": self.seen}
            return StepResult(rewards={"exact": 1.0}, done=True, correct=True, info=info)
        return StepResult(observation={"role": "tool", "content": action.upper()})

    async def close(self):
        self.note("close")
"""

RUN_FILE = """
[model]
path = "none"

[env]
name = "game.py:Game"
params.log = "{log}"

[actor]
env_timeout_s = 20.0
"""

CLIENT = """
import asyncio, sys
from envs.registry import make_suite

async def main():
    env = make_suite("remote", {"url": sys.argv[1]}).episode()
    await env.reset({"index": 0, "split": "train"})
    print("begun", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

SERVER_OF_SHORT_LEASES = """
import functools, sys
import launch.commands.envs as command
from launch.cli import main

command.Served = functools.partial(command.Served, lease_s=1.5)
sys.exit(main(sys.argv[1:]))
"""


class Server:
    """A process of `offbeat envs`."""

    def __init__(self, folder, *more, code=None, port=0):
        begin = ["-c", code] if code else ["-m", "launch.cli"]
        run = [sys.executable, *begin, "envs", str(folder / "game.toml"), "--listen", f"127.0.0.1:{port}"]
        with open(folder / "errors", "ab") as errors:
            self.process = subprocess.Popen(
                [*run, *map(str, more)], stdout=subprocess.PIPE, stderr=errors, text=True
            )
        line = self.process.stdout.readline()
        if not line.startswith("serving "):
            self.kill()
            raise AssertionError((folder / "errors").read_text())
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self, number=signal.SIGKILL):
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(timeout=30)
        self.process.stdout.close()
        return self.process.returncode


def written(folder):
    """Write the game and its run file into a folder."""
    (folder / "game.py").write_text(GAME)
    (folder / "game.toml").write_text(RUN_FILE.format(log=folder / "log"))
    return folder


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A server for the tests that leave it alive, and its folder."""
    own = written(tmp_path_factory.mktemp("shared"))
    started = Server(own)
    yield started, own
    started.kill()


@pytest.fixture
def server(folder):
    started = Server(folder)
    yield started
    started.kill()


def logged(folder, word):
    """Wait until the environment has noted a word, and return whether it has."""
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        if (folder / "log").exists() and word in (folder / "log").read_text():
            return True
        time.sleep(0.02)
    return False


async def begun(played, index=0):
    env = await played.ask(played.suite.episode, on_loop=True)
    return env, await played.ask(env.reset, {"index": index, "split": "train"})


@in_loop
async def test_an_episode_on_a_server_is_like_one_at_home(shared):
    server, folder = shared
    async with Played(make_suite("remote", {"url": server.url})) as played:
        suite = played.suite
        assert isinstance(suite, HasFacts)
        assert isinstance(suite, HasGauges)
        assert (suite.facts().heldout_tasks, suite.facts().longest_tasks) == (3, (("train", 1, "here"),))
        assert suite.demonstration(0, "train")[-1]["content"] == "0"
        with pytest.raises(LookupError, match="only task 0"):
            suite.demonstration(1, "train")
        env, messages = await begun(played, 7)
        assert messages == [{"role": "user", "content": "train 7"}]
        assert isinstance(env, HasTools)
        assert isinstance(env, HasTurnFacts)
        assert isinstance(env, HasTurnLimit)
        assert env.tool_schemas()[0]["function"]["name"] == "add"
        assert env.turn_limit() is None
        for tokens, action in ((3, "a"), (4, "end")):
            await played.ask(env.turn_facts, TurnFacts(5, tokens, cut=False), on_loop=True)
            result = await played.ask(env.step, action)
            assert result.messages() == ([] if result.done else [{"role": "tool", "content": "A"}])
            assert env.turn_limit() == (None if result.done else 8)
        assert (result.rewards, result.correct, result.info) == ({"exact": 1.0}, True, {"seen": [3, 4]})
        await played.ask(env.close)
        assert logged(folder, "close")
        async with aiohttp.ClientSession() as client, client.get(server.url) as answer:
            about = await answer.text()
        assert '"episodes": 0' in about
        assert '"offbeat": "environments"' in about


FAILURES = {
    "fail": (RemoteFailed, r"KeyError: 'answer' in .*game.py:\d+ in step, on http.*last lines: .*answer"),
    "odd": (RemoteFailed, "step returned 5, not a StepResult"),
    "slow": (RemoteFailed, r"took longer .*; it stands in .*game.py:\d+ in step"),
    "service": (ServiceFailed, "the judge is gone"),
}


@in_loop
async def test_a_failure_is_that_of_the_environment_or_nobodys(shared):
    server, _ = shared
    async with Played(make_suite("remote", {"url": server.url})) as played:
        impatient = make_suite("remote", {"url": server.url, "timeout_s": 1.0})

        async def fail(action):
            suite = impatient if action == "slow" else played.suite
            env = await played.ask(suite.episode, on_loop=True)
            await played.ask(env.reset, {"index": 0, "split": "train"})
            try:
                await played.ask(env.step, action)
            except EnvError as error:
                return error
            finally:
                await played.ask(env.close)

        errors = await asyncio.gather(*map(fail, FAILURES))
        await played.ask(impatient.close)
        for error, (kind, why) in zip(errors, FAILURES.values(), strict=True):
            assert type(error) is kind
            with pytest.raises(kind, match=why):
                raise error


@in_loop
async def test_a_server_is_killed_and_comes_back(server, folder):
    """The episode is lost, and nobody is at fault. The next one waits until the server is there again."""
    async with Played(make_suite("remote", {"url": server.url, "timeout_s": 50.0})) as played:
        lost, _ = await begun(played)
        server.kill()
        waiting = asyncio.create_task(begun(played, 1))
        step = asyncio.create_task(played.ask(lost.step, "a"))
        again = await asyncio.to_thread(Server, folder, port=server.port)
        try:
            env, messages = await waiting
            assert messages[0]["content"] == "train 1"
            with pytest.raises(ServerLost, match="no such episode"):
                await step
            assert (await played.ask(env.step, "end")).done
            await played.ask(env.close)
            await played.ask(lost.close)
            assert played.suite.gauges() == {"servers_lost_total": 1.0}
        finally:
            assert again.kill(signal.SIGTERM) == 0


@in_loop
async def test_a_server_that_stands_still_is_nobodys_fault(shared):
    server, _ = shared
    async with Played(make_suite("remote", {"url": server.url})) as played:
        env, _ = await begun(played)
        played.suite.timeout_s = -3.0
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(ServerLost, match="took too long"):
                await played.ask(env.step, "a")
        finally:
            os.kill(server.process.pid, signal.SIGCONT)


@in_loop
async def test_episodes_go_to_the_server_that_has_the_fewest(server, folder):
    """A second server takes what the first one, which is killed, cannot."""
    other = await asyncio.to_thread(Server, folder)
    try:
        async with Played(make_suite("remote", {"url": [server.url, other.url]})) as played:
            episodes = [await begun(played, i) for i in range(4)]
            assert [s.episodes for s in played.suite._servers] == [2, 2]
            pids = {line.split()[1] for line in (folder / "log").read_text().splitlines()}
            assert pids == {str(server.process.pid), str(other.process.pid)}
            server.kill()
            _, messages = await begun(played, 9)
            assert messages[0]["content"] == "train 9"
            for env, _ in episodes:
                await played.ask(env.close)
            other.kill()
            played.suite.timeout_s = -3.0
            with pytest.raises(ServerLost, match=r"does not answer|too long to answer"):
                await begun(played)
    finally:
        other.kill()


def test_episodes_end_when_their_client_is_killed(folder):
    server = Server(folder, code=SERVER_OF_SHORT_LEASES)
    try:
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, server.url], stdout=subprocess.PIPE, text=True
        )
        assert client.stdout.readline() == "begun\n"
        client.kill()
        client.communicate(timeout=30)
        assert gone(client.pid)
        assert logged(folder, "close")
    finally:
        server.kill()


@in_loop
async def test_other_hosts_need_the_token_and_are_encrypted(folder):
    keys, strangers = folder / "keys", folder / "strangers"
    for made in (keys, strangers):
        key_files.make(made, ())
    refused = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "launch.cli", "envs", str(folder / "game.toml"), "--listen", "0.0.0.0:0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 1
    assert "there is no token" in refused.stderr
    server = await asyncio.to_thread(Server, folder, "--keys", keys)
    try:
        assert server.url.startswith("https://")
        async with Played(make_suite("remote", {"url": server.url, "keys": str(keys)})) as played:
            env, _ = await begun(played)
            assert (await played.ask(env.step, "end")).done
            await played.ask(env.close)
        (strangers / "http.crt").write_bytes((keys / "http.crt").read_bytes())
        async with Played(make_suite("remote", {"url": server.url, "keys": str(strangers)})) as played:
            with pytest.raises(ServiceFailed, match="is it the token"):
                await begun(played)
    finally:
        server.kill()


@contextlib.contextmanager
def refuses_and_stays(keys):
    """Give the address of a server that refuses every request, and then neither ends its connections nor reads."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "http.crt", keys / "http.key")
    answer = b"HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
    open_ones = []

    def serve(listener):
        with contextlib.suppress(OSError):
            while True:
                encrypted = context.wrap_socket(listener.accept()[0], server_side=True)
                open_ones.append(encrypted)
                encrypted.recv(2**16)
                encrypted.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in open_ones:
                one.close()


def end_of_a_refused_suite(url, keys):
    async def begin_and_end():
        async with Played(make_suite("remote", {"url": url, "keys": str(keys)})) as played:
            with pytest.raises(ServiceFailed, match="is it the token"):
                await begun(played)

    asyncio.run(begin_and_end())
    # A connection that is left warns when it is collected, and a warning is an error.
    gc.collect()


def test_a_suite_that_ends_waits_for_no_goodbye(folder):
    key_files.make(folder / "keys", ())
    with refuses_and_stays(folder / "keys") as url:
        end_of_a_refused_suite(url, folder / "keys")


def test_a_suite_that_ends_leaves_no_connection_open(folder):
    """It may end in the middle of the handshake by which it would tell the server that it is there."""
    keys, strangers = folder / "keys", folder / "strangers"
    for made in (keys, strangers):
        key_files.make(made, ())
    (strangers / "http.crt").write_bytes((keys / "http.crt").read_bytes())
    server = Server(folder, "--keys", keys)
    try:
        # Of 560 ends, 23 left a connection before `close` saw to it.
        for _ in range(80):
            end_of_a_refused_suite(server.url, strangers)
    finally:
        server.kill()
