"""No source file of ours unpickles, evaluates or loads code from data."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("protocol", "broker", "actors", "envs", "learner", "launch")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "marshal",
    "shelve",
    "dill",
    "joblib",
    "jsonpickle",
    "yaml",
}
CALLS = {
    "recv_pyobj",
    "send_pyobj",
    "recv_serialized",
    "eval",
    "exec",
    "Unpickler",
    "load_module",
    "load_checkpoint",
}
"""The last one is DeepSpeed's, which unpickles."""
CONFINED = {"envs/scoring/program_process.py": 3}
"""Calls of `exec` in files that run in bubblewrap only: running what a model wrote is their purpose."""


def offences(source, name):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES:
                    yield f"{name}:{node.lineno}: import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"{name}:{node.lineno}: from {node.module}"
        elif isinstance(node, ast.Call):
            yield from _call(node, name)


def _call(node, name):
    called = ast.unparse(node.func)
    last = called.rpartition(".")[2]
    settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if (last in CALLS and called in (last, f"builtins.{last}")) or last in CALLS - {"eval", "exec"}:
        yield f"{name}:{node.lineno}: {called}"
    if called == "torch.load" and settings.get("weights_only") != "True":
        yield f"{name}:{node.lineno}: torch.load without weights_only=True"
    if called in ("np.load", "numpy.load") and settings.get("allow_pickle", "False") != "False":
        yield f"{name}:{node.lineno}: {called} with allow_pickle"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_unpickles(path):
    found, name = list(offences(path.read_text(), str(path.relative_to(ROOT)))), str(path.relative_to(ROOT))
    if name in CONFINED:
        assert [one.rpartition(" ")[2] for one in found] == ["exec"] * CONFINED[name]
    else:
        assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "import yaml",
        "socket.recv_pyobj()",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "pickle.Unpickler(file)",
        "engine.load_checkpoint(folder)",
    ],
)
def test_the_search_finds_what_it_looks_for(source):
    assert list(offences(source, "x"))


def test_the_search_leaves_the_rest_alone():
    fine = "torch.load(p, weights_only=True)\nnp.load(p)\nmodel.eval()\njson.load(f)\ntomllib.loads(t)"
    assert list(offences(fine, "x")) == []
