"""A learner and an actor of Offbeat, written from protocol/SPEC.md alone.

Nothing of Offbeat is imported: pyzmq, msgpack and numpy are enough. The actor makes up its segments, and the learner
counts units where a real one computes gradients. All else is what any client has to do: keys, joins, credit, leases,
repetition after the broker was killed, commits and checkpoints. Section numbers are those of SPEC.md.

Each process prints a line of JSON for each event. SIGTERM ends it with a Goodbye.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgpack
import numpy as np
import zmq
import zmq.utils.monitor

PRELUDE = b"OB\x04\x01"
HELLO_EVERY_S, AFTER_LATE_WELCOME_S, SILENT_HEARTBEATS, RECONNECT_S = 1.0, 5.0, 5, 1.0
MONITORED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)
PIECES, TOKENS = 3, 4


def frames_of(kind, fields, arrays=None):
    """Return the frames of a message (section 3), with the arrays, if any, as its body."""
    if arrays is None:
        return [PRELUDE, msgpack.packb({"type": kind, **fields})]
    body, rows = bytearray(), []
    for name, values in arrays.items():
        rows.append([name, values.dtype.str[1:], len(values), len(body)])
        body += values.tobytes()
        body += bytes(-len(body) % 8)
    return [PRELUDE, msgpack.packb({"type": kind, **fields, "arrays": rows}), bytes(body)]


def messages_of(frames):
    """Return what came as pairs (header, frames behind it), whether or not in an envelope (section 3)."""
    prelude, head, *rest = frames
    if prelude[:3] != PRELUDE[:3]:
        raise SystemExit(f"the broker speaks version {prelude[2]}.{prelude[3]}, this client 4.1")
    head = msgpack.unpackb(head)
    if isinstance(head, dict):
        return [(head, rest)]
    messages, at = [], 0
    for count, header in head:
        messages.append((header, rest[at : at + count]))
        at += count
    return messages


def arrays_of(header, body):
    """Return the arrays of a segment by name."""
    return {
        name: np.frombuffer(body, dtype="<" + dtype, count=length, offset=offset)
        for name, dtype, length, offset in header["arrays"]
    }


def tokens_of(trajectory_id, index):
    """Return token ids that both the actor and the learner can compute, so that the learner sees mix-ups."""
    seed = sum(f"{trajectory_id}/{index}".encode())
    return np.arange(seed, seed + TOKENS, dtype="<i4")


def keys_of(folder, role, peer):
    """Return public, secret and the broker's public key (section 2): the files of the longest name that fits."""
    parts = peer.split("-") if peer.startswith(f"{role}-") else []
    names = ["-".join(parts[:n]) for n in range(len(parts), 1, -1)] + [role]
    file = next(path for name in names if (path := Path(folder, f"{name}.secret")).exists())
    secret = file.read_text().strip().encode()
    return zmq.curve_public(secret), secret, Path(folder, "broker.pub").read_text().strip().encode()


def say(event, **facts):
    """Print one line of JSON for whoever started this process."""
    print(json.dumps({"event": event, **facts}), flush=True)


