"""Processes in which a program that a model wrote, or the tests of a row, run. Only the standard library is used.

A `program_worker` starts this file once for the program and, where there are calls to test, once for the tests. The
program's process never has an expected value. The tests' process never runs a line of the program: it sees the
program's functions as `Remote` objects, and what comes back from them is plain data. So each comparison with data of
the tests is made where the program cannot reach, and a program can forge no result.
"""

import builtins
import io
import math
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

FRAME_BYTES = 16 << 20
"""Longest message between the two processes."""
DEEPEST = 100
"""Deepest nesting of lists and tables in a message."""
CLOSE = 1e-6
"""Relative and absolute difference up to which decimal numbers count as equal."""
WHY_CHARS = 200
PROGRAM_FD_REQUESTS, PROGRAM_FD_REPLIES = 3, 4
TESTS_FD_VERDICTS = 5
_PLAIN = (bool, int, float, str, type(None))


class Ended(BaseException):
    """The other process has ended, or sent nonsense. A test that waits for an exception does not get this one."""


class NotLoaded(Ended):
    """The program ended before it could be called."""


def read_exactly(descriptor: int, size: int) -> bytes:
    """Read bytes from a pipe.

    Raises:
        Ended: the pipe was closed before.
    """
    pieces = bytearray()
    while len(pieces) < size:
        piece = os.read(descriptor, min(1 << 16, size - len(pieces)))
        if not piece:
            raise Ended("the other process has ended")
        pieces += piece
    return bytes(pieces)


def read_text(descriptor: int) -> str:
    """Read a text with its length of 4 bytes in front.

    Raises:
        Ended: the pipe was closed before, or the text is too long or no UTF-8.
    """
    (size,) = struct.unpack("<I", read_exactly(descriptor, 4))
    if size > FRAME_BYTES:
        raise Ended(f"a message of {size} bytes, at most {FRAME_BYTES}")
    try:
        return read_exactly(descriptor, size).decode()
    except UnicodeDecodeError:
        raise Ended("a message that is no text") from None


def write_text(descriptor: int, text: str) -> None:
    """Write a text with its length in front."""
    data = text.encode()
    left = memoryview(struct.pack("<I", len(data)) + data)
    while left:
        left = left[os.write(descriptor, left) :]


def packed(value: Any, handles: "Handles | None" = None, depth: int = 0) -> Any:
    """Return plain data as JSON's types. Kinds that JSON lacks become tables with one letter.

    Args:
        handles: keeps every other object; None: there may be none.

    Raises:
        TypeError: the value is neither plain nor may be kept, or is nested too deeply.

    Example:
        >>> packed({"a": (1, 2.5)})
        {'d': [['a', {'t': [1, 2.5]}]]}
    """
    if depth > DEEPEST:
        raise TypeError(f"data nested more than {DEEPEST} deep")
    if type(value) in _PLAIN:
        # A whole number of many digits has no text, by a limit of Python's.
        return {"i": hex(value)} if type(value) is int and value.bit_length() > 1_000 else value
    if isinstance(value, Remote):
        return {"h": value._number}
    for letter, kind in (("l", list), ("t", tuple), ("s", set), ("f", frozenset)):
        if type(value) is kind:
            return {letter: [packed(one, handles, depth + 1) for one in value]}
    if isinstance(value, dict):
        # Tables such as Counter and defaultdict equal a plain one with the same entries.
        pairs = dict.items(value)
        return {"d": [[packed(k, handles, depth + 1), packed(v, handles, depth + 1)] for k, v in pairs]}
    if type(value) in (bytes, bytearray):
        return {"b": bytes(value).hex()}
    if type(value) is complex:
        return {"c": [value.real, value.imag]}
    if handles is None:
        raise TypeError(f"an argument of type {type(value).__name__} cannot be handed to a program")
    return {"h": handles.keep(value)}


def unpacked(value: Any, remote: Any) -> Any:
    """Return the data of `packed`.

    Args:
        remote: returns what stands for an object with a number.

    Raises:
        ValueError: the value is none of `packed`.
    """
    if not isinstance(value, dict):
        if type(value) in _PLAIN:
            return value
        raise ValueError("a message of unknown form")
    if len(value) != 1:
        raise ValueError("a message of unknown form")
    ((letter, inner),) = value.items()
    match letter:
        case "i":
            return int(inner, 16)
        case "l" | "t" | "s" | "f":
            kinds: dict[str, Any] = {"l": list, "t": tuple, "s": set, "f": frozenset}
            return kinds[letter](unpacked(one, remote) for one in inner)
        case "d":
            return {unpacked(key, remote): unpacked(one, remote) for key, one in inner}
        case "b":
            return bytes.fromhex(inner)
        case "c":
            return complex(*inner)
        case "h":
            return remote(inner)
    raise ValueError("a message of unknown form")


# --- the program's side ---


