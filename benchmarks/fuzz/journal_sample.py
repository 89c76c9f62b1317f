"""The journal of a small run, as a broker writes it: what `benchmarks.fuzz.journal` damages."""

from pathlib import Path

from benchmarks.fuzz.messages import arrays, evaluation, group, segment
from broker.config import BrokerConfig, JournalConfig
from broker.core.dispatch import Dispatcher
from broker.journal.files import numbers
from broker.journal.journal import Journal
from broker.journal.records import DeadLetter, Kind, file_name, pack_dead_letter
from broker.recovery import JournalStore, snapshot
from protocol.codec import decode, encode, encode_arrays
from protocol.messages.episodes import Commit, DeliveryCredit, LeaseTask, PutTasks, TaskCredit
from protocol.messages.peers import Hello, PublishWeights

CONFIG = JournalConfig(sync_interval_s=1e6, file_bytes=4096, keep_bytes=1 << 20, min_free_bytes=0)


def write_sample(folder: Path) -> dict[str, bytes]:
    """Write the journal of a small run. Return its files: three logs, the later two with a snapshot."""
    journal = Journal.open(folder, run="r", config=CONFIG)
    store = JournalStore(journal, CONFIG.max_bytes)
    dispatcher = Dispatcher(
        BrokerConfig(journal=CONFIG), run="r", max_policy_lag=4, now=0.0, store=store, boot="1"
    )

    def say(name: str, frames: list[bytes]) -> list[LeaseTask]:
        message, _ = decode(frames)
        actions = dispatcher.handle(name, message, frames[1:], 0.0)
        return [action.message for action in actions if isinstance(action.message, LeaseTask)]

    say("L", encode(Hello(role="learner", peer="L", incarnation=1, epoch=1, lineage=1)))
    say("L", encode(DeliveryCredit(units=2)))
    say("L", encode(PublishWeights(epoch=1, version=1, manifest="m")))
    say("a", encode(Hello(role="actor", peer="a", incarnation=1)))
    say("a", encode(TaskCredit(tasks=100)))
    for step in range(3):
        leases = say("L", encode(PutTasks(tasks=[*group(f"1g{step}"), evaluation(f"e{step}")])))
        for lease in leases:
            for index, status in enumerate(("unfinished", "finished")):
                if step < 2 or not index:
                    one = segment(lease, index, 3 * index, tokens=3, status=status, version=1)
                    say("a", encode_arrays(one, arrays(3, 2, 1)))
        say("L", encode(Commit(epoch=1, step=step, trained=[f"1g{step}"])))
        letter = DeadLetter(peer="x", code="malformed", reason="no map", frames=[b"x"])
        journal.append(Kind.DEAD, pack_dead_letter(letter))
        if step < 2:
            journal.rotate(snapshot(dispatcher.state, store))
    assert journal.sync()
    journal.close()
    assert numbers(folder) == [1, 2, 3]
    return {path.name: path.read_bytes() for path in folder.iterdir()} | {
        file_name(n): (folder / file_name(n)).read_bytes() for n in (1, 2, 3)
    }
