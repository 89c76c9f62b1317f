"""Test keys between real processes and sockets: who is admitted, who is not, and which errors those get."""

import asyncio
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
import zmq

from actors.config import GeneratorConfig
from actors.generator.serving import Listener
from launch.processes import free_port
from protocol.codec import encode
from protocol.errors import LinkDown
from protocol.messages.episodes import PutTasks, TaskCredit
from protocol.messages.peers import Goodbye, Heartbeat, Hello, Refused, Welcome
from protocol.security import key_files
from protocol.security.client import ClientKeys
from protocol.security.guard import Guard
from protocol.security.http import client_context
from protocol.security.keys import key_pair
from protocol.sockets import AsyncLink, ThreadLink, dealer
from tests.hearing import heard
from tests.integration.protocol.encrypted_harness import Broker, Peer, until


@pytest.fixture
def keys(tmp_path):
    key_files.make(tmp_path / "keys", [*("broker", "learner", "generator", "actor"), "actor-gpu7"])
    return tmp_path / "keys"


@pytest.fixture
def broker(tmp_path):
    started = []

    def start(keys, **settings):
        started.append(Broker(keys, tmp_path / "broker.log", **settings))
        return started[-1]

    yield start
    for running in started:
        running.stop()
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()


@pytest.fixture
def peer():
    context, peers = zmq.Context(), []

    def start(*arguments, **more):
        peers.append(Peer(context, *arguments, **more))
        return peers[-1]

    yield start
    for each in peers:
        each.socket.close(linger=0)
    context.term()


def test_every_role_is_let_in_with_its_own_key(broker, peer, keys):
    broker = broker(keys)
    for role in ("learner", "generator", "actor"):
        assert peer(broker, keys, role, f"{role}-0").join().run == "run"
    assert peer(broker, keys, "actor", "actor-gpu7-1").join().run == "run"
    assert broker.peers() == {"learner-0", "generator-0", "actor-0", "actor-gpu7-1"}
    assert broker.status()["security"] == {"encrypted": True, "keys_admitted": 5, "handshakes_refused": {}}


def test_a_role_with_the_key_of_another_is_refused_for_good_and_counted(broker, peer, keys):
    broker = broker(keys)
    thief = peer(broker, keys, "learner", "learner", key="actor")
    thief.say(thief.hello)
    refused = thief.hear(Refused)
    assert (refused.code, refused.fatal) == ("wrong_key", True)
    assert "Hello of a learner with the key actor" in refused.message
    thief.say(PutTasks(tasks=[]))
    assert thief.hear(Refused).code == "unknown_peer"
    assert broker.refused()["wrong_key"] == 1
    assert broker.peers() == set()


@pytest.mark.parametrize(
    ("key", "name", "why"),
    [
        ("actor", "learner", "belongs to the role learner"),
        ("actor", "actor-gpu7-0", "belongs to the key actor-gpu7"),
        ("actor-gpu7", "actor-0", "for peers called actor-gpu7"),
    ],
)
def test_a_name_is_given_only_to_keys_that_may_have_it(broker, keys, tmp_path, key, name, why):
    broker = broker(keys)
    own = tmp_path / "own"
    key_files.bundle(keys, key, own)
    context = zmq.Context()
    pair = key_pair(own, "actor", key)
    plain = dealer(context, name, ClientKeys(pair, (own / "broker.pub").read_bytes().strip(), "broker", own))
    try:
        plain.connect(broker.endpoint)
        plain.send_multipart(encode(Hello(role="actor", peer=name, incarnation=1)))
        assert plain.poll(10_000)
        ((refused,), _) = heard(plain.recv_multipart())
        assert (refused.code, refused.fatal) == ("wrong_key", True)
        assert why in refused.message
    finally:
        plain.close(linger=0)
        context.term()


def test_a_connection_that_calls_itself_like_a_peer_gets_nothing_of_it(broker, peer, keys):
    broker = broker(keys)
    boss = peer(broker, keys, "learner", "learner")
    boss.join()
    thief = peer(broker, keys, "actor", "actor-0", route=b"learner")
    thief.join()
    boss.say(Heartbeat())
    boss.hear(Heartbeat)
    thief.say(Heartbeat())
    thief.hear(Heartbeat)
    assert broker.peers() == {"learner", "actor-0"}