class Peer:
    """Connects, says Hello until a Welcome comes, sends heartbeats, and notices silence (section 8)."""

    def __init__(self, endpoint, keys, role, name):
        self.endpoint = endpoint
        self.hello = {
            "role": role,
            "peer": name,
            "incarnation": time.time_ns() // 1_000_000,
            "pid": os.getpid(),
        }
        self.attempt, self.joined, self.ending = -1, False, False
        self.heartbeat_s, self.progress, self.policy_version = 1.0, 0, 0
        self.hello_at = self.beat_at = self.heard_at = 0.0
        self.run_name, self.connected, self.connect_at = None, False, float("inf")
        self.connect(keys_of(keys, role, name))

    def busy(self):
        return False

    def turn(self):
        """Do the next piece of work."""

    def connect(self, keys):
        """Connect with CURVE and a routing id that nobody can guess (section 2)."""
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.curve_publickey, self.socket.curve_secretkey, self.socket.curve_serverkey = keys
        self.socket.setsockopt(zmq.ROUTING_ID, b"\x01" + os.urandom(16))
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.monitor = self.socket.get_monitor_socket(MONITORED)
        self.socket.connect(self.endpoint)

    def watch_connection(self, now):
        """Say Hello over each new connection, and connect again where ZeroMQ gives up (section 2)."""
        while self.monitor.poll(0):
            event = zmq.utils.monitor.recv_monitor_message(self.monitor)["event"]
            self.joined = self.connected = False
            self.connect_at = now + RECONNECT_S
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                say("handshake_refused")
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connected, self.hello_at = True, now
            if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_CONNECT_RETRIED):
                self.connect_at = float("inf")
        if now >= self.connect_at:
            self.connect_at = float("inf")
            self.socket.disconnect(self.endpoint)
            self.socket.connect(self.endpoint)

    def send(self, kind, /, **fields):
        """Send a message. What leaves without a connection is lost, and repeated after the next join."""
        if self.connected:
            self.socket.send_multipart(frames_of(kind, fields))

    def say_hello(self, now):
        """Hello voids all credit on both sides; only a Welcome to the last Hello counts."""
        self.attempt, self.joined, self.hello_at = self.attempt + 1, False, now + HELLO_EVERY_S
        self.send("hello", **self.hello, attempt=self.attempt)

    def keep_in_touch(self, now):
        if self.joined and now > self.heard_at + SILENT_HEARTBEATS * self.heartbeat_s:
            self.joined, self.hello_at = False, now
        if self.connected and not self.joined and now >= self.hello_at:
            self.say_hello(now)
        if self.joined and now >= self.beat_at:
            self.beat_at = now + self.heartbeat_s
            self.send(
                "heartbeat", progress=self.progress, busy=self.busy(), policy_version=self.policy_version
            )

    def receive(self, timeout_s):
        ready = self.socket.poll(int(1000 * timeout_s))
        while ready:
            for header, rest in messages_of(self.socket.recv_multipart()):
                self.heard_at = time.monotonic()
                if handler := getattr(self, "on_" + header["type"], None):
                    handler(header, rest)
            ready = self.socket.poll(0)

    def on_welcome(self, header, _):
        if header.get("attempt", 0) != self.attempt:
            # The broker takes more than a second to answer. Another Hello now would make the next Welcome late, too.
            if not self.joined:
                self.hello_at = self.heard_at + AFTER_LATE_WELCOME_S
            return
        if self.run_name not in (None, header["run"]):
            raise SystemExit(f"this broker serves the run {header['run']}, not {self.run_name}")
        self.joined, self.run_name, self.heartbeat_s = True, header["run"], header.get("heartbeat_s", 1.0)
        self.policy_version = header.get("policy_version", 0)
        say("joined", attempt=self.attempt)
        self.on_joined()

    def on_heartbeat(self, header, _):
        self.policy_version = max(self.policy_version, header.get("policy_version", 0))

    def on_refused(self, header, _):
        say("refused", code=header["code"], message=header.get("message", ""))
        if header.get("fatal", False):
            raise SystemExit(f"{header['code']}: {header.get('message', '')}")
        if header["code"] == "unknown_peer" and self.joined:
            self.joined, self.hello_at = False, self.heard_at

    def on_drain(self, *_):
        self.ending = True

    def over(self):
        return self.ending

    def run(self):
        while not self.over():
            self.watch_connection(time.monotonic())
            self.keep_in_touch(time.monotonic())
            self.receive(0.01)
            self.turn()
        self.send("goodbye", reason="done")
        self.socket.disable_monitor()
        zmq.Context.instance().destroy(linger=2000)
        say("ended")


