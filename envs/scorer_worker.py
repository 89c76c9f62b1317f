"""Process that generates and scores questions of reasoning_gym, with as few rights as possible.

Started by `envs.scorer` as ``python -m envs.scorer_worker``. Messages on stdin and stdout are MessagePack
maps behind a 4-byte little-endian length. The first one opens a family; then, before any answer of a model is
looked at, the process gives up its rights: no new processes, no files written, no network where the kernel
allows it, an unprivileged user if it was root. Some families *run* the answer as Python, so this is needed.
"""

import ctypes
import hashlib
import math
import os
import resource
import signal
import socket
import struct
from collections import OrderedDict
from typing import Any, BinaryIO

import msgspec

MAX_FRAME = 4 * 1024 * 1024
NOBODY = 65_534
MEMORY_BYTES = 2 << 30
SCORE_CPU_S = 3
CPU_S = 30
WALK_STRIDE = 64
WALK_LIMIT = 4_096
ENDLESS = 1 << 40
CACHED_ENTRIES = 256
ROUNDING = 1e-9

# These draw a list of `size` entries when they are made, or refuse a large size.
COUNTED_FAMILIES = {"list_functions", "gsm_symbolic", "acre", "word_ladder", "composite"}
COUNTED_SIZE = 20_000

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """Next message, None at the end of the stream; raises ValueError when it is too large."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    if size > MAX_FRAME:
        raise ValueError(f"frame of {size} bytes, at most {MAX_FRAME}")
    return msgspec.msgpack.decode(stream.read(size), type=dict[str, Any])


def frame(message: dict[str, Any]) -> bytes:
    """Bytes of one message.

    Example:
        >>> frame({"score": 1.0})[:4]
        b'\\x10\\x00\\x00\\x00'
    """
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME:
        raise ValueError(f"frame of {len(payload)} bytes, at most {MAX_FRAME}")
    return struct.pack("<I", len(payload)) + payload


def split_of(question: str, heldout_share: float) -> str:
    """Split a question belongs to: a hash of its text, so that equal questions never stand on both sides.

    Example:
        >>> split_of("1 + 1 =", 0.0), split_of("1 + 1 =", 1.0)
        ('train', 'heldout')
    """
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "little") < heldout_share * 2**64 else "train"


class Questions:
    """Entries of one family, found by (index, split).

    Task ``index`` of a split is the first entry of that split among the library's entries ``64 * index``,
    ``64 * index + 1``, ... So the two splits of one index start from the same place and never meet, and two
    indices give different entries unless 64 in a row are all of the other split.
    """

    def __init__(self, dataset: Any, size: int, heldout_share: float) -> None:
        self._dataset, self._size, self._share = dataset, size, heldout_share
        self._cache: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def at(self, position: int) -> dict[str, Any]:
        """Entry at a position of the library's own numbering."""
        if position not in self._cache:
            self._cache[position] = self._dataset[position]
            if len(self._cache) > CACHED_ENTRIES:
                self._cache.popitem(last=False)
        return self._cache[position]

    def find(self, index: int, split: str) -> tuple[int, dict[str, Any]]:
        """Position and entry of a task; raises LookupError when the walk finds none."""
        for step in range(WALK_LIMIT):
            position = (index * WALK_STRIDE + step) % self._size
            entry = self.at(position)
            if split_of(entry["question"], self._share) == split:
                return position, entry
        raise LookupError(f"no {split} question among {WALK_LIMIT} from {index}; is heldout_share 0 or 1?")

    def score(self, position: int, answer: str) -> float:
        """Score in [0, 1] of an answer to the entry at ``position``; raises ValueError for anything else."""
        score = float(self._dataset.score_answer(answer, self.at(position)))
        if 1.0 < score <= 1.0 + ROUNDING:
            score = math.nextafter(1.0, 0.0)  # a sum of parts; what is exactly right is returned as 1
        if not (math.isfinite(score) and 0.0 <= score <= 1.0):
            raise ValueError(f"scorer returned {score!r}, not a number in [0, 1]")
        return score


def open_family(request: dict[str, Any]) -> Questions:
    """Make the dataset; raises LookupError for an unknown family, TypeError for a wrong setting."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    family, config = request["family"], dict(request["config"])
    if family not in DATASETS:
        raise LookupError(f"unknown family {family!r}")
    size = config.setdefault("size", COUNTED_SIZE if family in COUNTED_FAMILIES else ENDLESS)
    dataset = reasoning_gym.create_dataset(family, seed=request["seed"], **config)
    return Questions(dataset, size, request["heldout_share"])


def family_names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(DATASETS)


def give_up_rights() -> None:
    """No processes, no file contents, bounded memory, no network if possible, user nobody if we were root."""
    libc = ctypes.CDLL(None, use_errno=True)
    _leave_network(libc)
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_AS, MEMORY_BYTES),
    ):
        resource.setrlimit(limit, (value, value))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # again: a change of user clears it
    os.chdir("/")


def _leave_network(libc: ctypes.CDLL) -> None:
    if libc.unshare(_CLONE_NEWNET) != 0 and os.geteuid() != 0:
        libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)  # may be forbidden; the process is still unprivileged


def inside_bubblewrap() -> bool:
    """Whether this process really is in a namespace of its own: first process, no network, no host files."""
    network = {name for _, name in socket.if_nameindex()}
    return os.getpid() <= 3 and network <= {"lo"} and not os.path.exists("/sys")


def allow_cpu(seconds: int) -> None:
    """Computing time for the next request; beyond it the kernel kills us, whatever our parent does."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def answer(questions: Questions, request: dict[str, Any]) -> dict[str, Any]:
    """Reply to one request; raises whatever the library raises."""
    allow_cpu(SCORE_CPU_S if request["op"] == "score" else CPU_S)
    match request["op"]:
        case "entry":
            position, entry = questions.find(request["index"], request["split"])
            solution = entry["answer"]
            return {"position": position, "question": entry["question"], "answer": solution and str(solution)}
        case "score":
            return {"score": questions.score(request["position"], request["answer"])}
    raise ValueError(f"unknown request {request['op']!r}")


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
    """Our pipes under new numbers: what a scorer prints must not end up between our messages."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return source, sink


def _reply(sink: BinaryIO, message: dict[str, Any]) -> None:
    sink.write(frame(message))
    sink.flush()


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    source, sink = _private_streams()
    request = read_frame(source)
    if request is None:
        return
    try:
        if request["bubblewrap"] and not inside_bubblewrap():
            raise PermissionError("the process was to run inside bubblewrap, but it sees the host")
        questions = open_family(request)
        questions.find(0, "train")  # slow, and what it imports must be imported while files are readable
    except Exception as error:
        unknown = isinstance(error, LookupError)
        names = family_names() if unknown and "family" in str(error) else []
        _reply(sink, {"error": f"{type(error).__name__}: {error}", "names": names})
        return
    os.dup2(1, 2)  # from here on, what is written may come from a model
    give_up_rights()
    _reply(sink, {"opened": True})
    while (request := read_frame(source)) is not None:
        try:
            _reply(sink, answer(questions, request))
        except Exception as error:
            _reply(sink, {"error": f"{type(error).__name__}: {error}"[:500]})


if __name__ == "__main__":
    main()
