"""GPUs that the learner shares with generators of its host in lockstep."""

from collections.abc import Iterator
from contextlib import contextmanager

from learner.errors import GpuKept
from protocol.processes import GpuLock


class SharedGpu:
    """The learner's side of `protocol.processes`: generators sleep while it has the GPUs alone.

    Args:
        lock: None: nobody sleeps.
        timeout_s: longest wait for the generators.
    """

    def __init__(self, lock: GpuLock | None, timeout_s: float) -> None:
        self._lock, self._timeout_s = lock, timeout_s
        self.waited_s: float | None = None
        """Seconds that the learner waited last; None if nobody sleeps."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the GPUs alone while the context lasts, once all generators sleep.

        Raises:
            GpuKept: a generator did not fall asleep in time.
        """
        if self._lock is None:
            yield
            return
        try:
            self.waited_s = self._lock.wait_alone(self._timeout_s)
        except TimeoutError:
            raise GpuKept(
                f"a generator has kept the GPU that it shares with the learner for {self._timeout_s:g} s (from "
                "learner.data_timeout_s); generator logs say what it does; set generator.sleep_in_updates to false if "
                "this happens again"
            ) from None
        try:
            yield
        finally:
            self._lock.release()