class Handles:
    """Objects of a program that the tests know by number."""

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def keep(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def get(self, number: int) -> Any:
        return self._objects[number]


def load(program: str, name: str) -> ModuleType:
    """Run the text of a program as a module, and return it. Raises whatever the program raises."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(program, "program.py", "exec"), module.__dict__)
    return module


def _run_program() -> None:
    """Run a program that reads standard input: its text stands in front of the input, with its length."""
    program = read_text(0)
    load(program, "__main__")
    sys.stdout.flush()


def _serve_program() -> None:
    """Run a program as a module, and answer calls of its functions until the tests end."""
    program = read_text(0)
    import json

    handles = Handles()
    failed, module = "", ModuleType("program")
    try:
        module = load(program, "program")
    except BaseException as error:
        failed = f"{type(error).__name__}: {error}"[:WHY_CHARS].encode("utf-8", "replace").decode()
    while True:
        try:
            request = json.loads(read_text(PROGRAM_FD_REQUESTS))
        except Ended:
            return
        try:
            reply = {"failed": failed} if failed else _answer(request, module, handles)
        except BaseException as error:
            # Even SystemExit is an answer: the tests may wait for it.
            builtin = getattr(builtins, type(error).__name__, None) is type(error)
            kind = type(error).__name__ if builtin else "RuntimeError"
            text = str(error) if builtin else f"{type(error).__name__}: {error}"
            reply = {"raised": kind, "text": text[:WHY_CHARS].encode("utf-8", "replace").decode()}
        write_text(PROGRAM_FD_REPLIES, json.dumps(reply))


def _answer(request: dict[str, Any], module: ModuleType, handles: Handles) -> dict[str, Any]:
    """Return the reply to one request of a `Remote`."""
    name, number = request["name"], request["of"]
    arguments = [unpacked(one, handles.get) for one in request["args"]]
    named = {key: unpacked(one, handles.get) for key, one in request["named"].items()}
    if number is None:
        return {"value": packed(_found(module, name), handles)}
    own = handles.get(number)
    match request["op"]:
        case "call":
            result = own(*arguments, **named)
        case "get":
            result = getattr(own, name)
        case "set":
            setattr(own, name, arguments[0])
            result = None
        case "iter":
            result = iter(own)
        case "next":
            result = next(own)
        case "len":
            result = len(own)
        case "item":
            result = own[arguments[0]]
        case "text":
            result = str(own)
        case "bool":
            result = bool(own)
        case "same":
            result = bool(own == arguments[0])
        case "less":
            result = bool(own < arguments[0])
        case "is":
            result = isinstance(arguments[0], own)
        case _:
            raise ValueError("unknown request")
    # A function may change a list that it is given, which the tests look at afterwards.
    changed = {
        str(at): packed(now, handles)
        for at, now in enumerate(arguments)
        if isinstance(now, list | dict | set) and request["op"] == "call"
    }
    return {"value": packed(result, handles), "changed": changed}


def _found(module: ModuleType, name: str) -> Any:
    """Return the program's function of a name, or the method of this name of its class ``Solution``."""
    if name in module.__dict__:
        return module.__dict__[name]
    if (solution := module.__dict__.get("Solution")) is not None and hasattr(solution, name):
        return getattr(solution(), name)
    raise NameError(f"the program has no {name!r}")


# --- the tests' side ---


class Link:
    """The pipes to the program's process."""

    def ask(
        self, op: str, number: int | None, name: str = "", args: Any = (), named: Mapping[str, Any] = {}
    ) -> Any:
        """Send a request and return the value of the reply. Raises what the program raised, if it is built in.

        Raises:
            Ended: the program's process has ended, or sent nonsense.
        """
        import json

        request: dict[str, Any] = {"op": op, "of": number, "name": name}
        request["args"] = [packed(one) for one in args]
        request["named"] = {key: packed(one) for key, one in named.items()}
        try:
            write_text(PROGRAM_FD_REQUESTS, json.dumps(request))
            reply = json.loads(read_text(PROGRAM_FD_REPLIES))
            if "failed" in reply:
                raise NotLoaded(f"the program ended with {reply['failed']}")
            if "raised" in reply:
                raised, text = getattr(builtins, str(reply["raised"]), None), str(reply["text"])
                if not (isinstance(raised, type) and issubclass(raised, Exception)):
                    raised = RuntimeError
            else:
                raised, text = None, ""
                value = unpacked(reply["value"], self._remote)
                changed = {
                    int(at): unpacked(new, self._remote) for at, new in reply.get("changed", {}).items()
                }
        except OSError:
            raise Ended("the program ended its process") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Ended(f"the program sent nonsense ({type(error).__name__})") from None
        if raised is not None:
            raise _made(raised, text)
        for at, new in changed.items():
            _change(args[at], new)
        return value

    def _remote(self, number: Any) -> "Remote":
        if type(number) is not int:
            raise ValueError("a message of unknown form")
        return Remote(self, number)


def _made(kind: type[Exception], text: str) -> Exception:
    """Return an exception of a built-in kind; some take other arguments than a text."""
    try:
        return kind(text)
    except TypeError:
        return RuntimeError(f"{kind.__name__}: {text}")


def _change(given: Any, new: Any) -> None:
    """Make a list, a table or a set equal to a new one of its kind."""
    if type(given) is not type(new):
        return
    if isinstance(given, list):
        given[:] = new
    elif isinstance(given, dict | set):
        given.clear()
        given.update(new)


class Remote:
    """Stands for an object of the program: a function, a class, or what is no plain data.

    It never equals data of the tests, and there is no arithmetic with it: the program would decide the result.
    Two objects of the program are compared by the program.
    """

    def __init__(self, link: Link, number: int) -> None:
        self.__dict__["_link"], self.__dict__["_number"] = link, number

    def _ask(self, op: str, name: str = "", args: Any = (), named: Mapping[str, Any] = {}) -> Any:
        return self._link.ask(op, self._number, name, args, named)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._ask("call", "", args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, (value,))

    def __iter__(self) -> Iterator[Any]:
        own = self._ask("iter")
        if not isinstance(own, Remote):
            raise TypeError("not an iterator")
        while True:
            try:
                yield own._ask("next")
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", "", (key,))

    def __bool__(self) -> bool:
        return self._ask("bool") is True

    def __str__(self) -> str:
        return str(self._ask("text"))

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._ask("same", "", (other,)) is True

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Remote):
            return NotImplemented
        return self._ask("less", "", (other,)) is True

    def __hash__(self) -> int:
        return hash(self._number)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and self._ask("is", "", (instance,)) is True


