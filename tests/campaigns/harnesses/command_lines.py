"""Command line agents, each started as its documentation has it, in a home and a folder of its own.

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python command_lines.py NAME FOLDER < row.json

FOLDER has the agent's programs. Each agent is asked 12 + 7, and prints its answer. Nothing in them knows of Offbeat.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

BASE_URL = os.environ.get("OPENAI_BASE_URL", "")
MODEL = "policy"


def codex(programs: Path, home: Path, question: str) -> None:
    # Codex takes no base URL from the environment.
    provider = (
        f'{{name = "policy", base_url = "{BASE_URL}", env_key = "OPENAI_API_KEY", wire_api = "responses"}}'
    )
    settings = (f'model = "{MODEL}"', 'model_provider = "policy"', f"model_providers.policy = {provider}")
    (home / "config.toml").write_text("\n".join(settings) + "\n")
    options = "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"
    run([programs / "codex", "exec", *options, question], home, {"CODEX_HOME": str(home)})


def opencode(programs: Path, home: Path, question: str) -> None:
    options = {"baseURL": BASE_URL, "apiKey": "{env:OPENAI_API_KEY}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: {}}}
    settings = {"provider": {"policy": provider}, "autoupdate": False, "permission": "allow"}
    (home / "opencode.json").write_text(json.dumps(settings))
    folders = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "STATE", "CACHE")}
    offline = dict.fromkeys(("OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH"), "1")
    run([programs / "opencode", "run", "--model", f"policy/{MODEL}", question], home, folders | offline)


def mini_swe_agent(programs: Path, home: Path, question: str) -> None:
    variables = {
        "MSWEA_GLOBAL_CONFIG_DIR": str(home),
        "MSWEA_CONFIGURED": "true",
        # The policy has no price, and the list of prices is not to be fetched.
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    options = "--model", f"openai/{MODEL}", "--yolo", "--exit-immediately", "--cost-limit", "0"
    run([programs / "mini", *options, "--task", question], home, variables)


def run(command: list[str | Path], folder: Path, variables: dict[str, str]) -> None:
    """Run a command. End with its status if it fails."""
    # Some read their folder from this variable.
    here = {"PWD": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | here | variables, stdin=subprocess.DEVNULL, timeout=300
    )
    if done.returncode:
        sys.exit(done.returncode)


AGENTS: dict[str, Callable[[Path, Path, str], None]] = {
    "codex": codex,
    "opencode": opencode,
    "mini-swe-agent": mini_swe_agent,
}

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        AGENTS[sys.argv[1]](Path(sys.argv[2]), Path(home), json.load(sys.stdin)["question"])
