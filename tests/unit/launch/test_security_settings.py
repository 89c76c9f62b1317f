"""Test `[security]` and `offbeat keys`: keys are made where they fit the broker, and asked for elsewhere."""

import pytest

from launch import cli
from launch.errors import ConfigError
from launch.run_file.load import check
from launch.run_folder import http_keys, keys_folder, prepare_keys
from protocol.errors import AddressRefused, KeysUnusable
from protocol.security.addresses import check_endpoint, split_address
from protocol.security.keys import key_pair, public_key

REST = {"model": {"path": "m"}, "env": {"name": "calculator"}}


def config(endpoint="tcp://127.0.0.1:5755", **security):
    return check(REST | {"broker": {"endpoint": endpoint}, "security": security}, "doc")


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5755", "tcp://localhost:5755", "ipc:///tmp/b"])
@pytest.mark.parametrize("role", ["broker", "learner", "generator", "actor"])
def test_on_one_machine_whoever_starts_first_makes_the_keys(tmp_path, endpoint, role):
    folder = prepare_keys(config(endpoint), tmp_path / "r", role)
    assert folder == tmp_path / "r" / "keys"
    assert public_key(folder, "broker") == key_pair(folder, "broker").public


def test_on_another_host_nothing_is_made_and_the_cure_is_told(tmp_path):
    with pytest.raises(ConfigError, match="offbeat keys bundle FOLDER actor OUT"):
        prepare_keys(config("tcp://10.0.0.5:5755"), tmp_path / "r", "actor")
    assert not (tmp_path / "r").exists()
    made = prepare_keys(config("tcp://10.0.0.5:5755"), tmp_path / "r", "broker")
    assert prepare_keys(config("tcp://10.0.0.5:5755"), tmp_path / "r", "actor") == made


def test_a_folder_that_is_named_is_never_made(tmp_path):
    named = config(keys=str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="keys folder"):
        prepare_keys(named, tmp_path / "r", "broker")
    assert cli.main(["keys", "make", str(tmp_path / "keys")]) == 0
    assert prepare_keys(named, tmp_path / "r", "broker") == tmp_path / "keys"


def test_without_encryption_there_are_no_keys(tmp_path):
    assert keys_folder(config(encrypt=False), tmp_path) is None
    assert prepare_keys(config(encrypt=False), tmp_path / "r") is None
    assert not (tmp_path / "r").exists()


def test_addresses_of_other_hosts_need_keys(tmp_path):
    for endpoint in (
        "tcp://0.0.0.0:5755",
        "tcp://*:5755",
        "tcp://10.0.0.5:5755",
        "tcp://[::]:5755",
        "tcp://eth0:5755",
    ):
        check_endpoint("broker.endpoint", endpoint, tmp_path)
        with pytest.raises(AddressRefused, match="offbeat keys make"):
            check_endpoint("broker.endpoint", endpoint)
        assert config(endpoint)
        with pytest.raises(ConfigError, match="offbeat keys make"):
            config(endpoint, encrypt=False)
    assert split_address("broker.http", "0.0.0.0:5756", tmp_path) == ("0.0.0.0", 5756)
    with pytest.raises(AddressRefused, match="offbeat keys make"):
        split_address("broker.http", "0.0.0.0:5756", None)


@pytest.mark.parametrize(
    "endpoint", ["udp://127.0.0.1:1", "tcp://127.0.0.1", "127.0.0.1:5755", "tcp://h:p", ""]
)
def test_what_is_no_endpoint_is_refused_with_keys_too(tmp_path, endpoint):
    with pytest.raises(AddressRefused, match="tcp://HOST:PORT"):
        check_endpoint("broker.endpoint", endpoint, tmp_path)


def test_a_key_of_a_name_says_whom_it_is_for(tmp_path):
    keys, out = tmp_path / "keys", tmp_path / "out"
    assert cli.main(["keys", "make", str(keys)]) == 0
    assert cli.main(["keys", "make", str(keys), "actor-gpu7"]) == 0
    assert cli.main(["keys", "bundle", str(keys), "actor-gpu7", str(out)]) == 0
    with pytest.raises(KeysUnusable, match="--name actor-gpu7-0"):
        key_pair(out, "actor", "actor-0")


def test_the_command_shows_rotates_revokes_and_hides_secrets(tmp_path, capsys):
    keys = tmp_path / "keys"
    assert cli.main(["keys", "make", str(keys)]) == 0
    assert cli.main(["keys", "rotate", str(keys), "actor", "--keep-old"]) == 0
    assert "revoke" in capsys.readouterr().out
    assert cli.main(["keys", "show", str(keys)]) == 0
    shown = capsys.readouterr().out
    assert "actor@1" in shown
    assert not any((keys / f"{role}.secret").read_text().strip() in shown for role in ("broker", "actor"))
    assert cli.main(["keys", "revoke", str(keys), "actor@1"]) == 0
    said = capsys.readouterr().out
    assert "nothing is to do on other hosts" in said
    assert "do the same" not in said
    assert not (keys / "actor@1.pub").exists()
    capsys.readouterr()
    assert cli.main(["keys", "header", str(keys)]) == 0
    assert capsys.readouterr().out == f"Authorization: Bearer {(keys / 'http.token').read_text()}"
    assert cli.main(["keys", "revoke", str(keys), "nobody"]) == 1
    assert "no name of a key" in capsys.readouterr().err
    assert cli.main(["keys", "show", str(tmp_path / "nowhere")]) == 1
    assert "offbeat keys make" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "token", "asks"),
    [
        ("127.0.0.1:5756", "always", True),
        ("127.0.0.1:5756", "beyond_loopback", False),
        ("0.0.0.0:5756", "beyond_loopback", True),
    ],
)
def test_what_asks_for_the_token_speaks_tls_and_nothing_else_does(tmp_path, address, token, asks):
    settings = REST | {"broker": {"http": address}, "security": {"http_token": token}}
    assert http_keys(check(settings, "doc"), tmp_path) == (tmp_path if asks else None)
    assert http_keys(check(settings, "doc"), None) is None


def test_the_command_says_who_needs_a_new_certificate(tmp_path, capsys):
    keys = tmp_path / "keys"
    assert cli.main(["keys", "make", str(keys)]) == 0
    before = (keys / "http.crt").read_bytes()
    assert cli.main(["keys", "rotate", str(keys), "tls"]) == 0
    assert (keys / "http.crt").read_bytes() != before
    said = capsys.readouterr().out
    assert "show it within a second" in said
    assert "PRIVATE" not in said
