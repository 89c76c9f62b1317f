"""Installs harnesses: Python packages into virtual environments, npm packages into folders, each on its own."""

import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = {
    "langgraph": ["langgraph==1.2.22", "langchain", "langchain-openai==1.7.3"],
    "openai-agents": ["openai-agents==0.24.0"],
    "smolagents": ["smolagents[openai]==1.26.0"],
    "strands": ["strands-agents[openai]==1.62.0"],
}
"""Requirements of Python by the first word of an agent's name."""
NPM_PACKAGES = {"codex": ["@openai/codex@0.169.0"], "opencode": ["opencode-ai@1.18.33"]}
"""Packages of npm by the first word of an agent's name."""
PROGRAMS = Path(__file__).with_name("programs.py")
COMMAND_LINES = Path(__file__).with_name("command_lines.py")


def command_of(agent: str, folder: Path) -> list[str]:
    """Return the command that runs an agent. What it needs is installed under a folder, if it is not there."""
    library = agent.split(",")[0]
    home = (folder / library).absolute()
    made = home / "made"
    if library in NPM_PACKAGES:
        if not made.exists():
            install = "npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home)
            subprocess.run([*install, *NPM_PACKAGES[library]], check=True)
            made.touch()
        return [sys.executable, str(COMMAND_LINES), agent, str(home / "node_modules" / ".bin")]
    python = home / "bin" / "python"
    if not made.exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES[library]], check=True)
        made.touch()
    return [str(python), str(PROGRAMS), agent]