def equal(value: Any, expected: Any) -> bool:
    """Return whether a result is the expected one: lists and tuples are alike, decimal numbers nearly equal.

    Example:
        >>> equal((1, 2), [1, 2]), equal(0.1 + 0.2, 0.3), equal(True, 1), equal("1", 1)
        (True, True, False, False)
    """
    if isinstance(expected, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(expected):
            return False
        return all(equal(one, other) for one, other in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or len(value) != len(expected):
            return False
        # The keys of JSON's tables are texts.
        texts = {str(key): one for key, one in value.items()}
        return len(texts) == len(value) and all(
            str(key) in texts and equal(texts[str(key)], one) for key, one in expected.items()
        )
    if isinstance(expected, bool) or isinstance(value, bool):
        return type(value) is type(expected) and value == expected
    if isinstance(expected, float) and isinstance(value, int | float):
        return value == expected or math.isclose(value, expected, rel_tol=CLOSE, abs_tol=CLOSE)
    return bool(type(value) in (*_PLAIN, bytes, complex, set, frozenset) and value == expected)


def _test_program() -> None:
    """Run the tests of one row against the program's process, and write a verdict for each."""
    import json

    job = json.loads(read_text(0))
    sys.stdin = io.StringIO("")
    link = Link()
    for test in job["tests"]:
        gone = False
        try:
            why = _tried(test, job["setup"], link)
        except BaseException as error:
            gone = isinstance(error, Ended) and not isinstance(error, NotLoaded)
            name = "" if isinstance(error, AssertionError | Ended) else f"{type(error).__name__}: "
            why = f"{name}{error}" or "the assertion does not hold"
        text = why[:WHY_CHARS].encode("utf-8", "replace").decode()
        write_text(TESTS_FD_VERDICTS, json.dumps({"why": text, "gone": gone}))


def _tried(test: dict[str, Any], setup: str, link: Link) -> str:
    """Try one test. Return why it fails, or "". Raises what the test raises."""
    if "call" in test:
        result: Any = link.ask("get", None, test["call"])
        if not isinstance(result, Remote):
            return f"{test['call']} is no function"
        result = result(*test["args"])
        if isinstance(result, Remote):
            # What can be gone through, such as a generator, is as good as a list of as many.
            most = len(test["expected"]) + 1 if isinstance(test["expected"], list) else 0
            result = [one for _, one in zip(range(most), result, strict=False)]
        if any(equal(result, one) for one in (test["expected"], *test["or"])):
            return ""
        return f"{test['call']} returned {result!r:.80}, expected {test['expected']!r:.80}"
    names = {name: link.ask("get", None, name) for name in test["names"] if _has(link, name)}
    own = {"__name__": "tests", **names}
    # The setup may import, and define what stands beside the program.
    exec(compile(setup, "setup.py", "exec"), own)
    exec(compile(test["code"], "test.py", "exec"), own)
    return ""


def _has(link: Link, name: str) -> bool:
    try:
        link.ask("get", None, name)
    except NameError:
        return False
    return True


def main() -> None:
    match sys.argv[1]:
        case "run":
            _run_program()
        case "serve":
            _serve_program()
        case "test":
            _test_program()


if __name__ == "__main__":
    main()
