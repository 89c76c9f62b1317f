"""`offbeat status` finds a run, prints who waits for whom, and prints what is known of a silent broker."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from broker.status import status
from launch import run_folder
from launch.cli import main
from launch.commands.status import find_run
from launch.errors import ConfigError
from launch.run_file.load import check
from protocol.messages.peers import Heartbeat
from protocol.security import key_files
from protocol.security.http import read_tokens, server_context
from tests.broker_driver import Driver, group


def recorded():
    driver = Driver()
    driver.learner(credit=4)
    driver.put(*group("g", 2))
    driver.actor("actor-0", tasks=2)
    driver.hello("generator", "generator-0", endpoint="tcp://127.0.0.1:1")
    driver.say("generator-0", Heartbeat(policy_version=0, gauges={"running_requests": 0.0}))
    return status(driver.dispatcher, driver.now) | {
        "journal": {"kind": "files", "blocked": "", "bytes": 4096}
    }


@pytest.fixture
def broker(monkeypatch):
    """Yield a server that answers like a broker; if ``server.token`` is set, requests need this token."""
    # It is in this process, and on a busy machine neither side may get a turn for seconds.
    monkeypatch.setattr("launch.commands.status.TIMEOUT_S", 100.0)

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.heard.append((self.path, self.headers.get("Authorization")))
            if server.elsewhere and self.path == "/status":
                self.send_response(302)
                self.send_header("Location", server.elsewhere)
                self.end_headers()
                return
            good = not server.token or self.headers.get("Authorization") == f"Bearer {server.token}"
            self.send_response(200 if good and self.path == "/status" else 401)
            self.end_headers()
            if good:
                self.wfile.write(json.dumps(recorded()).encode())

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    server.token, server.elsewhere, server.heard = "", "", []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(100)


def address(server):
    return f"127.0.0.1:{server.server_port}"


def run_of(tmp_path, http_address, *, encrypt=False, **security):
    folder = tmp_path / "runs" / "spell"
    folder.mkdir(parents=True)
    settings = {"model": {"path": "m"}, "env": {"name": "calculator"}, "broker": {"http": http_address}}
    settings["security"] = {"encrypt": encrypt, **security}
    run_folder.save_config(check(settings, "test"), folder / run_folder.CONFIG)
    return folder


def test_a_page_by_address_by_folder_and_of_the_newest_run(broker, tmp_path, monkeypatch, capsys):
    folder = run_of(tmp_path, address(broker))
    monkeypatch.chdir(tmp_path)
    for target in ([address(broker)], [f"http://{address(broker)}/"], [str(folder)], []):
        assert main(["status", *target]) == 0
        page = capsys.readouterr().out
        assert "learner waits for groups: actors run 2 tasks" in page
        assert "generator-0 idle: no requests" in page
        assert "queues   2 tasks with actors\n" in page
        assert "0 tokens stored, 0 held" in page
        assert "journal  4.1 kB in files" in page
    assert main(["status", "-v", address(broker)]) == 0
    page = capsys.readouterr().out
    assert "tasks_leased 2, " in page
    assert "journal  kind 'files', blocked '', bytes 4,096" in page


def test_json_is_what_the_broker_said(broker, capsys):
    assert main(["status", address(broker), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(recorded()))


def encrypt(server, keys):
    """Switch the server to TLS, and require the token of these keys from now on."""
    key_files.make(keys)
    server.token = read_tokens(keys)[0]
    server.socket = server_context(keys).wrap_socket(server.socket, server_side=True)


def test_the_token_of_the_runs_keys_is_sent(broker, tmp_path, capsys):
    folder = run_of(tmp_path, address(broker), encrypt=True)
    assert main(["status", str(folder)]) == 1
    assert "http.token: cannot be read" in capsys.readouterr().out
    encrypt(broker, folder / "keys")
    assert main(["status", str(folder)]) == 0
    key_files.rotate(folder / "keys", "http")
    assert main(["status", str(folder)]) == 1
    assert "401" in capsys.readouterr().out


def test_an_open_broker_of_an_encrypted_run_is_asked_without_the_token(broker, tmp_path):
    folder = run_of(tmp_path, address(broker), encrypt=True, http_token="beyond_loopback")
    assert main(["status", str(folder)]) == 0


def test_a_broker_named_by_its_address_is_shown_the_token_of_a_folder(broker, tmp_path, capsys):
    encrypt(broker, tmp_path / "keys")
    for target in (address(broker), f"https://{address(broker)}"):
        assert main(["status", target, "--keys", str(tmp_path / "keys")]) == 0
    capsys.readouterr()
    key_files.make(tmp_path / "other")
    for said, arguments in (
        ("--keys FOLDER", []),
        ("another run's certificate", ["--keys", str(tmp_path / "other")]),
    ):
        assert main(["status", address(broker), *arguments]) == 1
        assert said in capsys.readouterr().out


def test_the_token_does_not_follow_a_redirect(broker, tmp_path, capsys):
    encrypt(broker, tmp_path / "keys")
    broker.elsewhere = f"https://localhost:{broker.server_port}/elsewhere"
    assert main(["status", address(broker), "--keys", str(tmp_path / "keys")]) == 1
    assert [path for path, token in broker.heard if token] == ["/status"]
    assert broker.heard[1:] == [("/elsewhere", None)]


def test_the_token_is_not_sent_in_the_clear(broker, tmp_path, capsys):
    key_files.make(tmp_path / "keys")
    for said, target in (
        ("leave the keys out", address(broker)),
        ("under https only", f"http://{address(broker)}"),
    ):
        assert main(["status", target, "--keys", str(tmp_path / "keys")]) == 1
        assert said in capsys.readouterr().out
    assert broker.heard == []


def test_restarts_and_who_has_not_joined_come_from_the_supervisors_notes(broker, tmp_path, capsys):
    folder = run_of(tmp_path, address(broker))
    processes = {
        "generator-0": {"pid": 1, "log": "", "restarts": 3, "last_reason": ""},
        "actor-1": {"pid": os.getpid(), "log": "", "restarts": 1, "last_reason": ""},
        "actor-2": {"pid": 0, "log": "", "restarts": 0, "last_reason": ""},
    }
    (folder / "supervisor.json").write_text(json.dumps({"pid": 1, "processes": processes}))
    assert main(["status", str(folder)]) == 0
    table, _, _ = capsys.readouterr().out.partition("\nwaits")
    rows = {line.split()[0]: line.split() for line in table.splitlines() if line.strip()}
    assert "3" in rows["generator-0"]
    assert rows["actor-1"][1] == "joining"
    assert rows["actor-2"][1] == "down"


def test_without_a_broker_it_says_who_should_answer_and_shows_the_end_of_its_log(tmp_path, capsys):
    folder = run_of(tmp_path, "127.0.0.1:1")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    (folder / "logs").mkdir()
    (folder / "logs" / "broker.log").write_text("first\nthe disk is on fire\n")
    broker = {"pid": gone.pid, "log": str(folder / "logs" / "broker.log"), "restarts": 2, "last_reason": ""}
    (folder / "supervisor.json").write_text(json.dumps({"pid": gone.pid, "processes": {"broker": broker}}))
    assert main(["status", str(folder)]) == 1
    said = capsys.readouterr().out
    assert f"it should be process {gone.pid}, which is gone" in said
    assert "is gone: go on with `offbeat train RUN_FILE --resume`" in said
    assert "the disk is on fire" in said
    with run_folder.claim(folder):
        assert main(["status", str(folder)]) == 1
    assert "lives and starts it again" in capsys.readouterr().out


def test_a_broker_by_hand_is_found_by_its_own_settings(broker, tmp_path, capsys):
    folder = run_of(tmp_path, address(broker))
    (folder / run_folder.CONFIG).rename(folder / "config-broker.json")
    assert main(["status", str(folder)]) == 0
    broker.shutdown()
    broker.server_close()
    assert main(["status", str(folder)]) == 1
    assert "not started by `offbeat train`" in capsys.readouterr().out


@pytest.mark.parametrize("target", ["nowhere", "runs/nothing", ""])
def test_what_is_no_run_is_refused_with_a_cure(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"runs|run folder"):
        find_run(target)


def test_watch_goes_on_until_it_is_interrupted(broker):
    command = [sys.executable, "-m", "launch.cli", "status", address(broker), "--watch"]
    root = Path(__file__).parents[3]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pages = 0
    while pages < 2:
        line = process.stdout.readline()
        assert line, "it ended by itself"
        pages += line.startswith("run ")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 130


SUMMARY = {
    "run": "spell",
    "ended_by": "all steps done",
    "steps": 20,
    "policy_version": 20,
    "wall_seconds": 90.0,
    "training_seconds": 60.0,
    "accuracy": {"before": 0.2, "after": 0.79, "tasks": 64},
    "evaluations": [
        {"tag": "before", "step": 0, "tasks": 64, "accuracy": 0.2, "return_mean": 0.4},
        {"tag": "after", "step": 20, "tasks": 64, "accuracy": 0.79, "return_mean": 0.9},
    ],
    "tokens_generated": 1000,
    "tokens_trained": 900,
    "trajectories_trained": 80,
    "trajectories_by_outcome": {},
    "policy_lag": {"mean_versions": 1.0, "max_versions": 2, "bound": 4},
    "idle_share": {"learner": 0.1, "generator": 0.2},
    "restarts": {},
    "tensorboard": "runs/spell/tb",
    "learning_curve": "runs/spell/learning_curve.png",
    "model": "runs/spell/model",
}


def test_a_run_that_has_ended_is_shown_by_its_summary(tmp_path, capsys):
    folder = run_of(tmp_path, "127.0.0.1:1")
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    for arguments in ([], ["--watch"]):
        assert main(["status", str(folder), *arguments]) == 0
        said = capsys.readouterr().out
        assert said.startswith("run spell ended just now: all steps done\n")
        assert "0.200 at step 0, 0.790 at step 20" in said
        assert "1,000 sampled, 900 trained" in said
        assert "runs/spell/model" in said
        assert "refused" not in said
    assert main(["status", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"]["steps"] == 20


def test_a_run_that_was_begun_again_is_not_shown_by_its_old_summary(tmp_path, capsys):
    folder = run_of(tmp_path, "127.0.0.1:1")
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    with run_folder.claim(folder):
        assert main(["status", str(folder)]) == 1
    os.utime(folder / "summary.json", (1.0, 1.0))
    assert main(["status", str(folder)]) == 1
    assert "the broker does not answer" in capsys.readouterr().out


def test_a_run_whose_supervisor_is_about_to_end_is_over(tmp_path, capsys):
    """The broker leaves before the supervisor, which writes the summary last."""
    folder = run_of(tmp_path, "127.0.0.1:1")
    result = {
        "ended_by": "all steps done",
        "run": "over",
        "steps": 20,
        "policy_version": 20,
        "evaluations": [],
    }
    (folder / "result.json").write_text(json.dumps(result))
    with run_folder.claim(folder):
        assert main(["status", str(folder)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("run spell is over: all steps done")
    assert "starts it again" not in said
