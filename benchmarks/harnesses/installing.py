"""Installs harnesses: Python packages into virtual environments, npm packages into folders, each on its own."""

import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = {
    # litellm wants mcp as soon as a request has tools.
    "mini-swe-agent": ["mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp"],
    "inspect-ai": ["inspect-ai==0.3.285", "openai"],
    "verifiers": ["verifiers==0.4.0", "uv"],
    "langgraph": ["langgraph==1.2.22", "langchain", "langchain-openai==1.7.3"],
    "openai-agents": ["openai-agents==0.24.0"],
    "smolagents": ["smolagents[openai]==1.26.0"],
    # No agent, but servers of environments, which the end-to-end tests play.
    "openenv": ["openenv-core==0.3.0"],
    "strands": ["strands-agents[openai]==1.62.0"],
}
"""Requirements of Python by library, the first word of an agent's name."""
NPM_PACKAGES = {"codex": ["@openai/codex@0.169.0"], "opencode": ["opencode-ai@1.18.33"]}
"""Packages of npm by library."""
COMMAND_LINE_AGENTS = ("codex", "opencode", "mini-swe-agent")
PROGRAMS = Path(__file__).with_name("programs.py")
COMMAND_LINES = Path(__file__).with_name("command_lines.py")


def command_of(agent: str, folder: Path) -> list[str]:
    """Return the command that runs an agent. What it needs is installed under a folder, if it is not there."""
    library = agent.split(",")[0]
    programs = programs_of(library, folder)
    if library in COMMAND_LINE_AGENTS:
        return [sys.executable, str(COMMAND_LINES), agent, str(programs)]
    return [str(programs / "python"), str(PROGRAMS), agent]


def programs_of(library: str, folder: Path) -> Path:
    """Return the folder with the programs of a library, which is installed if it is not there."""
    home = (folder / library).absolute()
    made = home / "made"
    if not made.exists():
        install(library, home)
        made.touch()
    return home / ("node_modules/.bin" if library in NPM_PACKAGES else "bin")


def install(library: str, home: Path) -> None:
    """Install the packages of a library into a folder."""
    if library in NPM_PACKAGES:
        npm = "npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home)
        subprocess.run([*npm, *NPM_PACKAGES[library]], check=True)
        return
    venv.create(home, with_pip=True, clear=True)
    pip = home / "bin" / "python", "-m", "pip", "install", "--quiet"
    subprocess.run([*pip, *PACKAGES[library]], check=True)
