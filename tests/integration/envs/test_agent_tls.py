"""An agent on OpenAI's own client reaches the endpoint over TLS, and no other client does."""

import sys

import pytest

from envs.errors import EnvError
from envs.registry import beside, make_suite
from protocol.security import key_files
from tests.integration.envs.agent_play import played

PROGRAM = """
import json, os, ssl, sys, urllib.request
import httpx
from openai import APIConnectionError, AuthenticationError, OpenAI

row, url = json.load(sys.stdin), os.environ["OPENAI_BASE_URL"]
assert url.startswith("https://localhost:"), url
trusted = ssl.create_default_context(cafile=os.environ["OFFBEAT_CERTIFICATE"])


def ask(**more):
    with OpenAI(max_retries=0, **more) as client:
        messages = [{"role": "user", "content": "Hi"}]
        return client.chat.completions.create(model="policy", messages=messages).choices[0].message.content


try:
    ask()
except APIConnectionError as error:
    assert "CERTIFICATE_VERIFY_FAILED" in repr(error.__cause__), repr(error.__cause__)
else:
    sys.exit("a client that does not know the certificate was served")
try:
    ask(http_client=httpx.Client(verify=trusted), api_key="wrong")
except AuthenticationError:
    print(ask(http_client=httpx.Client(verify=trusted)))
"""


def test_a_program_is_served_over_tls_with_its_key_and_the_certificate(tmp_path):
    keys = tmp_path / "keys"
    key_files.make(keys)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "score.py").write_text("def says(row, output):\n    return output.strip() == 'Hello'\n")
    done = played(
        tmp_path,
        [sys.executable, str(tmp_path / "program.py")],
        lambda prompt: "Hello",
        score=f"{tmp_path}/score.py:says",
        listen="0.0.0.0:0",
        keys=str(keys),
        advertised_host="localhost",
    )
    assert done.last.status == "finished", done.last
    assert done.rewards == [("reward", 1, 1.0)]
    assert done.gauges["agent_requests_total"] == 1


def test_the_keys_folder_is_found_beside_the_run_file(tmp_path):
    key_files.make(tmp_path / "keys")
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n')
    given = {"run": ["agent"], "train": "rows.jsonl", "heldout": 0.0, "keys": "keys"}
    _, params = beside("agent", given, tmp_path)
    assert params["keys"] == str(tmp_path / "keys")
    assert "keys" not in beside("agent", {"run": ["agent"], "train": "rows.jsonl"}, tmp_path)[1]
    make_suite("agent", params)


def test_an_address_that_no_agent_could_check_is_refused_with_the_cure(tmp_path):
    key_files.make(tmp_path / "keys")
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n')
    given = {
        "run": ["agent"],
        "train": f"{tmp_path}/rows.jsonl",
        "heldout": 0.0,
        "keys": str(tmp_path / "keys"),
    }
    with pytest.raises(EnvError, match=r'set params\.advertised_host = "offbeat"'):
        make_suite("agent", {**given, "listen": "0.0.0.0:0"})
    make_suite("agent", {**given, "listen": "0.0.0.0:0", "advertised_host": "offbeat"})


REFUSED = {
    "no keys": ({"listen": "0.0.0.0:0"}, "other hosts can reach it, and nothing is encrypted"),
    "a name": ({"listen": "actor-3:0"}, "other hosts can reach it"),
    "no port": ({"listen": "127.0.0.1:"}, "write host:port"),
    "no folder": ({"listen": "0.0.0.0:0", "keys": "nowhere"}, r"nowhere.http\.key"),
}


@pytest.mark.parametrize(("params", "why"), REFUSED.values(), ids=REFUSED)
def test_an_endpoint_that_strangers_could_read_is_refused_before_anything_starts(tmp_path, params, why):
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n')
    with pytest.raises(EnvError, match=why):
        make_suite("agent", {"run": ["agent"], "train": f"{tmp_path}/rows.jsonl", "heldout": 0.0, **params})
