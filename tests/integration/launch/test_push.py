"""`offbeat push` uploads with the hub's own client: tested against a fake of the hub's HTTP interface."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launch.commands.push import model_folder
from launch.errors import ConfigError

TOKEN = "hf_of_the_test"


class Hub(BaseHTTPRequestHandler):
    """Takes a repository, small files in a commit, and large ones by their hash."""

    def do_POST(self):
        hub, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, status=401)
        if self.path == "/api/repos/create":
            hub.made.append(json.loads(body))
            return self.answer({"url": f"{hub.url}/me/model"})
        if "/preupload/" in self.path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/store/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if self.path == "/api/validate-yaml":
            hub.cards.append(json.loads(body)["content"])
            return self.answer({"errors": [], "warnings": []})
        assert "/commit/" in self.path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    hub.summary = value["summary"]
                case "file":
                    hub.files[value["path"]] = b64decode(value["content"])
                case "lfsFile":
                    hub.files[value["path"]] = hub.store[value["oid"]]
        return self.answer(
            {"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/me/model/commit/{'0' * 40}"}
        )

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.store[self.path.rpartition("/")[2]] = body
        self.answer({})

    def do_GET(self):
        self.answer({"error": "not here"}, status=404)

    def answer(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.made, server.files, server.store, server.cards = [], {}, {}, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(60)


@pytest.fixture
def run(tmp_path):
    """Return a run folder with a last model, one of a step, a best one, and adapters."""
    folder = tmp_path / "runs" / "first"
    for name in ("model", "models/step-000020", "models/best-step-000030"):
        (folder / name / "adapter").mkdir(parents=True)
        (folder / name / "config.json").write_text("{}")
        (folder / name / "README.md").write_text(f"card of {name}")
        (folder / name / "model.safetensors").write_bytes(name.encode())
        (folder / name / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "summary.json").write_text(
        json.dumps({"best": {"step": 30, "score": 1.0, "model": "elsewhere"}})
    )
    return folder


def push(hub, *words, token=TOKEN):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    # The fake has no storage of the kind that the client prefers.
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "launch.cli", "push", *map(str, words)],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_a_model_is_uploaded_with_its_card_and_adapters(hub, run):
    done = push(hub, run, "me/model")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{hub.url}/me/model/commit/{'0' * 40}"), (
        done.stderr
    )
    assert hub.made[0]["name"] == "model"
    assert hub.made[0]["organization"] == "me"
    assert hub.made[0].get("private", hub.made[0].get("visibility")) in (True, "private")
    assert hub.files == {
        "README.md": b"card of model",
        "adapter/adapter_config.json": b"{}",
        "config.json": b"{}",
        "model.safetensors": b"model",
    }
    assert list(hub.store) == [hashlib.sha256(b"model").hexdigest()]
    assert hub.summary == "Upload first, model"
    assert set(hub.cards) == {"card of model"}


def test_a_refused_token_is_one_line_with_a_cure(hub, run):
    done = push(hub, run, "me/model", token="hf_another")
    assert done.returncode == 1
    assert done.stderr.startswith("offbeat push: me/model: the upload failed: ")
    assert "is HF_TOKEN one that may write there?" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert hub.files == {}


@pytest.mark.parametrize(
    ("which", "folder"),
    [
        ({}, "model"),
        ({"step": 20}, "models/step-000020"),
        ({"best": True}, "models/best-step-000030"),
        ({"adapter": True}, "model/adapter"),
    ],
)
def test_a_model_of_the_run_is_chosen(run, which, folder):
    assert model_folder(run, **{"best": False, "step": None, "adapter": False} | which) == run / folder


@pytest.mark.parametrize(
    ("repo", "change", "words"),
    [
        ("me/model", {"step": 21}, "has no models/step-000021; models there: model, models/best-step-000030"),
        ("model", {}, "'model' names no owner; write OWNER/NAME"),
        ("me/model/x", {}, "'me/model/x': Repo id must be in the form"),
        ("-/..", {}, "'-/..': "),
    ],
)
def test_what_cannot_be_uploaded_is_refused_before_the_network(run, repo, change, words):
    from launch.commands.push import push as upload

    with pytest.raises(ConfigError, match=words):
        upload(run, repo, **change)


def test_the_best_model_of_a_run_that_goes_on_is_the_newest_that_was_kept(run):
    (run / "summary.json").unlink()
    # Until a checkpoint knows of the newest one, the one before stays, too.
    shutil.copytree(run / "models" / "best-step-000030", run / "models" / "best-step-000010")
    found = model_folder(run, best=True, step=None, adapter=False)
    assert found == run / "models" / "best-step-000030"


def test_a_run_without_adapters_or_without_an_end_says_so(run):
    (run / "model" / "adapter" / "adapter_config.json").unlink()
    (run / "model" / "adapter").rmdir()
    with pytest.raises(ConfigError, match="has no adapters: the run trained all weights"):
        model_folder(run, best=False, step=None, adapter=True)
    (run / "summary.json").unlink()
    shutil.rmtree(run / "models" / "best-step-000030")
    with pytest.raises(ConfigError, match="has no best model: it has not ended"):
        model_folder(run, best=True, step=None, adapter=False)
    with pytest.raises(ConfigError, match="is not a run folder"):
        model_folder(run / "nowhere", best=False, step=None, adapter=False)
