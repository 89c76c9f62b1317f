"""Inputs for fuzzing, and the loop that feeds them to a target.

An input is bytes, made only from a seed and a number. A failing input can therefore be made again from two
numbers, or kept in a file. It can also come from a coverage-guided engine, because a target does not know
where its bytes come from. `Choices` turns the bytes into decisions. After the last byte all decisions are 0,
so short inputs mean short scripts.
"""

import random
import signal
import time
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import msgspec

T = TypeVar("T")

HOSTILE_INTS = (
    0, 1, 2, 3, 7, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
    -1, -2, -(2**31), -(2**63),
)  # fmt: skip
HOSTILE_FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-300, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
HOSTILE_TEXTS = (
    "", " ", ".", "/", "..", "x.0", "x.-1", "x.٣", "x.99999999999999999999", "\x00", "\n", "é", "🙂", "\u202e",
    "a" * 256, "a" * 257, "\x00" * 300, "a" * 5000, "../../etc/passwd", "%s%n{}", "nan", "__class__",
)  # fmt: skip
INTERESTING = bytes.fromhex("00017f80909fa0bfc0c1c4c6c7c9cacbcfd3d6d9dbdcdddedfff")
"""Bytes that begin a value in MessagePack."""


class Target(Protocol):
    """Code that is fuzzed, with a generator of inputs for it."""

    name: str
    unit: str
    """Name of the things that `done` counts in addition to inputs, or ""."""
    done: int

    def make(self, rng: random.Random) -> bytes:
        """Make an input."""
        ...

    def run(self, data: bytes) -> None:
        """Run one input. Each exception that it raises is a finding."""
        ...


@dataclass
class Finding:
    """A failure, with the first input that caused it and the number of inputs that did.

    Failures at the same place in the code count as one finding.
    """

    place: str
    text: str
    seed: int
    number: int
    count: int = 1
    file: str = ""


