"""Test keys on disk: made once by whoever comes first, replaced, revoked, handed out. No sockets."""

import stat
import threading

import pytest
import zmq

from protocol.errors import KeysUnusable
from protocol.security import key_files
from protocol.security.http import (
    CERTIFICATE_FILE,
    PRIVATE_FILE,
    TOKEN_FILE,
    client_context,
    read_tokens,
    server_context,
)
from protocol.security.key_files import HTTP_FILES
from protocol.security.keys import ROLES, AllowList, key_pair, principal, public_key, signature


@pytest.fixture
def keys(tmp_path):
    key_files.make(tmp_path / "keys")
    return tmp_path / "keys"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_folder_holds_a_pair_a_role_and_a_token_that_only_we_can_read(keys):
    assert names(keys) == {f"{role}.{half}" for role in ROLES for half in ("pub", "secret")} | {*HTTP_FILES}
    assert mode(keys) == 0o700
    assert {mode(path) for path in keys.iterdir() if path.suffix not in (".pub", ".crt")} == {0o600}
    for role in ROLES:
        pair = key_pair(keys, role)
        assert pair.public == zmq.curve_public(pair.secret) == public_key(keys, role)
    assert len(AllowList.read(keys)) == 4


def test_making_again_changes_nothing(keys):
    before = {path.name: path.read_bytes() for path in keys.iterdir()}
    assert key_files.make(keys) == []
    assert {path.name: path.read_bytes() for path in keys.iterdir()} == before


def test_processes_that_make_at_once_get_the_same(tmp_path):
    folder, seen = tmp_path / "runs" / "r" / "keys", []
    gate = threading.Barrier(8)

    def start():
        gate.wait()
        key_files.make(folder)
        pairs = [key_pair(folder, role) for role in ROLES]
        seen.append([*pairs, read_tokens(folder)[0], *((folder / file).read_bytes() for file in HTTP_FILES)])

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(seen) == 8
    assert all(each == seen[0] for each in seen)
    assert not [name for name in names(folder) if name.startswith(".")]


def test_a_public_half_that_is_missing_is_written_again(keys):
    before = (keys / "actor.pub").read_bytes()
    (keys / "actor.pub").unlink()
    key_files.make(keys)
    assert (keys / "actor.pub").read_bytes() == before


@pytest.mark.parametrize("bits", [0o644, 0o604, 0o620])
def test_a_secret_that_others_can_reach_is_refused(keys, bits):
    (keys / "actor.secret").chmod(bits)
    with pytest.raises(KeysUnusable, match="chmod 600"):
        key_pair(keys, "actor")


def test_halves_of_two_pairs_are_refused(keys):
    (keys / "actor.pub").write_bytes((keys / "learner.pub").read_bytes())
    with pytest.raises(KeysUnusable, match="not of one pair"):
        key_pair(keys, "actor")


@pytest.mark.parametrize("content", ["", "x" * 39, "x" * 41, "ü" * 40, "x" * 20 + "\n" + "x" * 20])
def test_what_is_no_key_is_refused_with_its_file(keys, content):
    (keys / "broker.pub").write_text(content)
    with pytest.raises(KeysUnusable, match=r"broker\.pub: not a key"):
        public_key(keys, "broker")


def test_a_missing_key_names_the_cure(tmp_path):
    with pytest.raises(KeysUnusable, match="offbeat keys make"):
        key_pair(tmp_path, "actor")


@pytest.mark.parametrize(
    "name", ["", "boss", "actor-", "actor/../x", "actor-a/b", "actor- x", "actor@1", "Actor"]
)
def test_names_that_are_none_are_refused(tmp_path, name):
    with pytest.raises(KeysUnusable, match="no name of a key"):
        principal(name)
    with pytest.raises(KeysUnusable):
        key_files.make(tmp_path / "keys", [name])


