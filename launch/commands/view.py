"""`offbeat view`: shows runs in a browser, or writes a copy of the pages to a folder."""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.commands.status import CONFIGS, newest_run
from launch.errors import ConfigError
from launch.view.export import export
from launch.view.questions import Questions
from launch.view.recorded import DEMO, unpack
from launch.view.server import login_check, view_server
from protocol.errors import AddressRefused, KeysUnusable
from protocol.security.addresses import is_wildcard, split_address

RUNS = Path("runs")
LOOK_S = 60.0
NICE = 10


def view(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C, or write a copy. Return the exit code.

    Raises:
        ConfigError: a run, the address or the keys cannot be used.
    """
    # Rows of an index are no garbage, and there are many: Python would look through them again and again.
    gc.set_threshold(100_000, 50, 100)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    with _folders(args.runs, demo=args.demo) as folders:
        if args.export is not None:
            sys.stdout.write(export(Questions(folders), args.export) + "\n")
            return 0
        host, port = address(args.listen, args.keys)
        give_way()
        try:
            asyncio.run(_serve(folders, host, port, args.keys))
        except KeysUnusable as error:
            raise ConfigError(f"--keys: {error}") from None
        except OSError as error:
            raise ConfigError(f"--listen {args.listen}: {error.strerror or error}") from None
    return 0


def give_way() -> None:
    """Let other processes of this machine go first: whoever looks at a run must not slow it.

    On Linux this also holds for the threads that start later. A viewer never wakes up in front of a busy process
    (`SCHED_BATCH`), and gets a tenth of a core that others want (a niceness of 10).
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextlib.contextmanager
def _folders(runs: Sequence[Path], *, demo: bool) -> Iterator[list[Path]]:
    """Yield the run folders to show: the named ones, the recorded one, or the newest."""
    if not demo:
        yield run_folders(runs)
        return
    with tempfile.TemporaryDirectory(prefix="offbeat-demo-") as place:
        yield [*(run_folders(runs) if runs else []), unpack(DEMO, Path(place))]


def run_folders(runs: Sequence[Path]) -> list[Path]:
    """Return the named run folders, or the newest one if none is named.

    Raises:
        ConfigError: a folder is not there, or is not that of a run.
    """
    folders = list(runs) or [newest_run(RUNS)]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; name run folders, for example runs/NAME")
        if not any((folder / name).exists() for name in (*CONFIGS, "metrics.jsonl", "journal")):
            raise ConfigError(f"{folder} is not a run folder: it has neither {CONFIGS[0]} nor metrics.jsonl")
    return folders


def address(listen: str, keys: Path | None) -> tuple[str, int]:
    """Return host and port, and refuse an address that strangers could reach without the run's token.

    Raises:
        ConfigError: the text says what to do.

    Example:
        >>> address("127.0.0.1:6007", None)
        ('127.0.0.1', 6007)
        >>> address("0.0.0.0:6007", None)
        Traceback (most recent call last):
        launch.errors.ConfigError: --listen 0.0.0.0:6007: a browser is told one address; name one of this machine's, \
for example 10.0.0.5:6007
    """
    host = listen.rpartition(":")[0]
    if is_wildcard(host):
        raise ConfigError(
            f"--listen {listen}: a browser is told one address; name one of this machine's, for example 10.0.0.5:6007"
        )
    login_check(host, keys)
    try:
        return split_address("--listen", listen, keys)
    except AddressRefused as error:
        raise ConfigError(str(error)) from None


async def _serve(folders: Sequence[Path], host: str, port: int, keys: Path | None) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with view_server(Questions(folders), host, port, keys) as served:
        names = ", ".join(str(folder) for folder in folders)
        sys.stdout.write(f"showing {names}; open this link in a browser, end with Ctrl-C:\n  {served.url}\n")
        if keys is not None:
            sys.stdout.write(f"log in with the token that `offbeat keys header {keys}` prints\n")
        sys.stdout.flush()
        while not stopped.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await stopped.wait()
