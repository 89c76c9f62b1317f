"""The page of metrics agrees with what the code declares."""

from pathlib import Path

from launch.reference import SECTIONS, fill_tables, tags
from learner.trackers.tensorboard import CHARTS

PAGE = Path(__file__).parents[3] / "docs" / "run" / "metrics.md"


def test_the_tables_are_those_of_the_code():
    page = PAGE.read_text()
    assert fill_tables(page) == page, "run `make docs`"


def test_every_gauge_is_on_the_page_once():
    page = PAGE.read_text()
    assert len(tags()) > 100
    assert {tag: page.count(f"| `{tag}` |") for tag in tags()} == dict.fromkeys(tags(), 1)
    assert all(gauge.unit and gauge.meaning for _, gauges in SECTIONS.values() for gauge in gauges.values())


def test_every_curve_of_a_chart_is_a_metric():
    assert {name for names in CHARTS.values() for name in names if not name.endswith("/")} <= set(tags())
