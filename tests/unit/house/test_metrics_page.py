"""Every metric is documented, and nothing else is."""

import re
from pathlib import Path

from learner.metrics import HISTOGRAMS, SCALARS

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_page_and_tables_name_the_same_metrics():
    tags = re.findall(r"^\| `([a-z_/]+)` \|", PAGE.read_text(), flags=re.M)
    assert sorted(tags) == sorted([*SCALARS, *("histogram/" + name for name in HISTOGRAMS)])
