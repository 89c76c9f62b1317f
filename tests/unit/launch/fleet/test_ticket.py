"""A ticket has what one host needs and no more, is refused where others may read it, and never shows its secrets."""

import io
import json
import os
import stat
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from launch.errors import COME_BACK, FINAL, ConfigError, ModelRefused, NoHead, exit_code
from launch.fleet import model_copy
from launch.fleet import ticket as tickets
from launch.fleet.model_copy import FetchStopped, model_of_ticket
from launch.fleet.ticket import (
    CREDENTIAL,
    CREDENTIALS,
    VARIABLE,
    ModelFile,
    fresh_label,
    keys_of_run,
    make_ticket,
    reached_by_hosts,
    read_ticket,
    refuse_other_files,
    refuse_other_version,
    secrets_of,
    unpack,
    write_ticket,
)
from launch.processes import free_port
from launch.run_file.load import check
from launch.run_folder import ASKED, CONFIG, save_config
from protocol.security import key_files
from protocol.security.keys import AllowList, key_pair, principal, public_key

ENV = "class Suite: pass\n"


def settings(tmp_path, **changes):
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text(json.dumps({"of": name}))
    (model / ".hidden").write_text("not served")
    (tmp_path / "mine.py").write_text(ENV)
    content = {
        "model": {"path": str(model)},
        "env": {"name": f"{tmp_path / 'mine.py'}:Suite"},
        "broker": {"endpoint": "tcp://0.0.0.0:5755", "http": "0.0.0.0:5756"},
        "weights": {"http": "0.0.0.0:5757", "advertised_host": "10.0.0.5"},
    }
    return check({**content, **changes}, "a test")


@pytest.fixture
def run(tmp_path):
    """A run folder as `offbeat train` leaves it."""
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    asked = settings(tmp_path)
    decided = asked.model_copy(
        update={"generator": asked.generator.model_copy(update={"dtype": "bfloat16", "devices": (1,)})}
    )
    save_config(decided, folder / CONFIG)
    save_config(asked, folder / ASKED)
    key_files.make(folder / "keys")
    return folder


def test_a_ticket_has_the_keys_of_its_host_and_no_others(run):
    ticket = make_ticket(run, host="gpu7")
    assert set(ticket.keys) == {"host-gpu7.secret", "host-gpu7.pub", "broker.pub", "http.token", "http.crt"}
    assert ticket.run == "r"
    assert ticket.config.broker.endpoint == "tcp://10.0.0.5:5755"
    assert ticket.config.broker.http == "10.0.0.5:5756"
    assert ticket.weights == "https://10.0.0.5:5757"
    assert ticket.sources == {ticket.config.env.name.partition(":")[0]: ENV}
    assert set(ticket.model) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_what_the_hardware_of_the_head_decided_is_left_to_the_host(run):
    own = make_ticket(run, host="gpu7").config.generator
    assert (own.dtype, own.devices) == ("auto", ())


def test_the_private_key_of_http_travels_only_to_hosts_that_serve_weights(run, tmp_path):
    relay = settings(tmp_path, generator={"weights_http": "0.0.0.0:0"})
    save_config(relay, run / CONFIG)
    save_config(relay, run / ASKED)
    assert "http.key" in make_ticket(run, host="gpu7").keys


