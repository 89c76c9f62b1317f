"""Test the run's own judge: a real vLLM server, started as the role, scores answers as an actor asks it."""

import asyncio
import json
import re
import time
import urllib.error
import urllib.request

import pytest

from envs.errors import EnvError, NotStarted, ServiceFailed
from envs.rows.judge import OWN, OWN_KEY, OWN_URL, Judge, JudgeSettings
from launch import run_folder
from launch.model import make_tokenizer, save_tokenizer
from launch.processes import command_of_role, free_port, role_environment, spawn, stop
from launch.run_file.load import check
from launch.servers import actor_environment
from learner.warmstart import make_tiny_model
from protocol.security import key_files

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TABLE = {"judge": OWN, "prompt": "judge.txt"}
QUESTION = "{prompt} {completion}"


@pytest.fixture
def run(tmp_path):
    """Return the configuration of a run whose judge is the model that it starts from, and its folder with keys."""
    model, folder = tmp_path / "model", tmp_path / "run"
    save_tokenizer(make_tokenizer(["12 + 30 =", "7 + 5 ="]), model, max_length=256)
    make_tiny_model(
        model, [model / "tokenizer.json", model / "tokenizer_config.json"],
        hidden_size=32, layers=1, heads=1, intermediate_size=64, max_positions=256,
    )  # fmt: skip
    config = check(
        {
            "model": {"path": str(model)},
            "env": {"name": "rows", "params": {"train": "t.jsonl", "reward": {"good": TABLE}}},
            "generator": {"max_model_len": 256, "kv_cache_mb": 16},
            "judge": {"http": f"127.0.0.1:{free_port()}"},
        },
        "run.toml",
    )
    folder.mkdir()
    run_folder.save_config(config, folder / run_folder.CONFIG)
    key_files.make(folder / "keys")
    return config, folder


def wait_for(url, child):
    deadline = time.monotonic() + 500.0
    while time.monotonic() < deadline:
        assert child.running, child.tail()
        try:
            with urllib.request.urlopen(f"{url.removesuffix('/v1')}/health", timeout=1.0):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(f"the judge does not answer: {child.tail()}")


async def settled(asked):
    return await asyncio.gather(asked, return_exceptions=True)


def test_the_runs_own_judge_scores_answers_and_lets_only_its_actors_in(run, monkeypatch):
    config, folder = run
    # A random model writes what it will, seldom with a number at the end; the scale is larger than any of them.
    settings = JudgeSettings(**TABLE, scale=1e60, temperature=1.0, max_tokens=60, timeout_s=60.0)
    monkeypatch.delenv(OWN_URL, raising=False)

    async def ask(answer):
        judge = Judge(settings, QUESTION)
        try:
            return await judge(answer, {"prompt": "12 + 30 ="})
        finally:
            await judge.close()

    with pytest.raises(NotStarted, match="not there yet"):
        asyncio.run(ask("42"))
    env = role_environment(1, local_model=True)
    child = spawn("judge", command_of_role("judge", folder), log=folder / "logs" / "judge.log", env=env)
    try:
        found = actor_environment(config.judge, folder / "keys")
        wait_for(found[OWN_URL], child)
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        (answered,) = asyncio.run(settled(ask("42")))
        if isinstance(answered, BaseException):
            # It answered this actor, and what cannot be read is never a score.
            assert isinstance(answered, ServiceFailed)
            assert re.search(r"the run's own judge: its answer '.+' has no number", str(answered))
        else:
            assert 0 <= answered <= 1
        monkeypatch.setenv(OWN_KEY, "another")
        with pytest.raises(EnvError, match=f"own judge: HTTP status 401.*{OWN_KEY}"):
            asyncio.run(ask("43"))
    finally:
        stubborn = stop([child], patience_s=30.0)
    assert stubborn == [], child.tail()


def test_the_key_of_the_judge_is_not_the_token(run):
    config, folder = run
    found = actor_environment(config.judge, folder / "keys")
    assert (folder / "keys" / "http.token").read_text().split()[0] not in json.dumps(found)
    assert len(found[OWN_KEY]) == 128
    assert list(actor_environment(config.judge, None)) == [OWN_URL]
    assert actor_environment(None, folder / "keys") == {}
