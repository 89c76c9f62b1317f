"""Where the frames of segments are kept until the learner has committed them."""

from typing import Protocol

SegmentKey = tuple[str, int]
"""Trajectory id and index of a segment."""


class SegmentStore(Protocol):
    """Raw header and body bytes by key; never decoded or changed, so that unknown fields survive."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def __len__(self) -> int:
        """Segments held."""
        ...

    def put(self, key: SegmentKey, header: bytes, body: bytes) -> None: ...
    def get(self, key: SegmentKey) -> tuple[bytes, bytes]: ...
    def drop(self, key: SegmentKey) -> None: ...


class MemoryStore:
    """Segments in memory: lost with the process.

    Example:
        >>> store = MemoryStore()
        >>> store.put(("t.0", 0), b"header", b"body")
        >>> store.nbytes, len(store), store.get(("t.0", 0))
        (10, 1, (b'header', b'body'))
        >>> store.drop(("t.0", 0)); store.nbytes
        0
    """

    def __init__(self) -> None:
        self._frames: dict[SegmentKey, tuple[bytes, bytes]] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, key: SegmentKey, header: bytes, body: bytes) -> None:
        assert key not in self._frames, f"segment {key} is stored already"
        self._frames[key] = (header, body)
        self._nbytes += len(header) + len(body)

    def get(self, key: SegmentKey) -> tuple[bytes, bytes]:
        return self._frames[key]

    def drop(self, key: SegmentKey) -> None:
        header, body = self._frames.pop(key)
        self._nbytes -= len(header) + len(body)