def test_a_peer_uses_the_key_of_its_own_name_before_that_of_its_role(keys):
    key_files.make(keys, ["actor-gpu7", "actor-gpu7-b", "generator-gpu7"])
    own = {
        name: key_pair(keys, "actor", name).public
        for name in ("actor-0", "actor-gpu7", "actor-gpu7-0", "actor-gpu7-b-0")
    }
    public = {name: public_key(keys, "actor", name) for name in own}
    assert own == public
    assert own["actor-gpu7"] == own["actor-gpu7-0"] != own["actor-gpu7-b-0"] != own["actor-0"]
    assert own["actor-0"] == public_key(keys, "actor")
    assert public_key(keys, "generator", "generator-gpu70") == public_key(keys, "generator")


def test_the_list_leaves_out_what_is_no_key(keys, caplog):
    (keys / "intruder.pub").write_bytes((keys / "actor.pub").read_bytes())
    (keys / "actor-x.pub").write_text("junk")
    allowed = AllowList.read(keys)
    assert len(allowed) == 4
    assert allowed.get(public_key(keys, "actor").decode()) == principal("actor")
    assert "intruder" in caplog.text
    assert "actor-x.pub" in caplog.text


def test_rotation_keeps_or_ends_the_key_before(keys):
    first = public_key(keys, "actor").decode()
    key_files.rotate(keys, "actor", keep_earlier=True)
    second = public_key(keys, "actor").decode()
    key_files.rotate(keys, "actor", keep_earlier=True)
    allowed = AllowList.read(keys)
    assert allowed.get(first) == allowed.get(second) == principal("actor")
    assert {"actor@1.pub", "actor@2.pub"} <= names(keys)
    key_files.revoke(keys, "actor@1")
    assert AllowList.read(keys).get(first) is None
    key_files.rotate(keys, "actor")
    assert AllowList.read(keys).get(second) is None
    assert "actor@2.pub" not in names(keys)
    assert key_pair(keys, "actor").public == public_key(keys, "actor")


def test_the_token_is_rotated_too(keys):
    (first,) = read_tokens(keys)
    key_files.rotate(keys, "http", keep_earlier=True)
    second, kept = read_tokens(keys)
    assert (kept, second != first) == (first, True)
    key_files.rotate(keys, "http")
    assert len(read_tokens(keys)) == 1
    assert mode(keys / TOKEN_FILE) == 0o600


def test_the_certificate_is_rotated_with_its_key(keys):
    before = [(keys / file).read_bytes() for file in HTTP_FILES]
    key_files.rotate(keys, "tls")
    after = [(keys / file).read_bytes() for file in HTTP_FILES]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False]
    assert (mode(keys / PRIVATE_FILE), mode(keys / CERTIFICATE_FILE)) == (0o600, 0o644)
    server_context(keys), client_context(keys)
    with pytest.raises(KeysUnusable, match="without --keep-old"):
        key_files.rotate(keys, "tls", keep_earlier=True)


def test_a_key_without_its_certificate_is_no_use(keys, tmp_path):
    key_files.make(tmp_path / "other")
    (keys / CERTIFICATE_FILE).write_bytes((tmp_path / "other" / CERTIFICATE_FILE).read_bytes())
    with pytest.raises(KeysUnusable, match=r"not of one pair.*keys rotate .* tls"):
        server_context(keys)
    (keys / PRIVATE_FILE).chmod(0o644)
    with pytest.raises(KeysUnusable, match="chmod 600"):
        server_context(keys)
    for file, ask in ((PRIVATE_FILE, server_context), (CERTIFICATE_FILE, client_context)):
        (keys / file).unlink()
        with pytest.raises(KeysUnusable, match=f"{file}: cannot be read.*keys make"):
            ask(keys)
    (keys / CERTIFICATE_FILE).write_text("nonsense")
    with pytest.raises(KeysUnusable, match="is no certificate"):
        client_context(keys)


def test_a_certificate_that_others_can_change_is_not_trusted(keys):
    client_context(keys)
    (keys / CERTIFICATE_FILE).chmod(0o664)
    with pytest.raises(KeysUnusable, match="chmod go-w"):
        client_context(keys)


