"""Every shipped recipe loads, says what it is, and has a page that agrees with the file."""

import re
import tomllib
from pathlib import Path

import pytest

from launch.errors import ConfigError
from launch.reference import tags
from launch.run_file.load import RECIPES_FOLDER, check, load, read, read_own, run_files
from launch.run_file.recipes import Recipe, find, page, recipes, table

ROOT = Path(__file__).parents[4]
DOCS = ROOT / "docs" / "recipes"
METHODS = sorted((RECIPES_FOLDER / "methods").rglob("*.toml"))
FOLDERS = {p.stem: p.parent.name for p in METHODS if p.parent.name != "methods"}
"""Folder of each method that is in one of its own, by name."""
UNMEASURED = set(FOLDERS)
FAMILIES = {name for name, folder in FOLDERS.items() if folder == "families"}
CREDIT = UNMEASURED - FAMILIES
JOBS = {"calculator", "doors", "planted_mistakes", "sft", "smollm2", "spell_backward"}


@pytest.fixture(params=METHODS, ids=lambda p: p.stem)
def path(request):
    return request.param


def test_all_methods_are_there():
    expected = "grpo ppo rloo cispo gspo decoupled-ppo minirl hispo bapo hapo tppo remix r2vpo gbpo lag-clip"
    new = "uncorrected m2po dppo drpo sat vespo trm flash-reinforce sao vcpo gac tba replay-fifo"
    credit = "a2fm gdpo dvao g2rpo dgpo loop grpo-tcr flow-grpo eapo epo gigpo hgpo otc prs spo-winrate"
    more = "arpo-gui xrpo-novelty subpo aepo-agentic fapo-rule fapo-judge riskpo dapo-direct rapo spear distillation"
    known = "ampo srpo aepo-entropy dapo dr-grpo reinforce-plus-plus"
    chosen = "dots vspo deeptravel xrpo inspo inspo-proposals"
    assert {*credit.split(), *more.split(), *known.split(), *chosen.split()} == CREDIT
    assert {
        *("ghpo", "scaf-grpo", "igrpo", "urpo", "dyna-mind", "arpo-branch", "r3l", "agent-r", "xrpo-seeding"),
        *("icpo", "fapo"),
    } == FAMILIES
    assert {*expected.split(), *new.split(), "icepop", "ipa", "remax", "mdpo"} == {
        p.stem for p in METHODS
    } - UNMEASURED
    assert {p.stem for p in RECIPES_FOLDER.glob("*.toml")} == JOBS
    assert set(run_files()) == {p.stem for p in METHODS} | JOBS
    assert all("recipe" in tomllib.loads(path.read_text()) for path in METHODS)


def test_a_recipe_is_its_base_and_little_else(path):
    own = read_own(path)
    up = "../../" if path.stem in UNMEASURED else "../"
    assert own["extends"] in {f"{up}{job}.toml" for job in JOBS}
    assert own["demo"]["run"] == {"name": path.stem}
    assert list(own)[-1] == "demo", "the job that shows the method comes last"
    assert path.read_text().startswith("# ")
    assert path.read_text().partition("\n")[0].endswith(".")


def contains(found, written):
    """Return whether ``found`` contains everything that is in ``written``."""
    if isinstance(written, dict):
        return all(contains(found[name], value) for name, value in written.items())
    if isinstance(written, list):
        return len(found) == len(written) and all(map(contains, found, written))
    return found == written


def test_settings_written_are_settings_in_force(path):
    """A recipe's own settings stay in force, whatever its base may set one day."""
    config = load(path)
    own = read_own(path)["learner"]["algorithm"]
    in_force = config.model_dump(mode="json")["learner"]["algorithm"]
    for name, value in own.items():
        assert contains(in_force[name], value), name
    assert {"advantage", "surrogate", "corrections"} <= set(own), "what a method is made of is spelled out"


def page_of(path):
    return find(path.stem).page


def section_of(path):
    """Return the part of a page that is about one method."""
    text = page_of(path).read_text()
    return text.partition(f"\n## {path.stem}\n")[2].partition("\n## ")[0]


