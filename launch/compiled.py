"""`offbeat compile`: the broker's decisions as C extensions, made by mypyc from the sources that run otherwise.

The extensions lie in a folder of the cache that is named after a hash of those sources, and a broker uses them if they
are there. So nothing is ever stale: after any change of the sources the broker runs them as they are, until somebody
compiles again.
"""

import hashlib
import importlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

import broker
import protocol
from launch.errors import ConfigError

log = logging.getLogger(__name__)

MODULES = (
    "units", "tasks", "deliveries", "books", "actor_side", "learner_side", "state", "admission", "peers", "desk",
    "journal", "journal_store", "journal_writer", "recent", "store", "callers", "service",
)  # fmt: skip
"""Of the package `broker`: what is run for each message. Records and events are no part of it: msgspec reads them from
their annotations, which a compiled class has not; and a compiled class may not be the base of one that is not."""
TIMEOUT_S = 1200.0


def folder() -> Path:
    """Where the extensions of the present sources lie, if anybody has made them."""
    digest = hashlib.sha256(f"{sysconfig.get_config_var('EXT_SUFFIX')} {MODULES}".encode())
    for package in (broker, protocol):
        for source in sorted(Path(package.__path__[-1]).glob("*.py")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "offbeat" / f"broker-{digest.hexdigest()[:16]}"


def make() -> Path:
    """Compile, unless it is done; gives the folder. Takes a minute or two, a C compiler and mypy.

    Raises:
        ConfigError: it cannot be compiled, or not be kept; the text has the end of what was said.
    """
    try:
        target = folder()
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if why := _why_untrusted([target.parent]):
                raise ConfigError(why)
            _make(target)
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"the compiled broker cannot be kept: {error}; XDG_CACHE_HOME names another place"
        ) from None
    if why := _why_untrusted(_parts(target)):
        raise ConfigError(why)
    return target


def _make(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        for package in (broker, protocol):
            shutil.copytree(
                package.__path__[-1],
                work / package.__name__,
                ignore=lambda _, names: [n for n in names if not n.endswith(".py")],
            )
        _mypyc(work)
        made = work / "made"
        for built, into in ((work, made), (work / "broker", made / "broker")):
            into.mkdir(mode=0o700)
            for extension in built.glob("*.so"):
                extension.chmod(0o600)
                extension.rename(into / extension.name)
        try:
            made.rename(target)
        except OSError:
            if not target.exists():  # somebody else was sooner
                raise


def _mypyc(work: Path) -> None:
    sources = [f"broker/{module}.py" for module in MODULES]
    command = [sys.executable, "-c", "from mypyc.__main__ import main; main()", *sources]
    environment = os.environ | {
        "MYPY_CACHE_DIR": str(work / "cache"),
        "PYTHONPATH": str(work),
        "MYPYC_DEBUG_LEVEL": "0",
    }
    with subprocess.Popen(
        command,
        cwd=work,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            said, _ = child.communicate(timeout=TIMEOUT_S)
        except BaseException as error:  # the compiler, too, which is a child of this child
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise ConfigError(f"mypyc has not ended within {TIMEOUT_S:g} s") from None
            raise
    if child.returncode:
        raise ConfigError(
            f"the broker cannot be compiled:\n{said[-2000:]}\nIt takes a C compiler, the headers of this Python, mypy "
            "and setuptools (pip install 'offbeat[compile]'). The broker runs without, too"
        )


def use() -> bool:
    """Load the extensions into this process, if they are there; before anything of the broker is loaded.

    Whatever is wrong with them, the broker runs from its sources then, and the log says why.
    """
    if any(f"broker.{module}" in sys.modules for module in MODULES):
        return False
    try:
        made = folder()
        if not made.exists():
            return False
        if why := _why_untrusted(_parts(made)):
            log.warning("the compiled broker is not used: %s", why)
            return False
    except (OSError, RuntimeError) as error:  # no home, or one that cannot be read
        log.warning("no compiled broker is looked for: %s", error)
        return False
    return _load(made)


def _load(made: Path) -> bool:
    before = set(sys.modules)
    sys.path.append(str(made))
    broker.__path__.insert(0, str(made / "broker"))
    try:
        for module in MODULES:
            importlib.import_module(f"broker.{module}")
    except ImportError as error:  # made on another machine, or cut off
        sys.path.remove(str(made))
        broker.__path__.remove(str(made / "broker"))
        for name in [name for name in sys.modules if name.startswith("broker.") and name not in before]:
            del sys.modules[name]
        log.warning("the compiled broker cannot be loaded, delete %s: %s", made, error)
        return False
    log.info("the broker runs compiled")
    return True


def _parts(made: Path) -> list[Path]:
    return [made.parent, made, made / "broker", *made.rglob("*.so")]


def _why_untrusted(paths: Iterable[Path]) -> str:
    """Why these must not be loaded as code: another than this user, or root, could have put them there."""
    for path in paths:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            return f"{path} is a link"
        if found.st_uid not in (0, os.getuid()):
            return f"{path} belongs to another user"
        if found.st_mode & 0o022:
            return f"{path} can be written by other users"
    return ""
