"""Process that generates and scores questions of reasoning_gym, with as few rights as possible.

`envs.scoring.scorer` starts it as ``python -m envs.scoring.worker``. Messages on stdin and stdout are MessagePack
maps, each after its 4-byte little-endian length. The first message opens a family. Before the process reads
any answer of a model, it gives up its rights: it writes no files, makes no namespaces, has no network where
the kernel allows that, and becomes an unprivileged user if it was root. It starts no processes, except one for
each answer to a family whose scorer would *run* the answer as Python, see `envs.scoring.questions` and
`envs.scoring.confinement`.
"""

import os
import struct
from functools import partial
from typing import Any, BinaryIO

import msgspec

from envs.scoring.confinement import (
    AnswerTimedOut,
    allow_cpu,
    die_with_parent,
    give_up_rights,
    inside_bubblewrap,
    score_apart,
)
from envs.scoring.questions import Questions, family_names, fields_of, open_family, refuse_code

MAX_FRAME = 4 * 1024 * 1024
SCORE_CPU_S = 3
CPU_S = 30


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


def reply_to(questions: Questions, request: dict[str, Any], *, apart: bool) -> dict[str, Any]:
    """Return the reply to one request. Raises whatever the library raises.

    Args:
        apart: whether each answer is scored in a process of its own.
    """
    allow_cpu(SCORE_CPU_S if request["op"] == "score" else CPU_S)
    match request["op"]:
        case "entry":
            position, entry = questions.find(request["index"], request["split"])
            solution = entry["answer"]
            return {
                "position": position,
                "question": entry["question"],
                "answer": solution and str(solution),
                "fields": fields_of(entry),
            }
        case "score":
            # The entry is made here, so that children need not make it again.
            questions.at(request["position"])
            score = partial(questions.score, request["position"], request["answer"])
            return {"score": score_apart(score, request["limit_s"]) if apart else score()}
    raise ValueError(f"unknown request {request['op']!r}")


def _private_streams() -> tuple[BinaryIO, BinaryIO]:
    """Move the pipes to new file descriptors, so that a scorer's prints do not mix with the messages."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return source, sink


def _send(sink: BinaryIO, message: dict[str, Any]) -> None:
    sink.write(frame(message))
    sink.flush()


def main() -> None:
    die_with_parent()
    source, sink = _private_streams()
    request = read_frame(source)
    if request is None:
        return
    try:
        if request["bubblewrap"] and not inside_bubblewrap():
            raise PermissionError("the process was to run inside bubblewrap, but it sees the host")
        questions = open_family(request)
        # The first question imports modules, which is slow and must happen while files are readable.
        position, entry = questions.find(0, "train")
        if apart := bool(request["apart"]):
            refuse_code()
            # Scoring imports more modules. A child would import them again for each answer.
            questions.score(position, str(entry["answer"]))
    except Exception as error:
        unknown = isinstance(error, LookupError)
        names = family_names() if unknown and "family" in str(error) else []
        _send(sink, {"error": f"{type(error).__name__}: {error}", "names": names})
        return
    # From here on stderr goes to /dev/null, because a model may control what is written to it.
    os.dup2(1, 2)
    give_up_rights(may_fork=apart)
    _send(sink, {"opened": True})
    while (request := read_frame(source)) is not None:
        try:
            _send(sink, reply_to(questions, request, apart=apart))
        except AnswerTimedOut as error:
            _send(sink, {"error": str(error), "timed_out": True})
        except Exception as error:
            _send(sink, {"error": f"{type(error).__name__}: {error}"[:500]})


if __name__ == "__main__":
    main()