def test_a_ticket_is_read_as_it_was_written_and_its_file_is_private(run, tmp_path):
    ticket, path = make_ticket(run, label="gpu"), tmp_path / "gpu.ticket"
    write_ticket(ticket, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_ticket(str(path), {}) == ticket
    assert read_ticket("", {VARIABLE: str(path)}) == ticket
    folder = tmp_path / "credentials"
    folder.mkdir()
    write_ticket(ticket, folder / CREDENTIAL)
    assert read_ticket("", {CREDENTIALS: str(folder)}) == ticket


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o620, 0o666])
def test_a_ticket_that_others_may_read_is_refused(run, tmp_path, mode):
    path = tmp_path / "gpu7.ticket"
    write_ticket(make_ticket(run, host="gpu7"), path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_ticket(str(path), {})
    with open(path) as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", file)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_ticket("-", {})


def test_a_ticket_comes_by_a_pipe(run, monkeypatch):
    ticket = make_ticket(run, host="gpu7")
    out, into = os.pipe()
    os.write(into, ticket.model_dump_json().encode())
    os.close(into)
    with open(out) as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert read_ticket("-", {}) == ticket


def test_an_error_about_a_ticket_shows_none_of_its_values(run, tmp_path):
    ticket = make_ticket(run, host="gpu7")
    content = json.loads(ticket.model_dump_json())
    path = tmp_path / "broken.ticket"
    hidden = secrets_of(ticket)
    assert len(hidden) == 2  # the host's secret key, the token
    for broken in ({**content, "keys": [*content["keys"].values()]}, {**content, "more": content["keys"]}):
        path.write_text(json.dumps(broken))
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="not a ticket") as caught:
            read_ticket(str(path), {})
        assert not any(text in str(caught.value) for text in hidden)
    path.write_bytes(b" " * (tickets.MAX_TICKET_BYTES + 1))
    with pytest.raises(ConfigError, match="longer than"):
        read_ticket(str(path), {})
    with pytest.raises(ConfigError, match="offbeat ticket RUN"):
        read_ticket(str(tmp_path / "none"), {})
    with pytest.raises(ConfigError, match="there is no ticket"):
        read_ticket("", {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"broker": {"endpoint": "ipc:///tmp/x", "http": "0.0.0.0:1"}}, "only this machine reaches"),
        ({"broker": {"endpoint": "tcp://0.0.0.0:1", "http": "127.0.0.1:2"}}, "broker.http"),
        ({"weights": {}}, "weights.http is empty"),
        ({"weights": {"http": "127.0.0.1:3"}}, "weights.http is 127.0.0.1:3"),
    ],
)
def test_a_head_that_hosts_could_not_reach_gives_no_ticket(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        reached_by_hosts(settings(tmp_path, **changes))


def test_addresses_of_the_head_may_be_named_or_are_its_own(tmp_path):
    config = reached_by_hosts(settings(tmp_path), "fd00::5")
    assert config.broker.endpoint == "tcp://[fd00::5]:5755"
    one = {"endpoint": "tcp://10.1.1.1:7", "http": "10.1.1.1:8"}
    assert reached_by_hosts(settings(tmp_path, broker=one), "far").broker.endpoint == "tcp://10.1.1.1:7"


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x", "a" * 65])
def test_a_name_that_is_none_is_refused(run, name):
    with pytest.raises(ConfigError, match="the host's name is"):
        make_ticket(run, host=name)


def test_a_folder_without_a_run_gives_no_ticket(tmp_path):
    with pytest.raises(ConfigError, match="no run was started there"):
        make_ticket(tmp_path, host="a")


def test_names_that_the_user_does_not_give_are_new(run):
    assert fresh_label(run / "keys") == "h1"
    make_ticket(run, host="h1")
    assert fresh_label(run / "keys") == "h2"


def test_names_are_new_where_the_keys_of_the_run_stand_elsewhere_or_there_are_none(
    run, tmp_path, monkeypatch
):
    from launch.cli import main

    monkeypatch.chdir(tmp_path)
    save_config(settings(tmp_path, security={"keys": str(tmp_path / "keys")}), run / CONFIG)
    (run / "keys").rename(tmp_path / "keys")
    assert [main(["ticket", str(run)]) for _ in range(2)] == [0, 0]
    assert {read_ticket(f"{name}.ticket", {}).host for name in ("h1", "h2")} == {"h1", "h2"}
    here = {"broker": {"endpoint": "tcp://127.0.0.1:5755", "http": "127.0.0.1:5756"}, "weights": {}}
    save_config(settings(tmp_path, security={"encrypt": False}, **here), run / CONFIG)
    assert keys_of_run(run) is None


def test_another_version_is_refused_with_both(run):
    ticket = make_ticket(run, host="gpu7")
    refuse_other_version(ticket)
    with pytest.raises(ConfigError, match=r"offbeat 9\.9\.9 with protocol .* this host"):
        refuse_other_version(ticket.model_copy(update={"offbeat": "9.9.9"}))


def test_files_that_do_not_travel_are_named_with_both_hashes(run, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("1")
    ticket = make_ticket(run, host="gpu7").model_copy(
        update={"others": {str(rows): tickets.digest_of(rows), str(tmp_path / "gone.csv"): "00"}}
    )
    rows.write_text("2")
    with pytest.raises(ConfigError) as caught:
        refuse_other_files(ticket)
    first, second = str(caught.value).splitlines()
    assert tickets.digest_of(rows) in first
    assert ticket.others[str(rows)] in first
    assert "gone.csv" in second


def test_a_source_that_is_too_long_for_a_ticket_is_named(tmp_path, run, monkeypatch):
    monkeypatch.setattr(tickets, "MAX_SOURCE_BYTES", 3)
    ticket = make_ticket(run, host="gpu7")
    assert ticket.sources == {}
    assert list(ticket.others) == [str(tmp_path / "mine.py")]


def test_a_host_unpacks_its_keys_for_itself_alone(run, tmp_path):
    ticket = make_ticket(run, host="gpu7")
    keys, placed = unpack(ticket, tmp_path / "hosts" / "gpu7")
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert stat.S_IMODE((keys / "host-gpu7.secret").stat().st_mode) == 0o600
    (path,) = placed.values()
    assert path.read_text() == ENV
    pair = key_pair(keys, "generator", "generator-gpu7-0")
    assert pair == key_pair(keys, "actor", "actor-gpu7-3")
    assert public_key(keys, "broker") == public_key(run / "keys", "broker")
    allowed = AllowList.read(run / "keys")
    who = allowed.get(pair.public.decode())
    assert who == principal("host-gpu7")
    assert allowed.objection(who, "actor-gpu7-0") == ""
    assert "not learner" in allowed.objection(who, "learner")
    assert "host-gpu7" in allowed.objection(principal("actor"), "actor-gpu7-0")
    assert {pair.public.decode()} < {*allowed.keys_of("actor")}


def test_a_key_file_of_a_ticket_stays_in_its_folder(run, tmp_path):
    ticket = make_ticket(run, host="gpu7").model_copy(update={"keys": {"../broker.secret": "x"}})
    with pytest.raises(ConfigError, match=r"\.\./broker"):
        unpack(ticket, tmp_path / "hosts" / "gpu7")
    assert not (tmp_path / "hosts" / "broker.secret").exists()


def test_the_command_prints_one_line_and_no_secret(run, tmp_path, monkeypatch, capsys):
    from launch.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["ticket", str(run), "--host", "gpu7"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "offbeat host --ticket gpu7.ticket\n"
    hidden = secrets_of(read_ticket("gpu7.ticket", {}))
    assert not any(text in printed.err for text in hidden)
    assert io.StringIO(printed.err).readline()


def with_model(port):
    """Return a ticket whose model comes from a port."""
    one = {"config.json": ModelFile(nbytes=2, sha256="0" * 64)}
    return SimpleNamespace(model=one, weights=f"http://127.0.0.1:{port}")


def test_a_weights_server_that_does_not_answer_is_looked_for_as_a_head_is(tmp_path, monkeypatch):
    """The head may have died since its broker answered, and engines start the host again when it is back."""
    monkeypatch.setattr(model_copy, "TRY_S", 0.0)
    with pytest.raises(NoHead, match="does the weights server run") as caught:
        model_of_ticket(with_model(free_port()), None, tmp_path / "cache", lambda _: None)
    assert exit_code(caught.value) == COME_BACK
    assert not list((tmp_path / "cache").iterdir())


@contextmanager
def weights_server(status):
    """Answer every request with a status and two bytes, and yield the port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "kind", "code", "words"),
    [
        (200, ModelRefused, FINAL, "other bytes than .* so make the ticket anew"),
        (401, ModelRefused, FINAL, "401.* other keys than this ticket, so make the ticket anew"),
        (404, ModelRefused, FINAL, "404.* so make the ticket anew"),
        # It is busy, or the head makes the model just now.
        (503, NoHead, COME_BACK, "503.*does the weights server run"),
        (500, NoHead, COME_BACK, "500"),
    ],
)
def test_a_model_that_the_head_does_not_have_is_asked_for_once_and_a_busy_server_again(
    tmp_path, monkeypatch, status, kind, code, words
):
    monkeypatch.setattr(model_copy, "TRY_S", 0.0)
    with weights_server(status) as port, pytest.raises(kind, match=words) as caught:
        model_of_ticket(with_model(port), None, tmp_path / "cache", lambda _: None)
    assert exit_code(caught.value) == code
    assert not list((tmp_path / "cache").iterdir())


def test_a_signal_ends_the_fetch_of_a_model_and_leaves_nothing(tmp_path):
    ticket = with_model(9)
    with pytest.raises(FetchStopped, match="a signal came"):
        model_of_ticket(ticket, None, tmp_path / "cache", lambda _: None, leaving=lambda: True)
    assert not list((tmp_path / "cache").iterdir())