class Actor(Peer):
    """Runs up to `capacity` tasks at a time, each as a trajectory of `PIECES` made-up segments (sections 6 and 7)."""

    def __init__(self, endpoint, keys, name, segment_s=0.04, capacity=4):
        super().__init__(endpoint, keys, "actor", name)
        self.capacity, self.credit = capacity, 0
        self.segment_s, self.busy_until = segment_s, 0.0
        # Episodes by lease: [trajectory id, task, index of the next segment].
        self.episodes, self.rejected = {}, set()
        # Segments without an ack, in order, by (trajectory id, index); and which of them left since the Welcome.
        self.unacknowledged, self.sent = {}, set()

    def busy(self):
        return bool(self.episodes)

    def over(self):
        return self.ending and not self.unacknowledged

    def on_joined(self):
        self.credit, self.sent = 0, set()
        if not self.ending and len(self.episodes) < self.capacity:
            self.send("task_credit", tasks=self.capacity - len(self.episodes))

    def on_lease_task(self, header, _):
        lease, task = header["lease_id"], header["task"]
        # A join repeats the leases of this process, and with them a TaskRejected that was lost.
        if lease in self.episodes:
            return
        if lease in self.rejected:
            self.reject(lease)
            return
        trajectory = f"{task['task_id']}.{header.get('attempt', 0)}"
        for other in [k for k, (running, *_) in self.episodes.items() if running == trajectory]:
            # Section 7: the broker was restarted, and leases again what runs here.
            self.reject(lease)
            self.end(other)
            return
        self.episodes[lease] = [trajectory, task, 0]
        say("leased", trajectory=trajectory)

    def reject(self, lease):
        self.rejected.add(lease)
        self.send(
            "task_rejected",
            lease_id=lease,
            reason="this trajectory runs under a different lease",
            fault=False,
        )

    def on_cancel_task(self, header, _):
        self.end(header["lease_id"])

    def end(self, lease):
        """End an episode: nothing more of it is sent, and there is room for one more task."""
        if (episode := self.episodes.pop(lease, None)) is None:
            return
        for key in [key for key in self.unacknowledged if key[0] == episode[0]]:
            del self.unacknowledged[key]
        if self.joined and not self.ending:
            self.send("task_credit", tasks=1)

    def on_segment_credit(self, header, _):
        # What came before the Welcome belongs to an earlier connection.
        if self.joined:
            self.credit += header["segments"]

    def on_segment_ack(self, header, _):
        trajectory, index = header["trajectory_id"], header["index"]
        known = self.unacknowledged.pop((trajectory, index), None)
        if known and header["status"] != "refused":
            self.progress += 1
            say("acked", trajectory=trajectory, index=index, status=header["status"])
        if header["status"] == "refused" or index == PIECES - 1:
            if header["status"] == "refused":
                say("segment_refused", trajectory=trajectory, reason=header.get("reason", ""))
            for lease in [k for k, (running, *_) in self.episodes.items() if running == trajectory]:
                self.end(lease)

    def turn(self):
        if not self.joined:
            return
        unfinished = [episode for episode in self.episodes.values() if episode[2] < PIECES]
        if unfinished and time.monotonic() >= self.busy_until:
            self.busy_until = time.monotonic() + self.segment_s
            trajectory, task, index = episode = unfinished[0]
            self.unacknowledged[trajectory, index] = self.segment(trajectory, task, index)
            episode[2] += 1
        for key, frames in self.unacknowledged.items():
            if self.credit and key not in self.sent:
                self.socket.send_multipart(frames)
                self.sent.add(key)
                self.credit -= 1

    def segment(self, trajectory, task, index):
        """Return a segment: the first one holds the prompt, each later one a turn of the model."""
        sampled, first = index > 0, TOKENS * index
        arrays = {
            "token_ids": tokens_of(trajectory, index),
            "action_mask": np.full(TOKENS, sampled, "<u1"),
            "logp_behaviour": np.full(TOKENS, -0.5 if sampled else 0.0, "<f4"),
            "policy_version": np.full(TOKENS, self.policy_version if sampled else -1, "<i4"),
        }
        version = self.policy_version if sampled else -1
        fields = {"trajectory_id": trajectory, "index": index, "offset": first, "tokens": TOKENS}
        fields |= {key: task[key] for key in ("task_id", "group_id", "group_size")}
        fields |= {"action_tokens": TOKENS if sampled else 0, "version_min": version, "version_max": version}
        fields["turns"] = [[index, first, first + TOKENS, sampled]]
        fields["status"] = "finished" if index == PIECES - 1 else "unfinished"
        if index == PIECES - 1:
            fields["rewards"] = [["exact", index, 1.0]]
        return frames_of("segment", fields, arrays)


