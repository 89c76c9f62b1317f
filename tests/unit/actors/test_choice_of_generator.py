"""Which generator gets the next turn: one that is within the lag bound, if there is one."""

import asyncio
from types import SimpleNamespace

from actors.generator_client import GeneratorPool
from protocol.messages.peers import GeneratorInfo


def connection(name, *, behind=False, draining=False, suspect_until=0.0, streams=0):
    return SimpleNamespace(
        info=GeneratorInfo(peer=name, endpoint=f"tcp://{name}", behind=behind),
        lets_in=True,
        draining=draining,
        suspect_until=suspect_until,
        streams=dict.fromkeys(range(streams)),
    )


def chosen(*connections, preferred=""):
    async def main():
        pool = GeneratorPool("a", 30.0, clock=lambda: 100.0)
        pool._generators = {one.info.peer: one for one in connections}
        return (await pool._choose_generator(preferred, after_failure=False)).info.peer

    return asyncio.run(main())


def test_a_generator_beyond_the_bound_gets_no_new_turn_while_another_is_within_it():
    slow = connection("slow", behind=True)
    assert chosen(slow, connection("quick", streams=50)) == "quick"
    # Not even the next turn of an episode whose tokens it has in its cache.
    assert chosen(slow, connection("quick", streams=50), preferred="slow") == "quick"


def test_it_gets_one_where_no_other_can_go_on():
    slow = connection("slow", behind=True)
    assert chosen(slow) == "slow"
    assert chosen(slow, connection("quick", draining=True)) == "slow"
    assert chosen(slow, connection("quick", suspect_until=105.0)) == "slow"
