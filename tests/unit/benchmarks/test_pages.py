"""The figures in the pages are those that benchmark runs wrote."""

import json

import pytest

from benchmarks.page import PAGES, RESULTS, filled


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_figures_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, "run `python -m benchmarks.page`"


def test_every_result_is_shown():
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path in RESULTS.glob("*.json"):
        for table in json.loads(path.read_text())["tables"]:
            assert f"<!-- results: {path.stem}.{table} -->" in shown, f"{path.name}: {table}"


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
