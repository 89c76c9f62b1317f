"""Test who may connect, how often, and for whom a connection speaks; time is passed in, without sockets."""

import pytest

from broker.errors import NameInUse, WrongKey
from broker.service import MAX_IDENTITIES, Identities
from protocol.messages.peers import Heartbeat, Hello
from protocol.security import key_files
from protocol.security.client import REVOKED
from protocol.security.guard import MAX_ADDRESSES, RELOAD_S, Admission, Rate, TokenBucket
from protocol.security.keys import principal, public_key

ACTORS = frozenset({"actor"})
ALL = frozenset({"learner", "generator", "actor"})


@pytest.fixture
def keys(tmp_path):
    key_files.make(tmp_path / "keys", ["broker", "learner", "generator", "actor", "actor-gpu7"])
    return tmp_path / "keys"


def public(keys, role, peer=""):
    return public_key(keys, role, peer).decode()


def test_a_bucket_lets_a_burst_through_and_then_its_rate():
    bucket = TokenBucket(Rate(10.0, 5.0), 100.0)
    assert sum(bucket.take(100.0) for _ in range(20)) == 5
    assert sum(bucket.take(100.0 + i / 100) for i in range(1, 101)) == 10
    assert sum(bucket.take(1_000.0) for _ in range(20)) == 5
    # A clock that goes backwards fills nothing.
    assert not bucket.take(0.0)


def test_only_keys_of_the_roles_asked_for_are_admitted(keys):
    admission = Admission(keys, ACTORS, 0.0)
    assert admission.handshake(public(keys, "actor"), "h", 0.0).admitted
    assert not admission.handshake(public(keys, "learner"), "h", 0.0).admitted
    assert not admission.handshake("x" * 40, "h", 0.0).admitted
    assert admission.refused == {"role": 1, "unknown_key": 1}
    assert admission.sender(public(keys, "learner")) is None
    assert admission.sender(public(keys, "actor", "actor-gpu7")) == principal("actor-gpu7")


def test_one_address_cannot_take_the_handshakes_of_others(keys):
    admission = Admission(keys, ALL, 0.0, of_all=Rate(1.0, 100.0), of_one_address=Rate(1.0, 10.0))
    key = public(keys, "actor")
    verdicts = [admission.handshake(key, "bad", 0.0) for _ in range(1_000)]
    assert sum(v.admitted for v in verdicts) == 10
    assert all(v.temporary for v in verdicts if not v.admitted)
    assert admission.handshake(key, "good", 0.0).admitted
    assert admission.refused == {"address_rate": 990}


def test_all_addresses_together_have_a_rate_and_their_list_a_bound(keys):
    admission = Admission(keys, ALL, 0.0, of_all=Rate(1.0, 100.0))
    key = public(keys, "actor")
    admitted = sum(admission.handshake(key, f"h{i}", 0.0).admitted for i in range(2 * MAX_ADDRESSES))
    assert admitted == 100
    assert len(admission._addresses) == MAX_ADDRESSES


def test_the_folder_is_read_again_when_it_has_changed(keys):
    admission = Admission(keys, ALL, 0.0)
    key = public(keys, "actor")
    key_files.revoke(keys, "actor")
    admission.reload(RELOAD_S / 2)
    assert admission.sender(key) is not None
    admission.reload(RELOAD_S)
    assert admission.sender(key) is None
    key_files.make(keys)
    assert admission.handshake(public(keys, "actor"), "h", 3 * RELOAD_S).admitted


def test_a_folder_that_cannot_be_read_changes_nothing(keys, caplog):
    admission = Admission(keys, ALL, 0.0)
    key = public(keys, "actor")
    keys.rename(keys.with_name("elsewhere"))
    admission.reload(1.0)
    assert admission.sender(key) is not None
    assert "stays as it was" in caplog.text


# --- identities ---------------------------------------------------------------------------------------------


ACTOR, LEARNER, OWN = principal("actor"), principal("learner"), principal("actor-gpu7")


def hello(role, peer):
    return Hello(role=role, peer=peer, incarnation=1)


def join(callers, route, who, message, connection=None):
    """Let a connection say a Hello that the state accepts. Return the name of the connection."""
    name = callers.check(route, who, message)
    callers.bind(route, who, name, connection)
    return name


@pytest.fixture
def callers(keys):
    return Identities(Admission(keys, ALL, 0.0))


def test_a_connection_gets_its_name_with_its_hello(callers):
    stranger = callers.check(b"r1", ACTOR, Heartbeat())
    assert stranger.startswith("?")
    assert callers.route(stranger) == b"r1"
    assert callers.check(b"r1", ACTOR, hello("actor", "actor-0")) == "actor-0"
    # A Hello alone binds no name: the state may refuse it.
    assert callers.name(b"r1") == stranger
    assert callers.address("actor-0") is None
    assert join(callers, b"r1", ACTOR, hello("actor", "actor-0")) == "actor-0"
    assert callers.address("actor-0") == stranger
    assert callers.check(b"r1", ACTOR, Heartbeat()) == callers.name(b"r1") == "actor-0"
    assert callers.route("actor-0") == b"r1"
    assert callers.route("actor-1") is None


