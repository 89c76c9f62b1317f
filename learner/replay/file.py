"""The replay table on disk: one MessagePack document that holds token arrays as bytes; no pickle."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

import msgspec
import numpy as np
from msgspec import Struct

from learner.errors import ReplayStateError
from learner.trajectory import Trajectory, Unit
from protocol.codec import pack_arrays, unpack_arrays
from protocol.errors import ProtocolError
from protocol.messages.fields import ArraySpec

FORMAT = 1


class StoredTrajectory(Struct, frozen=True):
    """A trajectory: its arrays in ``body``, everything else in ``fields``."""

    fields: dict[str, Any]
    arrays: list[ArraySpec]
    masks: list[str]
    """Names of the boolean arrays, which are stored as bytes."""
    body: bytes


class StoredItem(Struct, frozen=True):
    """A rollout group, or a single trajectory if ``unit_id`` is None."""

    trajectories: list[StoredTrajectory]
    unit_id: str | None = None
    group_id: str = ""


class StoredEntry(Struct, frozen=True, kw_only=True):
    """An item of the table and the numbers that the selectors use; see `learner.replay.table.ReplayEntry`."""

    item: StoredItem
    key: str
    version: int
    return_: float
    advantage: float
    success_rate: float
    tokens: int
    order: int
    uses: int


class StoredTable(Struct, frozen=True, kw_only=True):
    """The whole state of a table that a restart needs."""

    format: int
    rule: str
    inserted: int
    sampled: int
    sampled_tokens: int
    evicted: dict[str, int]
    carry: float
    baselines: list[float]
    entries: list[StoredEntry]


_decoder = msgspec.msgpack.Decoder(StoredTable)


def encode_table(table: StoredTable) -> bytes:
    """Return the table as one MessagePack document."""
    return msgspec.msgpack.encode(table)


def decode_table(data: bytes | memoryview) -> StoredTable:
    """Return the table in a document.

    Raises:
        ReplayStateError: the document is cut, damaged, or of a different format.
    """
    try:
        table = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ReplayStateError(
            f"replay table: {error}; delete its file to resume with an empty table"
        ) from None
    if table.format != FORMAT:
        raise ReplayStateError(
            f"replay table: format {table.format}, this program reads {FORMAT}; delete its file to resume "
            "with an empty table"
        )
    return table


def encode_item(item: Unit | Trajectory) -> StoredItem:
    """Return the stored form of a rollout group or a trajectory."""
    if isinstance(item, Unit):
        return StoredItem([_encode_trajectory(t) for t in item.trajectories], item.unit_id, item.group_id)
    return StoredItem([_encode_trajectory(item)])


def decode_item(stored: StoredItem) -> Unit | Trajectory:
    """Return the rollout group or trajectory that `encode_item` was given.

    Raises:
        ReplayStateError: a field or an array is missing, unknown or of the wrong type.
    """
    try:
        trajectories = [_decode_trajectory(t) for t in stored.trajectories]
        if stored.unit_id is None:
            (trajectory,) = trajectories
            return trajectory
    except (msgspec.MsgspecError, ProtocolError, KeyError, TypeError, ValueError) as error:
        raise ReplayStateError(
            f"replay table: an item cannot be read ({type(error).__name__}: {error}); delete the table's file to "
            "resume with an empty table"
        ) from None
    return Unit(stored.unit_id, stored.group_id, trajectories)


def _encode_trajectory(trajectory: Trajectory) -> StoredTrajectory:
    values = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    masks = [name for name, array in arrays.items() if array.dtype == np.bool_]
    specs, body = pack_arrays({**arrays, **{name: arrays[name].astype(np.uint8) for name in masks}})
    rest = {name: value for name, value in values.items() if name not in arrays}
    return StoredTrajectory(rest, specs, masks, body)


def _decode_trajectory(stored: StoredTrajectory) -> Trajectory:
    hints = _hints()
    views = unpack_arrays(stored.arrays, stored.body)
    # Fields that trajectories had in an earlier version of the program are left out.
    values: dict[str, Any] = {
        name: msgspec.convert(value, hints[name]) for name, value in stored.fields.items() if name in hints
    }
    for name, view in views.items():
        values[name] = view.astype(np.bool_ if name in stored.masks else view.dtype)
    return Trajectory(**values)


@cache
def _hints() -> Mapping[str, Any]:
    return get_type_hints(Trajectory)
