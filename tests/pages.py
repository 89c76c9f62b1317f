"""Read the fenced blocks of a page of the documentation, and run them in the order of the page.

A block stands for the file that its page names: in the block's first line (`# sums.toml`), or as the last file in
backticks of the sentence before. A comment in front of a block says what a reader sees from the context:

- `<!-- not run: REASON -->`: the block is not executed. The test prints the reason.
- `<!-- adds to: FILE -->`: the block goes behind what the file has.
- `<!-- over: FILE -->`: the block is a part of a run file; it is loaded over this one.
- `<!-- with: OVERRIDES -->`: what is appended to the commands of the block, so that they take seconds.
- `<!-- two-hosts: WHERE -->`: tests/e2e/test_two_hosts.py runs the block.
- `<!-- fleet: WHERE -->`: tests/e2e/test_fleet_page.py runs the block.
- `<!-- background -->`: the command, or the program, stays while the rest of the page runs.
- `<!-- program -->`: the file is a program, which runs in a process of its own.
"""

import contextlib
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launch.cli import main
from launch.run_file.load import load

ROOT = Path(__file__).parents[1]
CODE = {"python", "toml", "json", "sh", "console"}
"""Languages that are executed. Blocks in other languages, or in none, show output or a picture."""
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_FILE = r"[\w./-]+\.(?:jsonl|json|py|toml|txt)"


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    comment: str
    """The HTML comment in the line before; empty if there is none."""
    before: str
    """The paragraph before."""

    @property
    def reason(self) -> str:
        """Why the block is not run here; empty if it is."""
        if self.said("two-hosts"):
            return "tests/e2e/test_two_hosts.py runs it on two hosts, as it stands"
        if self.said("fleet"):
            return "tests/e2e/test_fleet_page.py runs it on a head and a host, as it stands"
        return self.said("not run")

    def said(self, key: str) -> str:
        """Return what the comment says for a key."""
        found = re.search(rf"<!-- {key}: (.*?) -->", self.comment, re.DOTALL)
        return found[1] if found else ""

    @property
    def file(self) -> str:
        """Name of the file that the block is; empty for a part of one."""
        if self.said("adds to") or self.said("over"):
            return ""
        first = re.match(rf"(?:# )?({_FILE})(?=$|[;:,]| )", self.text.partition("\n")[0].removeprefix("# "))
        if self.text.startswith("# ") and first:
            return first[1]
        # The paragraph that ends in a colon says what follows, in its last sentence or before.
        ending = {"json": (".json", ".jsonl"), "python": (".py",), "toml": (".toml",), "text": (".txt",)}
        for said in (re.split(r"(?<=[.!?])\s", self.before)[-1], self.before):
            named = re.findall(rf"`({_FILE})`", said)
            fits = [name for name in named if name.endswith(ending.get(self.language, ()))]
            if fits and (self.before.endswith(":") or f"Save it as `{fits[0]}`" in said):
                return fits[0]
        return ""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page, in its order."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    for found in _FENCE.finditer(text):
        ahead = text[: found.start()].rstrip("\n")
        comment = re.search(r"<!-- [^>]*-->$", ahead)
        if comment:
            ahead = ahead[: comment.start()].rstrip("\n")
        before = re.sub(r"\s+", " ", ahead.rpartition("\n\n")[2])
        yield Block(
            name, text.count("\n", 0, found.start()) + 1, found[2],
            re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE), comment[0] if comment else "", before,
        )  # fmt: skip


