"""Mark of tests that need bubblewrap. They are skipped, with the reason, where it does not start."""

import shutil
import subprocess

import pytest


def reason():
    """Return why bubblewrap cannot be used here; empty if it can."""
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed (package bubblewrap)"
    command = [program, "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return "" if said.returncode == 0 else f"bubblewrap does not start here: {said.stderr.strip()}"


_reason = reason()
needs_bubblewrap = pytest.mark.skipif(bool(_reason), reason=_reason or "bubblewrap starts")
