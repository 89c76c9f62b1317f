"""Run broker, journal, learner and actor in a process that ends if it unpickles: a whole round trip works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

ROUND_TRIP = '''
"""A broker with keys and a journal, a learner and an actor; whoever unpickles or unmarshals ends the process."""
import marshal, pickle, sys, tempfile, threading, time
from pathlib import Path

import msgspec, numpy as np, zmq  # compiled modules may look at pickle while they are imported
import aiohttp.web
from broker.config import BrokerConfig
from broker.service import serve
from protocol.security import key_files
from protocol.codec import decode_delivery, encode_arrays
from protocol.sockets import ThreadLink
from launch.processes import free_port
from protocol.messages.episodes import Checkpointed, Commit, Deliver, DeliveryCredit
from protocol.messages.peers import Hello
from protocol.messages.episodes import Segment, SegmentAck, Turn
from protocol.messages.episodes import LeaseTask, PutTasks, Task, TaskCredit

def forbidden(*arguments, **settings):
    print("UNPICKLED", flush=True)
    import traceback
    traceback.print_stack()
    import os
    os._exit(3)

class Forbidden:
    __new__ = forbidden

pickle.load = pickle.loads = pickle._load = pickle._loads = forbidden
pickle.Unpickler = pickle._Unpickler = Forbidden
import _pickle
_pickle.load = _pickle.loads = forbidden
_pickle.Unpickler = Forbidden

folder = Path(tempfile.mkdtemp())
key_files.make(folder / "keys")
keys, endpoint = folder / "keys", f"tcp://127.0.0.1:{free_port()}"

def until(condition, what):
    end = time.monotonic() + 240.0
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.01)
    return found

def hear(link, kind):
    end = time.monotonic() + 240.0
    while time.monotonic() < end:
        item = link.inbox.get(timeout=60)
        if item and isinstance(item[0], kind):
            return item
    raise AssertionError(kind)

def play():
    boss = ThreadLink(endpoint, Hello(role="learner", peer="learner", incarnation=1, epoch=1), keys=keys)
    worker = ThreadLink(endpoint, Hello(role="actor", peer="actor-0", incarnation=1), keys=keys)
    until(lambda: boss.session.joined and worker.session.joined, "both join")
    boss.send(DeliveryCredit(units=2))
    worker.send(TaskCredit(tasks=1))
    boss.send(PutTasks(tasks=[Task(task_id="1g0.0", env="e", group_id="1g0", group_size=1)]))
    lease, _ = hear(worker, LeaseTask)
    arrays = {"token_ids": np.arange(4, dtype="<i4"), "action_mask": np.array([0, 0, 1, 1], "u1"),
              "logp_behaviour": np.array([0, 0, -1, -1], "<f4"), "policy_version": np.array([-1, -1, 0, 0], "<i4")}
    segment = Segment(trajectory_id="1g0.0.0", task_id="1g0.0", group_id="1g0", group_size=1, index=0, offset=0,
                      tokens=4, action_tokens=2, status="finished", version_min=0, version_max=0,
                      turns=[Turn(0, 0, 2, False), Turn(1, 2, 4, True)])
    frames = encode_arrays(segment, arrays)
    from protocol.codec import decode
    message, rest = decode(frames)
    worker.send(message, bytes(rest[0]))
    assert hear(worker, SegmentAck)[0].status == "stored"
    deliver, rest = hear(boss, Deliver)
    assert decode_delivery(deliver, rest)[0][1]["token_ids"].tolist() == [0, 1, 2, 3]
    boss.send(Commit(epoch=1, step=1, trained=[deliver.unit_id]))
    boss.send(Checkpointed(epoch=1, step=1))
    time.sleep(0.3)
    worker.close()
    boss.close()
    print("DONE", flush=True)

def main():
    failed = []
    def guarded():
        try:
            play()
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            import os, signal
            os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=guarded, daemon=True).start()
    serve(BrokerConfig(endpoint=endpoint, http="127.0.0.1:0", heartbeat_s=1.0), run="r", max_policy_lag=4,
          journal=folder / "journal", keys=keys)
    assert not failed
main()
'''


def run(program, text):
    program.write_text(text)
    ended = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, f"{ended.stdout}\n{ended.stderr}"


def test_a_round_trip_unpickles_nothing(tmp_path):
    code, said = run(tmp_path / "round_trip.py", ROUND_TRIP)
    assert code == 0, said
    assert "DONE" in said
    assert "UNPICKLED" not in said


@pytest.mark.parametrize(
    "call", ["pickle.loads(pickle.dumps(1))", "pickle.Unpickler(None)", "_pickle.loads(b'')"]
)
def test_the_trap_springs(tmp_path, call):
    code, said = run(tmp_path / "trapped.py", ROUND_TRIP.replace("\nmain()\n", f"\n{call}\n"))
    assert (code, "UNPICKLED" in said) == (3, True)
