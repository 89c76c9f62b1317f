"""`offbeat compile`: the broker's decisions as C extensions, made by mypyc from the sources that run otherwise.

The extensions lie in a folder of the cache that is named after a hash of those sources, and a broker uses them if they
are there. So nothing is ever stale: after any change of the sources the broker runs them as they are, until somebody
compiles again.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import broker
import protocol
from launch.errors import ConfigError

log = logging.getLogger(__name__)

MODULES = (
    "units", "tasks", "deliveries", "books", "actor_side", "learner_side", "state", "admission", "peers", "desk",
    "journal", "callers", "service",
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
        ConfigError: it cannot be compiled; the text has the end of what was said.
    """
    target = folder()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
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
        (made / "broker").mkdir(parents=True)
        for extension in work.glob("*.so"):
            extension.rename(made / extension.name)
        for extension in (work / "broker").glob("*.so"):
            extension.rename(made / "broker" / extension.name)
        made.rename(target)
    return target


def _mypyc(work: Path) -> None:
    sources = [f"broker/{module}.py" for module in MODULES]
    command = [sys.executable, "-c", "from mypyc.__main__ import main; main()", *sources]
    environment = os.environ | {
        "MYPY_CACHE_DIR": str(work / "cache"),
        "PYTHONPATH": str(work),
        "MYPYC_DEBUG_LEVEL": "0",
    }
    try:
        done = subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"mypyc has not ended within {TIMEOUT_S:g} s") from None
    if done.returncode:
        said = (done.stdout + done.stderr)[-2000:]
        raise ConfigError(
            f"the broker cannot be compiled:\n{said}\nIt takes a C compiler, the headers of this Python, mypy and "
            "setuptools (pip install 'offbeat[compile]'). The broker runs without, too"
        )


def use() -> bool:
    """Let this process run the extensions, if they are there; before anything of the broker is loaded."""
    made = folder()
    if not made.is_dir() or any(f"broker.{module}" in sys.modules for module in MODULES):
        return False
    if os.name == "posix" and made.stat().st_uid not in (0, os.getuid()):
        log.warning("%s belongs to another user and is not used", made)
        return False
    sys.path.insert(0, str(made))
    broker.__path__.insert(0, str(made / "broker"))
    log.info("the broker runs compiled")
    return True