def test_what_is_no_private_key_is_named(keys):
    (keys / CERTIFICATE_FILE).unlink()
    (keys / PRIVATE_FILE).write_text("nonsense")
    with pytest.raises(KeysUnusable, match="keys rotate FOLDER tls"):
        key_files.make(keys)


def test_a_bundle_without_the_certificate_is_refused(keys, tmp_path):
    (keys / CERTIFICATE_FILE).unlink()
    with pytest.raises(KeysUnusable, match=f"lacks {CERTIFICATE_FILE}; do `offbeat keys make"):
        key_files.bundle(keys, "generator", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_revoking_ends_all_keys_of_a_name_and_no_other(keys):
    key_files.make(keys, ["actor-gpu7"])
    key_files.rotate(keys, "actor", keep_earlier=True)
    assert key_files.revoke(keys, "actor") == ["actor.pub", "actor.secret", "actor@1.pub"]
    assert "actor-gpu7.pub" in names(keys)
    with pytest.raises(KeysUnusable, match="keys show"):
        key_files.revoke(keys, "actor")


def test_a_revoked_key_does_not_come_back_when_keys_are_made(keys):
    before = public_key(keys, "actor")
    key_files.revoke(keys, "actor")
    key_files.make(keys)
    assert public_key(keys, "actor") != before


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("actor", {"actor.pub", "actor.secret", "broker.pub"}),
        ("actor-gpu7", {"actor-gpu7.pub", "actor-gpu7.secret", "broker.pub"}),
        ("learner", {"learner.pub", "learner.secret", "broker.pub", *HTTP_FILES}),
        (
            "generator",
            {"generator.pub", "generator.secret", "broker.pub", *HTTP_FILES},
        ),
        (
            "broker",
            {
                "broker.pub",
                "broker.secret",
                "learner.pub",
                "generator.pub",
                "actor.pub",
                "actor-gpu7.pub",
                *HTTP_FILES,
            },
        ),
    ],
)
def test_a_bundle_is_what_a_host_needs_and_nothing_more(keys, tmp_path, name, files):
    key_files.make(keys, ["actor-gpu7"])
    out = tmp_path / "out"
    assert set(key_files.bundle(keys, name, out)) == files == names(out)
    assert mode(out) == 0o700
    assert {mode(path) for path in out.iterdir() if path.suffix not in (".pub", ".crt")} == {0o600}
    role = principal(name).role
    assert key_pair(out, role, name) == key_pair(keys, role, name)
    with pytest.raises(KeysUnusable, match="not empty"):
        key_files.bundle(keys, name, out)


def test_a_bundle_of_a_key_that_is_not_there_is_refused(keys, tmp_path):
    with pytest.raises(KeysUnusable, match="keys make"):
        key_files.bundle(keys, "actor-gpu9", tmp_path / "out")


def test_the_signature_changes_with_each_change(keys):
    seen = [signature(keys)]
    key_files.make(keys, ["actor-gpu7"])
    seen.append(signature(keys))
    key_files.rotate(keys, "actor-gpu7")
    seen.append(signature(keys))
    key_files.revoke(keys, "actor-gpu7")
    seen.append(signature(keys))
    assert len(set(seen[:3])) == 3
    assert seen[3] == seen[0]


def test_the_listing_shows_no_secret(keys):
    (keys / "actor.secret").unlink()
    listed = {key.name: key for key in key_files.listing(keys)}
    assert (listed["actor"].secret, listed["broker"].secret) == (False, True)
    secret = key_pair(keys, "broker").secret.decode()
    assert not any(secret[:8] in str(key) for key in listed.values())


def test_a_folder_to_which_others_can_write_admits_nobody(keys):
    keys.chmod(0o770)
    with pytest.raises(KeysUnusable, match="mode 770 lets others add a key"):
        AllowList.read(keys)


def test_a_public_key_that_others_can_change_is_left_out(keys, caplog):
    (keys / "actor.pub").chmod(0o664)
    assert len(AllowList.read(keys)) == 3
    assert "actor.pub: mode 664 lets others change it" in caplog.text
