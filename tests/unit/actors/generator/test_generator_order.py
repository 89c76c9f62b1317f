"""An actor spreads its requests over generators that are equally busy."""

import asyncio
from collections import Counter

import pytest

from actors.generator_client import GeneratorPool, connection_order
from protocol.messages.peers import GeneratorInfo, Goodbye, Hello, Welcome
from tests.broker_driver import Driver


class Connection:
    """A stand-in for the connection to a generator."""

    def __init__(self, info):
        self.info, self.streams, self.suspect_until = info, {}, 0.0
        self.leaving = self.draining = False
        self.lets_in = self.serves = True
        self.settles = False


def places(actors):
    """Return the places that a broker gives to actors."""
    driver = Driver()
    return [driver.hello("actor", f"actor-{i}")[0].place for i in range(actors)]


def load(monkeypatch, generators, actors, episodes):
    """Have each actor choose a generator for each of its episodes. Return the requests of each generator."""
    monkeypatch.setattr(GeneratorPool, "_connect", lambda self, info: Connection(info))
    infos = [GeneratorInfo(peer=f"generator-{i}", endpoint="tcp://10.0.0.1:1") for i in range(generators)]
    load = Counter({info.peer: 0 for info in infos})

    async def run():
        for place in places(actors):
            pool = GeneratorPool("actor", 60.0)
            pool.placed(place)
            pool.update(infos)
            for episode in range(episodes):
                chosen = await pool._choose_generator("", after_failure=False)
                chosen.streams[episode] = None
                load[chosen.info.peer] += 1

    asyncio.run(run())
    return load


def test_of_64_generators_none_is_idle_beside_16_actors_of_8_episodes(monkeypatch):
    requests = load(monkeypatch, generators=64, actors=16, episodes=8)
    assert min(requests.values()) >= 1
    assert max(requests.values()) <= 4


@pytest.mark.parametrize(
    ("generators", "actors", "episodes"),
    [(2, 1, 4), (8, 16, 4), (8, 1, 16), (100, 8, 25), (256, 256, 2), (61, 12, 11)],
)
def test_no_generator_is_idle_with_twice_as_many_requests(monkeypatch, generators, actors, episodes):
    assert actors * episodes >= 2 * generators
    assert min(load(monkeypatch, generators, actors, episodes).values()) >= 1


def test_all_actors_agree_on_the_circle():
    ranks = [connection_order(names, place=5) for names in (["b", "a", "c"], ["c", "b", "a"])]
    assert ranks[0] == ranks[1]
    assert connection_order([], place=3) == {}


def test_an_actor_keeps_its_place_and_one_that_leaves_makes_room():
    driver = Driver()
    assert [driver.hello("actor", name)[0].place for name in "abc"] == [0, 1, 2]
    assert driver.hello("actor", "b")[0].place == 1
    driver.say("b", Goodbye())
    (welcome, *_) = driver.say("d", Hello(role="actor", peer="d", incarnation=1))
    assert isinstance(welcome, Welcome)
    assert welcome.place == 1
    assert driver.hello("actor", "e")[0].place == 3