def test_a_name_passes_to_another_process_of_its_key_when_the_connection_before_is_closed(broker, peer, keys):
    # Its silence would free a name after three heartbeats, a minute.
    broker = broker(keys, heartbeat_s=20.0)
    old = peer(broker, keys, "actor", "actor-0")
    old.join()
    new = peer(broker, keys, "actor", "actor-0")
    new.say(new.hello)
    refused = new.hear(Refused)
    assert (refused.code, refused.fatal) == ("name_in_use", False)
    old.say(Heartbeat())
    old.hear(Heartbeat)
    old.socket.close(linger=0)
    began = time.monotonic()
    until(lambda: new.say(new.hello) or new.hear((Welcome, Refused)).__class__ is Welcome, "the name is free")
    assert time.monotonic() - began < 40.0, "it was freed by silence, not by the end of the connection"


def test_a_learner_takes_the_name_of_a_zombie_over_at_once(broker, peer, keys):
    broker = broker(keys)
    zombie, learner = (peer(broker, keys, "learner", "learner") for _ in range(2))
    zombie.join()
    learner.hello = Hello(role="learner", peer="learner", incarnation=2, epoch=2)
    learner.join()
    zombie.say(Heartbeat())
    assert zombie.hear(Refused).code == "unknown_peer"


def test_a_revoked_key_is_refused_on_the_connection_it_has_which_is_cut_and_a_listed_one_let_in(
    broker, peer, keys
):
    broker = broker(keys)
    worker = peer(broker, keys, "actor", "actor-0")
    worker.join()
    key_files.revoke(keys, "actor")
    time.sleep(0.7)
    worker.say(TaskCredit(tasks=1))
    refused = worker.hear(Refused)
    assert (refused.code, refused.fatal) == ("wrong_key", True)
    watch = worker.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    assert watch.poll(5_000), "the connection is cut"
    worker.socket.disable_monitor()
    watch.close()
    key_files.make(keys)
    until(lambda: broker.status()["security"]["keys_admitted"] == 5, "the list is read again")
    assert peer(broker, keys, "actor", "actor-1").join().run == "run"


def test_an_earlier_key_is_let_in_until_it_is_revoked(broker, peer, keys, tmp_path):
    broker = broker(keys)
    elsewhere = tmp_path / "elsewhere"
    key_files.bundle(keys, "actor", elsewhere)
    key_files.rotate(keys, "actor", keep_earlier=True)
    time.sleep(0.7)
    assert peer(broker, elsewhere, "actor", "actor-0").join()
    assert peer(broker, keys, "actor", "actor-1").join()
    key_files.revoke(keys, "actor@1")
    time.sleep(0.7)
    stranger = peer(broker, elsewhere, "actor", "actor-2")
    stranger.say(stranger.hello)
    assert stranger.hears_nothing()
    until(lambda: broker.status()["security"]["handshakes_refused"].get("unknown_key"), "it is counted")


@contextmanager
def joining(endpoint, keys, role="actor"):
    """Yield the error text of a link that waits for its Welcome in vain."""
    found = []

    async def main():
        link = AsyncLink(
            endpoint, Hello(role=role, peer=f"{role}-0", incarnation=1), lambda *_: None, keys=keys
        )
        try:
            with pytest.raises(LinkDown) as raised:
                await link.joined(2.5)
            found.append(str(raised.value))
        finally:
            await link.close()

    asyncio.run(main())
    yield found[0]


def test_a_stranger_is_told_what_to_do(broker, keys, tmp_path):
    broker = broker(keys)
    strange = tmp_path / "strange"
    key_files.make(strange)
    (strange / "broker.pub").write_bytes((keys / "broker.pub").read_bytes())
    (strange / "broker.secret").unlink()
    with joining(broker.endpoint, strange) as text:
        assert "refused our key" in text
        assert "offbeat keys bundle" in text


def test_a_second_process_of_a_name_is_told_so(broker, peer, keys):
    broker = broker(keys)
    first = peer(broker, keys, "generator", "generator-0")
    first.join()
    with joining(broker.endpoint, keys, role="generator") as text:
        assert "a process called generator-0 is connected" in text