class Learner(Peer):
    """Puts groups of tasks, trains each unit once, and commits it (section 7)."""

    def __init__(self, endpoint, keys, name, groups, size, checkpoint, unit_s=0.25, room=4):
        super().__init__(endpoint, keys, "learner", name)
        self.groups, self.size, self.room, self.file = groups, size, room, Path(checkpoint)
        self.unit_s, self.busy_until = unit_s, 0.0
        self.epoch, self.step, self.done = 1, 0, {}
        if self.file.exists():
            saved = json.loads(self.file.read_text())
            self.epoch, self.step, self.done = saved["epoch"] + 1, saved["step"], saved["done"]
        self.hello |= {"epoch": self.epoch, "lineage": 1, "deliver": "group", "step": self.step}
        self.held, self.put_at, self.proved = None, float("inf"), False
        # Units to train; and those of them that came over this connection, each of which used one credit.
        self.waiting, self.credited = {}, set()

    def busy(self):
        return bool(self.waiting)

    def over(self):
        return self.ending or self.proved

    def on_joined(self):
        self.held, self.credited = {"task_ids": set(), "unit_ids": set()}, set()

    def on_held(self, header, _):
        if not self.joined:
            return
        for name, ids in self.held.items():
            ids.update(header.get(name, []))
        if header.get("more", False):
            return
        # The broker has these without a commit: it never came, or was lost.
        for unit in self.held["unit_ids"] & self.done.keys():
            say("committed_again", unit=unit)
            self.commit(unit)
        self.put_tasks()
        self.send("delivery_credit", units=self.room)
        if len(self.done) == self.groups:
            # Section 5: only a Held without them proves that the commits came.
            self.proved = not self.held["unit_ids"] | self.held["task_ids"]
            if self.proved:
                self.write_checkpoint()
            else:
                self.joined, self.hello_at = False, 0.0

    def put_tasks(self):
        """Put what is neither trained nor at the broker; the broker ignores what it has seen."""
        self.put_at = float("inf")
        missing = [
            f"g{n}" for n in range(self.groups) if f"g{n}" not in self.done and f"g{n}" not in self.waiting
        ]
        tasks = [
            {"task_id": f"{group}-{member}", "group_id": group, "group_size": self.size, "env": "made_up"}
            for group in missing
            for member in range(self.size)
        ]
        tasks = [task for task in tasks if task["task_id"] not in self.held["task_ids"]]
        if tasks:
            self.send("put_tasks", tasks=tasks)

    def on_refused(self, header, rest):
        super().on_refused(header, rest)
        if header["code"] == "queue_full":
            self.put_at = time.monotonic() + 1.0

    def on_deliver(self, header, pairs):
        unit = header["unit_id"]
        if unit in self.done:
            self.commit(unit)
        if unit in self.done or unit in self.waiting:
            self.return_credit()
        else:
            headers, bodies = map(msgpack.unpackb, pairs[::2]), pairs[1::2]
            self.credited.add(unit)
            self.waiting[unit] = list(zip(headers, bodies, strict=True))

    def return_credit(self):
        # A Hello voids all credit, so none may leave between it and the Held that answers it.
        if self.joined:
            self.send("delivery_credit", units=1)

    def on_dropped(self, header, _):
        say("dropped", unit=header["unit_id"], reason=header["reason"])

    def on_checkpoint_wanted(self, *_):
        self.write_checkpoint()

    def commit(self, unit):
        self.send("commit", epoch=self.epoch, step=self.done[unit], trained=[unit])

    def turn(self):
        if time.monotonic() >= self.put_at:
            self.put_tasks()
        if not self.waiting or time.monotonic() < self.busy_until:
            return
        self.busy_until = time.monotonic() + self.unit_s
        unit = next(iter(self.waiting))
        segments = self.waiting.pop(unit)
        for segment, body in segments:
            expected = tokens_of(segment["trajectory_id"], segment["index"])
            assert np.array_equal(arrays_of(segment, body)["token_ids"], expected), segment
        self.step, self.progress = self.step + 1, self.progress + 1
        self.done[unit] = self.step
        say("trained", unit=unit, step=self.step, segments=len(segments))
        self.commit(unit)
        if unit in self.credited:
            self.return_credit()
        if self.step % 5 == 0:
            self.write_checkpoint()
        if len(self.done) == self.groups:
            self.joined, self.hello_at = False, 0.0

    def write_checkpoint(self):
        """Only when the file is whole on disk may the broker delete the units."""
        partial = self.file.with_suffix(".partial")
        with open(partial, "w") as out:
            json.dump({"epoch": self.epoch, "step": self.step, "done": self.done}, out)
            out.flush()
            os.fsync(out.fileno())
        partial.replace(self.file)
        self.hello["step"] = self.step
        self.send("checkpointed", epoch=self.epoch, step=self.step)
        say("checkpointed", step=self.step)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("role", choices=["actor", "learner"])
    parser.add_argument("endpoint", help="broker.endpoint, for example tcp://127.0.0.1:5755")
    parser.add_argument("keys", help="the keys folder")
    parser.add_argument("--name", help="name of the peer; the role unless given")
    parser.add_argument("--groups", type=int, default=4, help="learner: groups to train")
    parser.add_argument("--size", type=int, default=2, help="learner: members of a group")
    parser.add_argument("--checkpoint", default="spec_client.json", help="learner: file of its checkpoint")
    parser.add_argument("--unit-s", type=float, default=0.25, help="learner: seconds that a unit takes")
    parser.add_argument("--segment-s", type=float, default=0.04, help="actor: seconds that a segment takes")
    given = parser.parse_args(arguments)
    name = given.name or given.role
    if given.role == "actor":
        peer = Actor(given.endpoint, given.keys, name, given.segment_s)
    else:
        peer = Learner(
            given.endpoint, given.keys, name, given.groups, given.size, given.checkpoint, given.unit_s
        )
    signal.signal(signal.SIGTERM, lambda *_: setattr(peer, "ending", True))
    peer.run()


if __name__ == "__main__":
    main(sys.argv[1:])
