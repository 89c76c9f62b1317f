"""The figures in the pages are those that benchmark runs wrote."""

import json
import re
import shlex

import pytest

from benchmarks.page import CAMPAIGNS, CLOSED, COMMANDS, PAGES, RESULTS, ROOT, command, filled
from benchmarks.report import save_results

SHOWN = "".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_figures_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, "run `python -m benchmarks.page`"


def name_of(path):
    return path.relative_to(RESULTS).with_suffix("").as_posix()


def test_every_result_is_shown():
    for path in RESULTS.rglob("*.json"):
        for table in json.loads(path.read_text())["tables"]:
            assert f"<!-- results: {name_of(path)}.{table} -->" in SHOWN, f"{path.name}: {table}"


def test_every_benchmark_has_a_place_and_a_command():
    assert {name for name, _ in re.findall(r"<!-- results: ([\w/-]+)\.([\w-]+) -->", SHOWN)} == {
        *COMMANDS,
        *CLOSED,
    }
    assert {name_of(path) for path in RESULTS.rglob("*.json")} <= {*COMMANDS, *CLOSED}
    assert not {*COMMANDS} & {*CLOSED}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_of_a_benchmark_exists(name):
    program = shlex.split(COMMANDS[name])[0]
    place = ROOT / ("tests/campaigns" if name in CAMPAIGNS else "benchmarks")
    file, folder = place / f"{program}.py", place / program
    sources = [file] if file.exists() else [folder / "program.py", folder / "__main__.py"]
    assert '"--json"' in "".join(source.read_text() for source in sources)
    for option in re.findall(r"--[a-z-]+", COMMANDS[name]):
        assert f'"{option}"' in "".join(source.read_text() for source in sources)


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_experiment_has_results_and_a_commit_with_its_program(name):
    program = json.loads((RESULTS / f"{name}.json").read_text())["command"].split()[2]
    assert not module_exists(program)
    place = rf"<!-- results: {name}\..*?(?=<!-- end -->)"
    assert all(
        f"commit {CLOSED[name]} has its program" in text for text in re.findall(place, SHOWN, re.DOTALL)
    )


def module_exists(name):
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_program_and_test_that_a_page_names_exists(page):
    """Tables of closed experiments tell which command wrote them, and which commit has its program."""
    text = re.sub(r"<!-- results: .*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    named = re.findall(r"(?:python -m |`)((?:benchmarks|tests\.campaigns)\.[a-z_.]+[a-z_])\b", text)
    assert {name for name in named if not module_exists(name)} == set()
    paths = re.findall(r"(?<![\w./])((?:benchmarks|tests)/[\w./-]+\.(?:py|toml|json))\b", text)
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_what_was_not_measured_is_said_with_the_command(tmp_path):
    page = filled("<!-- results: learner.arms -->\n| old | 0.97 |\n<!-- end -->", tmp_path)
    assert page == (
        "<!-- results: learner.arms -->\n"
        f"Not measured on this version. `{command('learner')}` measures it.\n<!-- end -->"
    )
    assert command("learner").startswith("python -m benchmarks.learner --")
    assert command("learner").endswith(" --json benchmarks/results/learner.json")
    with pytest.raises(KeyError):
        filled("<!-- results: no_such_benchmark.arms -->\n<!-- end -->", tmp_path)


def test_a_table_comes_with_its_source_and_an_unknown_one_is_named(tmp_path):
    found = {
        "command": "python -m benchmarks.x",
        "date": "2026-11-22",
        "commit": "abc",
        "machine": "a machine",
        "tables": {"arms": "| a |\n|---|\n| 1 |"},
        "results": {},
    }
    (tmp_path / "x.json").write_text(json.dumps(found))
    page = filled("before\n<!-- results: x.arms -->\nold\n<!-- end -->\nafter", tmp_path)
    assert page.startswith(
        "before\n<!-- results: x.arms -->\n| a |\n|---|\n| 1 |\n\n`python -m benchmarks.x`, 2026"
    )
    assert page.endswith("<!-- end -->\nafter")
    assert filled(page, tmp_path) == page
    with pytest.raises(KeyError, match="no table 'none'"):
        filled("<!-- results: x.none -->\n<!-- end -->", tmp_path)


def test_headlines_are_gathered_from_all_results(tmp_path):
    place = "<!-- headlines -->\nold\n<!-- end -->"
    assert "No ratio was measured on this version." in filled(place, tmp_path)
    save_results(tmp_path / "a.json", {"arms": "| a |"}, {}, [("tokens/s", "bare vLLM", "1.00")])
    save_results(tmp_path / "b.json", {"arms": "| b |"}, {}, [("pause", "load", "1.04")])
    save_results(tmp_path / "c.json", {"arms": "| c |"}, {})
    page = filled(place, tmp_path)
    first, second = "| tokens/s | bare vLLM | 1.00 |", "| pause | load | 1.04 |"
    assert f"|---|---|---|\n{first}\n{second}\n\nMeasured on " in page
    assert page.count("Measured on") == 1
    assert filled(page, tmp_path) == page


def test_results_keep_a_command_that_a_shell_reads_again(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--sizes", "16 KB"])
    save_results(tmp_path / "a.json", {}, {})
    assert json.loads((tmp_path / "a.json").read_text())["command"].endswith("--sizes '16 KB'")