def test_a_wrong_server_key_is_named(broker, keys, tmp_path):
    broker = broker(keys)
    other = tmp_path / "other"
    key_files.make(other)
    with joining(broker.endpoint, other) as text:
        assert "broker.pub" in text
        assert "copy" in text


def test_without_keys_at_a_broker_that_asks_for_them(broker, keys):
    broker = broker(keys)
    with joining(broker.endpoint, None) as text:
        assert "asks for keys" in text
        assert "security.encrypt" in text


def test_with_keys_at_a_broker_that_does_not_encrypt(broker, keys):
    broker = broker(None)
    with joining(broker.endpoint, keys) as text:
        assert "security.encrypt" in text


def test_a_link_comes_in_by_itself_once_its_key_is_listed(broker, keys, tmp_path):
    broker = broker(keys)
    new = tmp_path / "new"
    key_files.make(new, ["actor"])
    (new / "broker.pub").write_bytes((keys / "broker.pub").read_bytes())
    link = ThreadLink(broker.endpoint, Hello(role="actor", peer="actor-0", incarnation=1), keys=new)
    try:
        until(lambda: "refused our key" in link.trouble, "the refusal is told")
        (keys / "actor@1.pub").write_bytes((new / "actor.pub").read_bytes())
        until(lambda: link.session.joined, "the link comes in")
    finally:
        link.close()


def test_links_survive_a_broker_that_starts_again(broker, keys):
    first = broker(keys)
    link = ThreadLink(
        first.endpoint, Hello(role="learner", peer="learner", incarnation=1, epoch=1), keys=keys
    )
    try:
        until(lambda: link.session.joined, "the link joins")
        first.process.kill()
        first.process.wait()
        broker(keys, endpoint=first.endpoint)
        until(lambda: link.session.joins == 2, "the link joins again")
    finally:
        link.close()


def test_status_asks_for_the_token(broker, keys):
    broker = broker(keys)
    for path in ("/status", "/metrics", "/nothing"):
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"https://{broker.http}{path}", timeout=60.0, context=client_context(keys))
        assert raised.value.code == 401
        raised.value.close()
    assert broker.status()["run"] == "run"


def test_other_hosts_can_be_listened_to_with_keys(broker, peer, keys):
    port = free_port()
    broker = broker(keys, endpoint=f"tcp://0.0.0.0:{port}")
    broker.endpoint = f"tcp://127.0.0.1:{port}"
    assert peer(broker, keys, "actor", "actor-0").join().run == "run"


def test_a_client_that_no_handler_vouches_for_is_not_let_in(keys):
    """ZeroMQ would admit everybody while no ZAP handler answers; our sockets do not."""

    async def main():
        context = zmq.Context()
        guard = Guard(context, keys, "broker")
        server = guard.router(context)
        server.bind("tcp://127.0.0.1:*")
        guard.close()
        client = dealer(context, "actor-0", ClientKeys.read(keys, "actor", "actor-0", "broker"))
        client.connect(server.getsockopt_string(zmq.LAST_ENDPOINT))
        client.send_multipart(encode(Goodbye()))
        arrived = server.poll(1_000)
        client.close(linger=0)
        server.close(linger=0)
        context.term()
        return arrived

    assert asyncio.run(main()) == 0


def test_a_pair_of_another_role_opens_nothing_at_a_generator(keys):
    seen, arrived = [], asyncio.Event()

    def received(frames):
        seen.append(frames[1:])
        arrived.set()

    async def main():
        listener = Listener(GeneratorConfig(), "generator-0", keys, received)
        context = zmq.Context()
        sockets = []
        for role in ("learner", "actor"):
            own = ClientKeys.read(keys, role, f"{role}-0", "generator", "generator-0")
            sockets.append(dealer(context, role, own))
            sockets[-1].connect(listener.endpoint)
            sockets[-1].send_multipart([role.encode()])
        await asyncio.wait_for(arrived.wait(), 120.0)
        await asyncio.sleep(0.3)
        for each in sockets:
            each.close(linger=0)
        listener.close()
        context.term()

    asyncio.run(main())
    assert seen == [[b"actor"]]
