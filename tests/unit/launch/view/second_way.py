"""Reads a journal by the format in docs/understand/journal.md alone, and sums it up. Shares no code with the viewer."""

import struct
from collections import Counter

import msgpack
import numpy as np

HEAD = struct.Struct("<4sIIQB")
TYPES = {"i4": "<i4", "u1": "u1", "f4": "<f4", "i2": "<i2", "i8": "<i8", "f8": "<f8"}


def records(folder):
    """Yield kind and payload of each record."""
    for path in sorted(folder.glob("journal-*.log")):
        data = path.read_bytes()
        at = 32 + struct.unpack_from("<H", data, 10)[0] + 4
        while at < len(data):
            magic, _, nbytes, _, kind = HEAD.unpack_from(data, at)
            assert magic == b"\xf5OBr"
            yield kind, data[at + HEAD.size : at + HEAD.size + nbytes]
            at += HEAD.size + nbytes


def segment(payload):
    """Return header and arrays of a segment, as plain data."""
    size = struct.unpack_from("<I", payload)[0]
    start = 12 if size & 1 << 31 else 4
    size &= (1 << 31) - 1
    header = msgpack.unpackb(payload[start : start + size])
    body = payload[start + size :]
    arrays = {}
    for spec in header["arrays"]:
        name, dtype, length, offset = (
            spec if isinstance(spec, list) else (spec["name"], spec["dtype"], spec["length"], spec["offset"])
        )
        arrays[name] = np.frombuffer(body, TYPES[dtype], length, offset)
    return header, arrays


class Sums:
    """What a journal without restarts of the learner says, counted token by token."""

    def __init__(self, folder, bound):
        self.outcome, self.of, self.group = {}, {}, {}
        self.lags = Counter()
        self.rewards, self.trained_at = {}, {}
        for kind, payload in records(folder):
            if kind == 3:
                self._segment(*segment(payload))
            elif kind == 2:
                self._event(msgpack.unpackb(payload))
        self.tokens = Counter()
        for name, tokens in self.of.items():
            self.tokens[self.outcome.get(name, "held")] += len(tokens)
        self.beyond = sum(n for lag, n in self.lags.items() if lag > bound)

    def _segment(self, header, arrays):
        name = header["trajectory_id"]
        old = self.of.get(name, [])
        self.of[name] = old + list(
            zip(
                arrays["token_ids"].tolist(),
                arrays["action_mask"].tolist(),
                arrays["policy_version"].tolist(),
                strict=True,
            )
        )
        self.group.setdefault(header["group_id"], []).append(name)
        for _, _, value in header.get("rewards", []):
            self.rewards[name] = self.rewards.get(name, 0.0) + value

    def _event(self, event):
        if event["type"] == "committed":
            for outcome in ("trained", "dropped"):
                for unit in event.get(outcome, []):
                    for name in [unit] if unit in self.of else dict.fromkeys(self.group[unit]):
                        self._commit(name, outcome, event)
        elif event["type"] == "unit_dropped":
            for name in dict.fromkeys(self.group[event["unit_id"]]):
                self.outcome[name] = event["outcome"]

    def _commit(self, name, outcome, event):
        self.outcome[name], self.trained_at[name] = outcome, event["step"]
        if outcome == "trained":
            for _, action, version in self.of[name]:
                if action:
                    self.lags[event["version"] - version] += 1