class PageRun:
    """One run through a page, in a folder of its own.

    Args:
        folder: empty folder, which is the working folder.
        overrides: settings that `offbeat check` and `offbeat train` get for run files of the page, for example a model
            that is there.
        train: whether `offbeat train` trains; otherwise its run file is checked.
        timeout_s: longest time of one command that runs in a process of its own.
    """

    def __init__(
        self, folder: Path, overrides: tuple[str, ...] = (), *, train: bool = False, timeout_s: float = 550.0
    ) -> None:
        self.folder, self.overrides, self.train, self.timeout_s = folder, overrides, train, timeout_s
        self.names: dict[str, object] = {"__name__": "page"}
        self.run_file = ""
        self.background: list[subprocess.Popen[bytes]] = []
        self.ports: dict[str, str] = {}
        with contextlib.suppress(FileExistsError):
            (folder / ".venv").symlink_to(Path(sys.executable).parents[1])

    def run(self, block: Block) -> str:
        """Run one block, and return what it printed.

        Raises:
            AssertionError: a command failed, or printed something else than the page shows.
        """
        place = f"{block.page}:{block.line}"
        text = self.on_free_ports(block.text)
        if block.file:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if addition := block.said("adds to"):
            with (self.folder / addition).open("a") as file:
                file.write("\n\n" + text)
        match block.language:
            case "python" if not block.file:
                exec(compile(text, place, "exec"), self.names)
            case "python" if block.comment in ("<!-- background -->", "<!-- program -->"):
                return self.command(block, ["python", block.file], fails=False)
            case "python":
                runpy.run_path(str(self.folder / block.file), run_name="page")
            case "toml" if block.file and not text.startswith(("[project]", "# not a run file")):
                self.run_file = block.file
                load(self.folder / block.file, self.model_of(block))
            case "toml" if not block.file:
                self.load_part(block, text)
            case "sh" | "console":
                return self.commands(block, text)
        return ""

    def model_of(self, block: Block) -> list[str]:
        return [*shlex.split(block.said("with")), *self.overrides]

    def load_part(self, block: Block, text: str) -> None:
        """Load a part of a run file over the file that it belongs to, and keep it as that file."""
        base = block.said("over") or self.run_file or "spell_backward"
        part = self.folder / "part-of-a-page.toml"
        part.write_text(text if text.startswith("extends") else f'extends = "{base}"\n{text}')
        load(part, self.model_of(block))

    def on_free_ports(self, text: str) -> str:
        """Return a text whose fixed ports are free ones, equal ones in all blocks."""
        for port in re.findall(r"(?<=127\.0\.0\.1:)[1-9]\d{3,4}", text):
            if port not in self.ports:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    self.ports[port] = str(probe.getsockname()[1])
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{self.ports[port]}")
        return text

    def commands(self, block: Block, text: str) -> str:
        printed = []
        shown = block.language == "console"
        lines = text.replace("\\\n", " ").splitlines()
        for number, line in enumerate(lines):
            if shown and not line.startswith("$ "):
                continue
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if not words:
                continue
            expected = []
            if shown:
                after = lines[number + 1 :]
                stop = next((i for i, other in enumerate(after) if other.startswith("$ ")), len(after))
                expected = [other for other in after[:stop] if other.strip()]
            fails = any(other.startswith("offbeat ") and ": " in other for other in expected)
            said = self.command(block, words, fails=fails)
            assert all(other in said for other in expected), f"{block.page}:{block.line}: {line}\n{said}"
            printed.append(said)
        return "".join(printed)

    def command(self, block: Block, words: list[str], *, fails: bool) -> str:
        place = f"{block.page}:{block.line}: {shlex.join(words)}"
        program, *arguments = words
        if Path(program).name == "offbeat":
            if arguments[0] == "train" and not self.train:
                arguments = [
                    "check",
                    *(
                        word
                        for word in arguments[1:]
                        if word not in ("--resume", "--changed", "--in-process")
                    ),
                ]
            if arguments[0] in ("check", "train") and (self.folder / arguments[1]).exists():
                arguments += self.model_of(block)
            words = [sys.executable, "-m", "launch.cli", *arguments]
            if arguments[0] != "train" and "<!-- background -->" not in block.comment:
                return self.in_process(place, arguments, fails=fails)
        elif program.startswith("launch/"):
            words = ["sh", str(ROOT / program), *arguments]
        elif Path(program).name.startswith("python"):
            words = [sys.executable, *arguments]
        assert shutil.which(words[0]) or Path(words[0]).exists(), f"{place}: no such program"
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        if "<!-- background -->" in block.comment:
            self.background.append(subprocess.Popen(words, cwd=self.folder, env=env))
            time.sleep(2)
            return ""
        done = subprocess.run(
            words, cwd=self.folder, env=env, capture_output=True, text=True, timeout=self.timeout_s
        )
        assert (done.returncode != 0) == fails, f"{place}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def in_process(self, place: str, arguments: list[str], *, fails: bool) -> str:
        """Run a command of Offbeat in this process, which has imported it already."""
        import io

        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(arguments)
        assert (code != 0) == fails, f"{place}\n{out.getvalue()}"
        return out.getvalue()

    def close(self) -> None:
        """End what was started in the background."""
        for process in self.background:
            process.terminate()
        for process in self.background:
            process.wait(30)
