"""docs/extend/first-method.md, done step by step in a copy of the tree: what the page shows runs as it stands."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.pages import ROOT, blocks

PAGE = ROOT / "docs" / "extend" / "first-method.md"
COPIED = (
    "protocol",
    "broker",
    "actors",
    "envs",
    "learner",
    "launch",
    "recipes",
    "tests/oracle",
    "docs/recipes",
)
pytestmark = pytest.mark.timeout(400)


def block_with(text):
    """Return the one block of the page that begins with a text."""
    (found,) = [block for block in blocks(PAGE) if block.text.startswith(text)]
    return found


def insert(path, before, text):
    """Put a text before the first line that begins with another one."""
    content = path.read_text()
    assert content.count(before) >= 1, f"{path}: {before}"
    at = content.index(before)
    path.write_text(content[:at] + text + content[at:])


@pytest.fixture
def tree(tmp_path):
    """Return a copy of what the page changes."""
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/conftest.py", "tests/methods.py", "tests/trajectories.py"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(tree, *command):
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_steps_of_the_page_make_a_method(tree):
    named = PAGE.read_text()
    function, section, case = (
        next(tree / found for found in re.findall(r"`(learner/[\w/]+\.py)`", named) if found in row)
        for row in (line for line in named.splitlines() if line.startswith("| `learner/"))
    )
    oracle = tree / "tests" / "oracle" / "test_importance_sampling.py"
    # Step 1: the function.
    function.write_text(function.read_text() + "\n\n" + block_with("def soft_gate_surrogate").text)
    # Step 2: its test, and a line of the list of all surrogates.
    tests = oracle.read_text()
    imported = re.search(r"from learner\.algorithms\.surrogates import \(\n", tests)
    assert imported, "the oracle test imports surrogates by name"
    tests = tests[: imported.end()] + "    soft_gate_surrogate,\n" + tests[imported.end() :]
    oracle.write_text(tests + "\n\n" + block_with("def test_soft_gate_equals").text)
    entry = block_with("lambda lp, r, a: soft_gate").text
    insert(oracle, "    ],\n)\ndef test_on_policy_every_surrogate", f"        {entry}")
    # Steps 3 and 4: the section, its place in the union, and the case.
    insert(section, "ShippedSurrogate = Annotated[", block_with("class SoftGateSurrogate").text + "\n\n")
    union = section.read_text()
    at = union.index('    Field(discriminator="kind")', union.index("ShippedSurrogate = Annotated["))
    before = union[:at].rstrip().removesuffix(",")
    section.write_text(f"{before}\n    | SoftGateSurrogate,\n{union[at:]}")
    text = case.read_text()
    make = text.index("def make_surrogate")
    at = text.index("        case _:", make)
    shown = block_with("        case SoftGateSurrogate(").text
    # The settings of surrogates are imported by name; the new one comes from beside them.
    module = section.relative_to(tree).with_suffix("").as_posix().replace("/", ".")
    text = text[:at] + shown + text[at:]
    first = re.search(r"^from ", text, re.MULTILINE).start()
    case.write_text(text[:first] + f"from {module} import SoftGateSurrogate\n" + text[first:])
    # Step 5: the run file.
    recipe = block_with("# A smooth gate")
    (tree / "recipes" / "methods" / "sapo.toml").write_text(recipe.text)
    _, *arguments = block_with(".venv/bin/python -m pytest").text.split()
    assert " passed" in run(tree, *arguments, "-p", "no:cacheprovider", "-k", "soft_gate or on_policy")
    checked = block_with("$ .venv/bin/offbeat check sapo").text.splitlines()
    assert checked[1] in run(tree, "-m", "launch.cli", "check", "sapo")