def row_of(path):
    """Return the cells of a method in the table at the top of its page."""
    lines = page_of(path).read_text().splitlines()
    (row,) = [line for line in lines if line.startswith(f"| [{path.stem}](#{path.stem}) |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_every_method_has_a_section_of_one_page(path):
    headings = [
        heading for page in DOCS.glob("*.md") for heading in re.findall(r"^## (.*)$", page.read_text(), re.M)
    ]
    assert headings.count(path.stem) == 1
    text = section_of(path)
    assert f"[File](../../{path.relative_to(ROOT)})" in text
    assert "```text\n" in text, "the formula"
    for source in find(path.stem).source.split(", "):
        assert source in text
    measured = re.findall(r"<!-- results: (?:claims|claims-families|claims-doors)\.([\w-]+) -->", text)
    if path.stem in UNMEASURED:
        assert set(measured) <= {path.stem}
        assert "the effect was not measured here." in " ".join(page_of(path).read_text().split())
    else:
        assert f"[Reward over lag](../staleness.md#row-{path.stem})" in text


def test_the_table_of_a_page_says_where_a_method_comes_from_and_how_it_runs(path):
    _, places, source, job, run = row_of(path)
    assert source == (find(path.stem).source or "ours")
    assert job == f"`{Path(read_own(path)['extends']).stem}`"
    assert run == f"`.venv/bin/offbeat train {path.stem}`"
    learner = "".join(file.read_text() for file in (ROOT / "learner").rglob("*.py"))
    for place in re.findall(r"`(\w+)`", places):
        assert f"def {place}(" in learner, place


def test_pages_name_metrics_that_exist():
    for file in DOCS.glob("*.md"):
        named = re.findall(
            r"`((?:rollout|learner|critic|replay|family|generator|actor|broker|evaluation)/[a-z_]+)`",
            file.read_text(),
        )
        assert set(named) <= set(tags()), file.name


def test_pages_name_settings_that_exist(path):
    """The fields that a section names with a value have this value."""
    rows = re.findall(r"^- `([a-z0-9_.]+)` = `([^`]+)`:", section_of(path), flags=re.M)
    config = load(path).model_dump(mode="json")
    for name, value in rows:
        here = config if name.startswith(("learner.", "actor.")) else config["learner"]["algorithm"]
        for part in name.split("."):
            here = here[int(part) if part.isdigit() else part]
        assert tomllib.loads(f"x = {value}")["x"] == here, name


def test_the_index_says_what_a_method_does_and_costs(path):
    recipe = find(path.stem)
    (row,) = [
        line
        for line in (DOCS / "README.md").read_text().splitlines()
        if line.startswith(f"| [{path.stem}]({page_of(path).name}#{path.stem}) |")
    ]
    _, _, does, corrects, costs, source, _ = (cell.strip() for cell in row.split("|"))
    assert does == recipe.description
    assert corrects
    assert all(need in costs for need in recipe.needs)
    assert source == (recipe.source or "ours")


def test_what_methods_need_is_listed():
    needs = {recipe.name: recipe.needs for recipe in recipes()}
    assert needs["tppo"] == ["critic", "windows"]
    assert needs["remix"] == ["groups", "replay", "reference model"]
    assert needs["remax"] == ["groups", "greedy answers"]
    assert needs["ppo"] == ["critic"]
    assert needs["bapo"] == ["groups"]
    assert needs["distillation"] == ["teacher"]
    assert needs["ampo"] == ["groups", "teacher"]
    assert needs["srpo"] == ["groups", "average policy"]
    assert needs["gigpo"] == needs["otc"] == needs["a2fm"] == needs["subpo"] == ["groups", "marks"]
    assert needs["arpo-gui"] == ["groups", "tasks again", "replay"]
    assert needs["dots"] == ["groups", "tasks again", "replay"]
    assert needs["xrpo"] == ["groups", "families", "tasks again"]
    assert needs["vspo"] == needs["deeptravel"] == ["groups", "tasks again"]
    assert needs["inspo"] == ["groups", "instructions"]
    assert needs["inspo-proposals"] == ["groups", "families", "instructions"]
    assert needs["riskpo"] == ["groups"]
    assert needs["gdpo"] == ["groups"]
    assert needs["ghpo"] == needs["scaf-grpo"] == ["groups", "hints", "families"]
    for name in (
        "igrpo",
        "urpo",
        "dyna-mind",
        "arpo-branch",
        "r3l",
        "agent-r",
        "xrpo-seeding",
        "icpo",
        "fapo",
    ):
        assert needs[name] == ["groups", "families"], name
    rows = {line.split()[0]: line for line in table(recipes()).splitlines()[1:]}
    assert "groups, replay, reference model" in rows["remix"]
    assert rows["lag-clip"].split()[2] == "-", "of our own making"
    assert "2510.18927" in rows["bapo"]


def test_one_recipe_is_printed_with_its_page(path):
    recipe = find(path.stem)
    text = page(recipe)
    needs = ", ".join(recipe.needs) or "nothing beside a policy"
    assert text.startswith(f"# {recipe.description}\n# needs: {needs}\n")
    assert f"# docs:  {page_of(path)}#{path.stem}\n" in text


def test_a_recipe_is_printed_with_what_does_not_act():
    text = "# note:  one algorithm as shipped: calculator, cispo, doors, planted_mistakes, sft, smollm2, spell_backward"
    assert text in page(find("cispo"))
    assert "# note:" not in page(find("gspo"))
    assert "# note:" not in page(find("bapo"))


def test_what_is_printed_is_a_run_file_that_stands_alone(path):
    text = page(find(path.stem))
    assert "extends" not in tomllib.loads(text)
    assert tomllib.loads(text) == read(path)
    assert check(tomllib.loads(text), "printed") == load(path)


def test_any_settings_can_be_printed(tmp_path):
    odd = """[model]
path = 'a "quoted" \\ path, é'
[env]
name = "calculator"
[env.params]
"a key" = [[1, 2.5], [], [true, 1e-9, {x = "y", z = {}}]]
empty = {}
many = [{name = "a", inner = {b = 1, c = [{d = 2}, {d = 3}]}}, {}]
"""
    path = tmp_path / "odd.toml"
    path.write_text("# An odd one.\n" + odd)
    text = page(find("odd", tmp_path))
    assert tomllib.loads(text) == tomllib.loads(odd)


def test_a_job_has_no_page_of_its_own():
    recipe = find("calculator.toml")
    assert isinstance(recipe, Recipe)
    assert recipe.page is None
    assert "README.md" in page(recipe)


def test_an_unknown_recipe_and_an_empty_folder_are_said_with_the_cure(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'remix'"):
        find("remixx")
    with pytest.raises(
        ConfigError,
        match="there are: a2fm, aepo-agentic, aepo-entropy, agent-r, ampo, arpo-branch, arpo-gui, bapo",
    ):
        find("zzz")
    with pytest.raises(ConfigError, match="no run files there"):
        recipes(tmp_path)
    with pytest.raises(ConfigError, match=r"no run files there.*install offbeat again"):
        find("bapo", tmp_path / "none")
