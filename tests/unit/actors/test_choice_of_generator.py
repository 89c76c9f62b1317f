"""Which generator gets the next turn: one that is within the lag bound, if there is one."""

import asyncio
from types import SimpleNamespace

from actors.generator_client import GeneratorPool
from protocol.messages.peers import GeneratorInfo


def connection(name, *, behind=False, draining=False, suspect_until=0.0, streams=0, evaluates=False):
    return SimpleNamespace(
        info=GeneratorInfo(peer=name, endpoint=f"tcp://{name}", behind=behind, evaluates=evaluates),
        lets_in=True,
        leaving=False,
        serves=True,
        settles=False,
        draining=draining,
        suspect_until=suspect_until,
        streams=dict.fromkeys(range(streams)),
    )


def chosen(*connections, preferred="", evaluates=False):
    async def main():
        pool = GeneratorPool("a", 30.0, clock=lambda: 100.0)
        pool._generators = {one.info.peer: one for one in connections}
        return (await pool._choose_generator(preferred, after_failure=False, evaluates=evaluates)).info.peer

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


def test_a_generator_that_only_evaluates_gets_all_turns_of_evaluations_and_no_others():
    judge, worker = connection("judge", evaluates=True, streams=50), connection("worker")
    assert chosen(judge, worker) == "worker"
    assert chosen(judge, worker, preferred="judge") == "worker"
    assert chosen(judge, worker, evaluates=True) == "judge"
    # Without one, training's generators answer, and the learner looks which version it was.
    assert chosen(worker, evaluates=True) == "worker"


def test_an_actor_takes_no_tasks_while_only_an_evaluator_serves_it():
    pool = GeneratorPool("a", 30.0, clock=lambda: 100.0)
    pool._generators = {"judge": connection("judge", evaluates=True)}

    async def note():
        pool._note_change()

    asyncio.run(note())
    assert not pool.serves
    pool._generators["worker"] = connection("worker")
    asyncio.run(note())
    assert pool.serves
