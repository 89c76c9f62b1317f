"""No call in these packages waits without a deadline, except those listed here with a reason.

The test reads the source. It finds each call that can block, has no timeout, and stands neither in
``asyncio.wait_for(...)`` nor inside ``async with asyncio.timeout(...)``. docs/run/operations.md has the
table of all waits.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = [
    *sorted((ROOT / "launch").rglob("*.py")),
    *sorted((ROOT / "actors").rglob("*.py")),
    *sorted((ROOT / "envs").rglob("*.py")),
    *(ROOT / "broker" / name for name in ("service.py", "status.py")),
    ROOT / "protocol" / "processes.py",
]
BLOCKING = {"get", "join", "wait", "result", "acquire", "communicate", "recv", "recv_multipart"}
"""Methods that block when they are called without any argument."""
TAKE_TIMEOUT = {
    "asyncio.wait",
    "subprocess.run",
    "subprocess.check_output",
    "subprocess.call",
    "urllib.request.urlopen",
}
NO_TIMEOUT = {"asyncio.gather", "asyncio.to_thread", "run_in_executor", "fcntl.flock"}

ALLOWED = {
    ("actors/uplink.py", "self._room.wait()"): (
        "back-pressure: an episode waits until the broker takes more segments; who stands in the way (learner, disk) "
        "has a deadline of its own, a broker that is gone has fleet.orphan_minutes, and a drain gives episodes up"
    ),
    (
        "actors/generator/http_engine.py",
        "self._open.wait()",
    ): "for the load of an update, which has load_deadline; else we end",
    (
        "actors/generator/vllm_engine/engine.py",
        "self._open.wait()",
    ): "for the load of an update, which has load_deadline; else we end",
    (
        "actors/generator/vllm_engine/worker.py",
        "done.result()",
    ): "memory is copied; the load has load_deadline",
    (
        "actors/generator/weights/tensors.py",
        "read.result()",
    ): "memory is copied; the load has load_deadline",
    (
        "actors/generator/http_engine.py",
        "asyncio.gather(self._watch, return_exceptions=True)",
    ): "it has been cancelled",
    ("actors/environments.py", "waiting.result()"): "it is done",
    ("actors/play_requests.py", "self._news_task.result()"): "it is done",
    ("actors/play_requests.py", "wanted.task.result()"): "it is done",
    ("envs/agent/endpoint.py", "asked.answer.result()"): "it is done",
    ("envs/agent/endpoint.py", "asking.result()"): "it is done",
    (
        "envs/agent/endpoint.py",
        "asyncio.to_thread(_parsed, dialect, body)",
    ): "linear in a body that is bounded",
    (
        "envs/agent/episode.py",
        "self._session.news.wait()",
    ): "functions of an environment have actor.env_timeout_s",
    ("envs/agent/episode.py", "self.work.result()"): "it is done",
    ("envs/agent/episode.py", "work.result()"): "it is done",
    ("envs/agent/suite.py", "process.wait()"): "an episode has a deadline, at which the agent is cancelled",
    ("envs/agent/guard.py", "agent.wait()"): "the actor closes the pipe when it no longer wants the agent",
    (
        "protocol/processes.py",
        "asyncio.gather(*tasks, return_exceptions=True)",
    ): "cancelled coroutines clean up; daemon threads end so, for which a close waits JOIN_S at most, and one process",
    (
        "actors/environments.py",
        "inbox.get()",
    ): "an idle daemon thread waits for work; nobody waits for it",
    ("launch/in_process.py", "task.result()"): "it is done",
    (
        "actors/generator/vllm_engine/one_process.py",
        "changed.wait()",
    ): "an idle engine waits for a request; each request has a deadline of its own",
    (
        "actors/generator/weights/staging.py",
        "self._offered.wait()",
    ): "for nobody: there may be no newer version ever",
    ("envs/tools/mcp_server.py", "self._stop.wait()"): "for the end of the suite; it holds a connection open",
    (
        "envs/scoring/scorer.py",
        "asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)",
    ): ("each call puts one request to a worker and has that request's deadline"),
}


def unbounded(path: Path) -> Iterator[str]:
    """Return the source of each call in a file that may wait for ever."""
    tree = ast.parse(path.read_text())

    def look(node: ast.AST, bounded: bool) -> Iterator[str]:
        if isinstance(node, ast.AsyncWith):
            bounded = bounded or any("asyncio.timeout" in ast.unparse(item) for item in node.items)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            bounded = False
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "asyncio.wait_for":
                bounded = True
            if not bounded and may_wait(name, node):
                yield ast.unparse(node)
        for child in ast.iter_child_nodes(node):
            yield from look(child, bounded)

    return look(tree, False)


def may_wait(name: str, call: ast.Call) -> bool:
    last = name.rpartition(".")[2]
    timed = any(keyword.arg == "timeout" for keyword in call.keywords)
    if name == "fcntl.flock":
        return not any(word in ast.unparse(call) for word in ("LOCK_NB", "LOCK_UN"))
    if name in NO_TIMEOUT or last in NO_TIMEOUT:
        return True
    if name in TAKE_TIMEOUT:
        return not timed
    return "." in name and last in BLOCKING and not call.args and not call.keywords


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_every_wait_has_a_deadline(path):
    found = [call for call in unbounded(path) if (relative(path), call) not in ALLOWED]
    assert not found, "give it a deadline, an error that says whom it waited for, and a cure"


def test_the_list_of_exceptions_is_no_longer_than_needed():
    seen = {(relative(path), call) for path in SOURCES for call in unbounded(path)}
    assert set(ALLOWED) <= seen, "take out what is not there any more"


@pytest.mark.parametrize(
    ("source", "waits"),
    [
        ("q.get()", True),
        ("q.get(timeout=1)", False),
        ("d.get(key)", False),
        ("t.join()", True),
        ("', '.join(words)", False),
        ("async def f():\n await e.wait()", True),
        ("async def f():\n await asyncio.wait_for(e.wait(), 1)", False),
        ("async def f():\n async with asyncio.timeout(1):\n  await e.wait()", False),
        ("async def f():\n async with asyncio.timeout(1):\n  def g():\n   t.join()", True),
        ("asyncio.wait(tasks)", True),
        ("asyncio.wait(tasks, timeout=1)", False),
        ("subprocess.run(['x'])", True),
        ("fcntl.flock(f, fcntl.LOCK_EX)", True),
        ("fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)", False),
        ("fcntl.flock(f, fcntl.LOCK_UN)", False),
    ],
)
def test_what_counts_as_a_wait(source, waits, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert bool(list(unbounded(path))) == waits
