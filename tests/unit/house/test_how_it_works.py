"""docs/understand/how-it-works.md names files and functions that exist, and shows the learner's step as it is."""

import inspect
import re
import textwrap
from pathlib import Path

from learner.trainer import Trainer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "understand" / "how-it-works.md").read_text()


def test_every_step_names_functions_of_its_file():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line) and ".py`" in line]
    assert len(rows) == 24
    for row in rows:
        *_, code = row.strip("|").split("|")
        source = ""
        for name in re.findall(r"`([^`]+)`", code):
            if name.endswith(".py"):
                source = (ROOT / name).read_text()
            else:
                assert re.search(rf"(?:def|class) {name.rpartition('.')[2]}\b", source), f"{row}: {name}"


def test_the_learners_step_is_the_one_in_the_code():
    (shown,) = re.findall(r"```python\n(def learn.*?)```", PAGE, re.DOTALL)
    assert shown == textwrap.dedent(inspect.getsource(Trainer.learn))
