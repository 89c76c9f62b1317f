"""Where segments and events are kept: in memory, or in a journal that outlives the process (`broker.recovery`)."""

from typing import Protocol

from broker.core.events import AnyEvent
from protocol.codec import Buffer
from protocol.names import SegmentKey

"""Trajectory id and index of a segment."""


class SegmentStore(Protocol):
    """Raw header and body bytes by key; never decoded or changed, so that unknown fields survive.

    A segment is held until the learner commits it, set aside until a checkpoint covers that, and then dropped.
    Only what is held counts towards the broker's bounds.
    """

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    @property
    def committed_nbytes(self) -> int:
        """Bytes set aside."""
        ...

    @property
    def low(self) -> bool:
        """Whether there is no room for more."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether what is set aside takes the room of what waits."""
        ...

    def __len__(self) -> int:
        """Segments held."""
        ...

    def put(self, key: SegmentKey, header: bytes, body: Buffer) -> None: ...
    def get(self, key: SegmentKey) -> tuple[bytes, Buffer]: ...
    def commit(self, key: SegmentKey) -> None: ...
    def uncommit(self, key: SegmentKey) -> None: ...
    def drop(self, key: SegmentKey) -> None: ...

    def note(self, event: AnyEvent) -> None:
        """Keep an event, in order with the segments."""
        ...


class Counted:
    """Numbers of what is held and set aside."""

    def __init__(self) -> None:
        self._held: dict[SegmentKey, int] = {}
        self._aside: dict[SegmentKey, int] = {}
        self.nbytes = self.committed_nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: SegmentKey, nbytes: int) -> None:
        known = key in self._held or key in self._aside
        assert not known, f"segment {key} is stored already"
        self._held[key] = nbytes
        self.nbytes += nbytes

    def commit(self, key: SegmentKey) -> None:
        nbytes = self._aside[key] = self._held.pop(key)
        self.nbytes -= nbytes
        self.committed_nbytes += nbytes

    def uncommit(self, key: SegmentKey) -> None:
        nbytes = self._held[key] = self._aside.pop(key)
        self.nbytes += nbytes
        self.committed_nbytes -= nbytes

    def drop(self, key: SegmentKey) -> None:
        if key in self._held:
            self.nbytes -= self._held.pop(key)
        else:
            self.committed_nbytes -= self._aside.pop(key)


class MemoryStore(Counted):
    """Segments in memory: lost with the process.

    Example:
        >>> store = MemoryStore()
        >>> store.put(("t.0", 0), b"header", b"body")
        >>> store.nbytes, len(store), store.get(("t.0", 0))
        (10, 1, (b'header', b'body'))
        >>> store.commit(("t.0", 0)); store.nbytes, store.committed_nbytes
        (0, 10)
        >>> store.drop(("t.0", 0)); store.committed_nbytes
        0
    """

    low = False
    crowded = False

    def __init__(self) -> None:
        super().__init__()
        self._frames: dict[SegmentKey, tuple[bytes, Buffer]] = {}

    def put(self, key: SegmentKey, header: bytes, body: Buffer) -> None:
        self.add(key, len(header) + len(body))
        self._frames[key] = (header, body)

    def get(self, key: SegmentKey) -> tuple[bytes, Buffer]:
        return self._frames[key]

    def drop(self, key: SegmentKey) -> None:
        super().drop(key)
        del self._frames[key]

    def note(self, event: AnyEvent) -> None:
        pass
