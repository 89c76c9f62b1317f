"""Stores of segments and events: in memory, or in a journal that outlives it (`broker.journal_store`)."""

from typing import Protocol

from broker.core.events import AnyEvent
from protocol.codec import Buffer
from protocol.names import SegmentKey


class SegmentStore(Protocol):
    """Raw header and body bytes by key. They are never decoded or changed, so that unknown fields survive.

    A segment is held until the learner commits it. A committed segment is kept until a checkpoint covers its
    commit. Only held segments count towards the broker's limits.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of held segments."""
        ...

    @property
    def committed_nbytes(self) -> int:
        """Bytes of committed segments that no checkpoint covers yet."""
        ...

    @property
    def low(self) -> bool:
        """Whether there is no room for more segments."""
        ...

    @property
    def crowded(self) -> bool:
        """Whether committed segments take the room of waiting ones."""
        ...

    def __len__(self) -> int:
        """Return the number of held segments."""
        ...

    def put(self, key: SegmentKey, header: bytes, body: Buffer) -> None: ...
    def get(self, key: SegmentKey) -> tuple[bytes, Buffer]: ...
    def commit(self, key: SegmentKey) -> None: ...
    def uncommit(self, key: SegmentKey) -> None: ...
    def drop(self, key: SegmentKey) -> None: ...

    def record_event(self, event: AnyEvent) -> None:
        """Record an event, in order with the segments."""
        ...


class Counted:
    """Numbers of bytes and segments that are held or committed."""

    def __init__(self) -> None:
        self._held: dict[SegmentKey, int] = {}
        self._committed: dict[SegmentKey, int] = {}
        self.nbytes = self.committed_nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: SegmentKey, nbytes: int) -> None:
        known = key in self._held or key in self._committed
        assert not known, f"segment {key} is stored already"
        self._held[key] = nbytes
        self.nbytes += nbytes

    def commit(self, key: SegmentKey) -> None:
        nbytes = self._committed[key] = self._held.pop(key)
        self.nbytes -= nbytes
        self.committed_nbytes += nbytes

    def uncommit(self, key: SegmentKey) -> None:
        nbytes = self._held[key] = self._committed.pop(key)
        self.nbytes += nbytes
        self.committed_nbytes -= nbytes

    def drop(self, key: SegmentKey) -> None:
        if key in self._held:
            self.nbytes -= self._held.pop(key)
        else:
            self.committed_nbytes -= self._committed.pop(key)


class MemoryStore(Counted):
    """Segments in memory, which are lost with the process.

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

    def record_event(self, event: AnyEvent) -> None:
        pass
