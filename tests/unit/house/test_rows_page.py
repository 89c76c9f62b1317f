"""The page docs/run/rows.md shows the errors and the parameters that there are, and README.md shows its job."""

import re
import sys
from pathlib import Path

from launch.cli import main
from launch.model import make_tokenizer, save_tokenizer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "run" / "rows.md").read_text()


def block(language, nth=0):
    """Return the n-th block of code of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[nth]


def test_the_errors_on_the_page_are_those_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    exec(compile(block("python"), "make_rows.py", "exec"), {})
    rows = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join([*rows[:2], '{"answer": "42"}']))
    rewards = block("python", 1).removeprefix("# rewards.py\n").replace("answer, row", "text")
    (tmp_path / "rewards.py").write_text(rewards)
    (tmp_path / "sums.toml").write_text(block("toml"))
    model = tmp_path / "model"
    save_tokenizer(make_tokenizer(["a"]), model, max_length=2048)
    (model / "config.json").write_text("{}")
    first, second = (line for line in PAGE.splitlines() if line.startswith("offbeat check: env"))
    for line in (first, second):
        assert main(["check", "sums.toml", f"model.path={model}"]) == 1
        assert capsys.readouterr().err.strip() == line
        (tmp_path / "train.jsonl").write_text("\n".join(rows))


def test_every_parameter_is_on_the_page():
    import inspect

    from envs.rows.suite import RowsSuite

    section = PAGE.partition("## Parameters")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))
    parameters = inspect.signature(RowsSuite).parameters
    assert list(rows) == list(parameters)
    for name, parameter in parameters.items():
        if name != "correct" and parameter.default is not parameter.empty:
            assert rows[name].strip("`").strip('"') == str(parameter.default)


def test_the_first_screen_of_the_readme_shows_the_job():
    readme = (ROOT / "README.md").read_text().splitlines()
    job = "\n".join(readme[:75]) + "\n"
    shown = re.findall(r"^```(?:python|toml|sh)\n(.*?)^```", job, re.DOTALL | re.MULTILINE)
    assert shown[1:4] == [block("python"), block("python", 1), block("toml")]
    assert max(len(line) for line in readme[:75] if not line.startswith("[![")) <= 100
