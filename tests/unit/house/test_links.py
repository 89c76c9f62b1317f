"""Every link between the project's own pages leads somewhere, and every file that they name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "protocol" / "SPEC.md"]
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)]*)?\)|^\[[^\]]+\]: ([^#\s]+)()$", re.MULTILINE)


def anchors(page):
    """Return the anchors that a renderer makes of a page's headings, and those that the page sets itself."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([\w-]+)"></a>', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for inline, fragment, reference, _ in LINK.findall(page.read_text()):
        target = inline or reference
        if ":" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page}: {target}"
        if fragment and file.suffix == ".md":
            assert fragment[1:] in anchors(file), f"{page}: {target}{fragment}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page):
    tops = "protocol|broker|actors|envs|learner|launch|tests|benchmarks"
    named = re.findall(rf"`((?:{tops})/[\w/.-]+\.(?:py|toml|md|sh))`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_index_has_every_page():
    index = ROOT / "docs" / "README.md"
    linked = {
        (index.parent / (inline or reference)).resolve()
        for inline, _, reference, _ in LINK.findall(index.read_text())
    }
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "adr" not in page.parts and page != index]
    assert [page.name for page in pages if page.resolve() not in linked] == []