def test_a_newer_connection_takes_the_name_and_the_older_is_a_stranger(callers):
    join(callers, b"r1", ACTOR, hello("actor", "actor-0"))
    join(callers, b"r2", ACTOR, hello("actor", "actor-0"))
    assert callers.route("actor-0") == b"r2"
    assert callers.name(b"r1").startswith("?")
    join(callers, b"r1", ACTOR, hello("actor", "actor-0"))
    assert callers.route("actor-0") == b"r1"


class Wire:
    """A stand-in for a connection."""

    is_open = True


@pytest.mark.parametrize("end", ["closed", "silent"])
def test_a_name_is_not_given_away_while_its_process_is_connected_and_heard(keys, end):
    heard, wires = {"actor-0"}, {route: Wire() for route in (b"r1", b"r2", b"r3")}
    callers = Identities(Admission(keys, ALL, 0.0), heard.__contains__)

    def again(route):
        return join(callers, route, ACTOR, hello("actor", "actor-0"), wires[route])

    again(b"r1")
    with pytest.raises(NameInUse, match="actor-0"):
        again(b"r2")
    assert callers.route("actor-0") == b"r1"
    assert callers.name(b"r2").startswith("?")
    wires[b"r1"].is_open = False
    wires[b"r1"] = Wire()
    # The same process joins over a new connection.
    again(b"r1")
    with pytest.raises(NameInUse):
        again(b"r2")
    if end == "closed":
        wires[b"r1"].is_open = False
    else:
        heard.clear()
    again(b"r2")
    assert callers.route("actor-0") == b"r2"


def test_a_learner_need_not_wait_for_the_end_of_the_one_before(keys):
    callers = Identities(Admission(keys, ALL, 0.0), lambda peer: True)
    for route in (b"r1", b"r2"):
        join(callers, route, LEARNER, hello("learner", "learner"), Wire())
    assert callers.route("learner") == b"r2"


@pytest.mark.parametrize(
    ("who", "message"),
    [
        (ACTOR, hello("learner", "learner")),
        (ACTOR, hello("actor", "learner")),
        (ACTOR, hello("actor", "generator-0")),
        (ACTOR, hello("actor", "broker")),
        (ACTOR, hello("actor", "actor-gpu7")),
        (ACTOR, hello("actor", "actor-gpu7-1")),
        (OWN, hello("actor", "actor-0")),
        (OWN, hello("actor", "actor-gpu70")),
        (LEARNER, hello("actor", "actor-0")),
        (ACTOR, hello("actor", "?7231")),
        (None, Heartbeat()),
    ],
)
def test_a_key_that_does_not_fit_is_refused_and_binds_nothing(callers, who, message):
    with pytest.raises(WrongKey):
        callers.check(b"r1", who, message)
    assert callers.name(b"r1").startswith("?")


def test_a_connection_keeps_its_name_and_its_key(callers):
    join(callers, b"r1", ACTOR, hello("actor", "actor-0"))
    # The broker's state refuses such a Hello.
    assert callers.check(b"r1", ACTOR, hello("actor", "actor-1")) == "actor-0"
    assert callers.route("actor-1") is None
    with pytest.raises(WrongKey, match="another key"):
        callers.check(b"r1", OWN, Heartbeat())
    with pytest.raises(WrongKey, match="another key"):
        callers.check(b"r1", LEARNER, hello("learner", "learner"))


def test_a_revoked_key_is_told_so(callers):
    join(callers, b"r1", ACTOR, hello("actor", "actor-0"))
    with pytest.raises(WrongKey, match=REVOKED[:20]):
        callers.check(b"r1", None, Heartbeat())


def test_names_without_a_role_in_them_are_free_to_a_key_of_a_role(callers):
    assert join(callers, b"r1", ACTOR, hello("actor", "worker")) == "worker"
    with pytest.raises(WrongKey, match="role actor"):
        callers.check(b"r2", LEARNER, hello("learner", "worker"))


def test_the_table_is_bounded_and_forgets_the_quietest(callers):
    for i in range(MAX_IDENTITIES + 10):
        join(callers, i.to_bytes(4, "big"), ACTOR, hello("actor", f"a{i}"))
        join(callers, (0).to_bytes(4, "big"), ACTOR, hello("actor", "a0"))
    assert callers.route("a0") == (0).to_bytes(4, "big")
    assert callers.route("a1") is None
    assert len(callers._by_route) == len(callers._routes) == MAX_IDENTITIES