@dataclass
class Report:
    """Figures and findings of a run."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    slowest_s: float = 0.0
    """Processor seconds of the slowest input."""
    units: int = 0
    peak_rss: int = 0
    """Peak resident memory in bytes."""
    findings: dict[str, Finding] = field(default_factory=dict)


class Hang(BaseException):
    """An input exceeded its time limit. Only the loop may catch this, so it is no `Exception`."""


class Choices:
    """Decisions made from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def byte(self) -> int:
        value = self._data[self._at] if self._at < len(self._data) else 0
        self._at += 1
        return value

    def below(self, n: int) -> int:
        """Return a number from 0 to n - 1."""
        if n <= 256:
            return self.byte() % n
        return (self.byte() << 8 | self.byte()) % n

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def flag(self, one_in: int = 2) -> bool:
        """Return True with probability 1 / ``one_in``, and False after the last byte."""
        return self.byte() % one_in == one_in - 1

    def bytes(self, n: int) -> bytes:
        taken = self._data[self._at : self._at + n]
        self._at += n
        return taken


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change the bytes one to four times: flip a bit, cut, repeat, insert or overwrite."""
    out = bytearray(data)
    for _ in range(1 + (rng.getrandbits(8) & 3)):
        place = rng.randrange(len(out) + 1)
        match rng.getrandbits(3):
            case 0 if place < len(out):
                out[place] ^= 1 << rng.getrandbits(3)
            case 1 if place < len(out):
                out[place] = rng.choice(INTERESTING)
            case 2:
                del out[place : place + 1 + rng.getrandbits(4)]
            case 3:
                del out[place:]
            case 4:
                out[place:place] = out[place : place + 1 + rng.getrandbits(5)]
            case 5:
                out[place:place] = rng.randbytes(1 + rng.getrandbits(3))
            case 6:
                size = rng.choice((2, 4, 8))
                number = rng.choice(HOSTILE_INTS) & (1 << 8 * size) - 1
                out[place : place + size] = number.to_bytes(size, rng.choice(("little", "big")))
            case _:
                other = rng.randrange(len(out) + 1)
                out[place : place + 8] = out[other : other + 8]
    return bytes(out)


def mutate_value(choose: Callable[[Sequence[Any]], Any], value: Any, *, depth: int = 0) -> Any:
    """Return the value with one change: at the top, or anywhere below."""
    inside = isinstance(value, dict | list) and len(value) > 0
    if inside and depth < 12 and choose((0, 1, 1, 1)):
        if isinstance(value, dict):
            key = choose(list(value))
            out = dict(value)
            match choose((0, 0, 0, 0, 1, 2)):
                case 0:
                    out[key] = mutate_value(choose, value[key], depth=depth + 1)
                case 1:
                    del out[key]
                case _:
                    out[choose(HOSTILE_TEXTS)] = out[key]
            return out
        place = choose(range(len(value)))
        match choose((0, 0, 0, 1, 2, 3)):
            case 0:
                return [
                    *value[:place],
                    mutate_value(choose, value[place], depth=depth + 1),
                    *value[place + 1 :],
                ]
            case 1:
                return [*value[:place], *value[place + 1 :]]
            case 2:
                return [*value, *[value[place]] * choose((1, 2, 20))]
            case _:
                return value[::-1]
    return hostile_value(choose, value)


def hostile_value(choose: Callable[[Sequence[Any]], Any], value: Any) -> Any:
    """Return a hostile value in place of ``value``, usually of the same type if that is a scalar."""
    kind = choose((0, 0, 0, 0, 0, 0, 1))
    if kind == 0:
        match value:
            case bool():
                return not value
            case int():
                return choose(HOSTILE_INTS) if choose((0, 1)) else value + choose((-1, 1, 2, 10))
            case float():
                return choose(HOSTILE_FLOATS)
            case str():
                return choose(HOSTILE_TEXTS) if choose((0, 1)) else value[: choose((0, 1, 3))]
    nested: Any = []
    for _ in range(choose((1, 2, 40, 600))):
        nested = [nested]
    extension = msgspec.msgpack.Ext(5, b"x")
    return choose((None, True, "x", b"\xff", 1.5, -1, [], {}, {"a": {}}, nested, [0] * 70, extension))


class Loop:
    """The loop that feeds a target and keeps the inputs that fail.

    Args:
        target: the target to feed.
        folder: folder for failing inputs. None: do not write them.
        begun: called with the number of each input before the input is run.
        limit_s: processor seconds that an input may take. 0: no limit. A limit works only in the main thread.
    """

    def __init__(
        self,
        target: Target,
        folder: Path | None = None,
        begun: Callable[[int], object] = lambda number: None,
        limit_s: float = 0.0,
    ) -> None:
        self.target, self._folder, self._begun, self._limit_s = target, folder, begun, limit_s
        self.report = Report(target.name)
        self._rng = random.Random()
        if limit_s:
            signal.signal(signal.SIGPROF, _hang)

    def one(self, data: bytes, seed: int = 0, number: int = 0) -> None:
        """Run one input and note its figures."""
        self._begun(number)
        started = time.process_time()
        try:
            if self._limit_s:
                signal.setitimer(signal.ITIMER_PROF, self._limit_s)
            self.target.run(data)
        except (Exception, Hang) as error:
            self._keep(error, seed, number, data)
        finally:
            if self._limit_s:
                signal.setitimer(signal.ITIMER_PROF, 0.0)
        self.report.inputs += 1
        self.report.slowest_s = max(self.report.slowest_s, time.process_time() - started)
        self.report.units = self.target.done

    def make(self, seed: int, number: int) -> bytes:
        """Make the input with this number."""
        self._rng.seed(seed << 48 | number)
        return self.target.make(self._rng)

    def many(self, seed: int, inputs: int, start: int = 0, leave_out: Container[int] = ()) -> Report:
        """Run inputs ``start`` to ``start + inputs - 1`` of a seed, except those in ``leave_out``."""
        began, cpu = time.perf_counter(), time.process_time()
        for number in range(start, start + inputs):
            if number not in leave_out:
                self.one(self.make(seed, number), seed, number)
        self.report.seconds += time.perf_counter() - began
        self.report.cpu_s += time.process_time() - cpu
        return self.report

    def _keep(self, error: BaseException, seed: int, number: int, data: bytes) -> None:
        place = _place(error)
        known = self.report.findings.get(place)
        if known is not None:
            known.count += 1
            return
        text = "".join(traceback.format_exception(error))[-4000:]
        finding = self.report.findings[place] = Finding(place, text, seed, number)
        if self._folder is not None:
            finding.file = save(self._folder, self.target.name, finding, data)


def save(folder: Path, target: str, finding: Finding, data: bytes) -> str:
    """Write a failing input and its traceback. Return the path of the input."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target}-{finding.seed}-{finding.number}.bin"
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(
        f"{target}, seed {finding.seed}, input {finding.number}\n{finding.text}", errors="backslashreplace"
    )
    return str(path)


def _place(error: BaseException) -> str:
    """Return the place of a failure. Failures at the same place count as one finding."""
    # A hang is interrupted at a random line, so its place means nothing.
    if isinstance(error, Hang):
        return "an input took too long"
    frames = traceback.extract_tb(error.__traceback__)
    last = ([f for f in frames if "/fuzz" not in f.filename] or [*frames])[-1]
    text = str(error).partition(":")[0][:60] if isinstance(error, AssertionError) else ""
    return f"{type(error).__name__} {text} in {Path(last.filename).name}:{last.lineno}"


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang
