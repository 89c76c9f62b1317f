"""Process that generates and scores questions of reasoning_gym, with as few rights as possible.

`envs.scorer` starts it as ``python -m envs.scorer_worker``. Messages on stdin and stdout are MessagePack
maps, each after its 4-byte little-endian length. The first message opens a family. Before the process reads
any answer of a model, it gives up its rights: it starts no processes, writes no files, has no network where
the kernel allows that, and becomes an unprivileged user if it was root. This is needed because some families
*run* the answer as Python.
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

# These families draw a list of `size` entries when they are made, or refuse a large size.
COUNTED_FAMILIES = {"list_functions", "gsm_symbolic", "acre", "word_ladder", "composite"}
COUNTED_SIZE = 20_000

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """Read the next message. Return None at the end of the stream.

    Raises:
        ValueError: the message is too large.
    """
    head = stream.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    if size > MAX_FRAME:
        raise ValueError(f"frame of {size} bytes, at most {MAX_FRAME}")
    return msgspec.msgpack.decode(stream.read(size), type=dict[str, Any])


def frame(message: dict[str, Any]) -> bytes:
    """Return the bytes of one message, with its length in front.

    Raises:
        ValueError: the message is too large.

    Example:
        >>> frame({"score": 1.0})[:4]
        b'\\x10\\x00\\x00\\x00'
    """
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME:
        raise ValueError(f"frame of {len(payload)} bytes, at most {MAX_FRAME}")
    return struct.pack("<I", len(payload)) + payload


def split_of(question: str, heldout_share: float) -> str:
    """Return the split of a question. A hash of its text decides, so equal questions are in one split.

    Example:
        >>> split_of("1 + 1 =", 0.0), split_of("1 + 1 =", 1.0)
        ('train', 'heldout')
    """
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "little") < heldout_share * 2**64 else "train"


class Questions:
    """Entries of one family, found by (index, split).

    Task ``index`` of a split is the first entry of that split among the library's entries ``64 * index``,
    ``64 * index + 1``, and so on. Both splits of one index start at the same place and never share an entry.
    Two indices give different entries, unless 64 entries in a row all belong to the other split.
    """

    def __init__(self, dataset: Any, size: int, heldout_share: float) -> None:
        self._dataset, self._size, self._share = dataset, size, heldout_share
        self._cache: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def at(self, position: int) -> dict[str, Any]:
        """Return the entry at a position of the library's numbering."""
        if position not in self._cache:
            self._cache[position] = self._dataset[position]
            if len(self._cache) > CACHED_ENTRIES:
                self._cache.popitem(last=False)
        return self._cache[position]

    def find(self, index: int, split: str) -> tuple[int, dict[str, Any]]:
        """Return the position and entry of a task.

        Raises:
            LookupError: none of `WALK_LIMIT` entries is in the split.
        """
        for step in range(WALK_LIMIT):
            position = (index * WALK_STRIDE + step) % self._size
            entry = self.at(position)
            if split_of(entry["question"], self._share) == split:
                return position, entry
        raise LookupError(f"no {split} question among {WALK_LIMIT} from {index}; is heldout_share 0 or 1?")

    def score(self, position: int, answer: str) -> float:
        """Return the score of an answer to the entry at ``position``, in [0, 1].

        Raises:
            ValueError: the scorer returned anything else.
        """
        score = float(self._dataset.score_answer(answer, self.at(position)))
        if 1.0 < score <= 1.0 + ROUNDING:
            # A sum of parts was rounded up. Return just below 1, because only an exactly right answer gets 1.
            score = math.nextafter(1.0, 0.0)
        if not (math.isfinite(score) and 0.0 <= score <= 1.0):
            raise ValueError(f"scorer returned {score!r}, not a number in [0, 1]")
        return score


def open_family(request: dict[str, Any]) -> Questions:
    """Make the dataset of a family.

    Raises:
        LookupError: the family is unknown.
        TypeError: a setting is wrong.
    """
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
    """Give up rights: no new processes, no writing to files, bounded memory, no network if possible, no root.

    A process of root becomes the user nobody.
    """
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
    # Set this again, because a change of user clears it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.chdir("/")


def _leave_network(libc: ctypes.CDLL) -> None:
    if libc.unshare(_CLONE_NEWNET) != 0 and os.geteuid() != 0:
        # The kernel may forbid this. The process is still unprivileged then.
        libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def inside_bubblewrap() -> bool:
    """Return whether this process is really isolated: a first process, no network, no /sys."""
    network = {name for _, name in socket.if_nameindex()}
    return os.getpid() <= 3 and network <= {"lo"} and not os.path.exists("/sys")


def allow_cpu(seconds: int) -> None:
    """Limit the CPU time of the next request. The kernel kills a process that exceeds it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def answer(questions: Questions, request: dict[str, Any]) -> dict[str, Any]:
    """Return the reply to one request. Raises whatever the library raises."""
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
    """Move the pipes to new file descriptors, so that a scorer's prints do not mix with the messages."""
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
        # The first question imports modules, which is slow and must happen while files are readable.
        questions.find(0, "train")
    except Exception as error:
        unknown = isinstance(error, LookupError)
        names = family_names() if unknown and "family" in str(error) else []
        _reply(sink, {"error": f"{type(error).__name__}: {error}", "names": names})
        return
    # From here on stderr goes to /dev/null, because a model may control what is written to it.
    os.dup2(1, 2)
    give_up_rights()
    _reply(sink, {"opened": True})
    while (request := read_frame(source)) is not None:
        try:
            _reply(sink, answer(questions, request))
        except Exception as error:
            _reply(sink, {"error": f"{type(error).__name__}: {error}"[:500]})


if __name__ == "__main__":
    main()
