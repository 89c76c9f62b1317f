"""Test the pages of `offbeat view` in a headless Chromium: every page, filters, keys, sizes, themes, hostile texts."""

import asyncio
import csv
import fcntl
import json
import re
import shutil
import threading
from contextlib import contextmanager
from xml.etree import ElementTree

import pytest

from launch.view.export import export
from launch.view.questions import Questions
from launch.view.recorded import DEMO, unpack
from launch.view.server import view_server
from learner.samples import Sample, SamplePart, encode_line
from tests.browser import READY, TIMEOUT_S, Browser, chromium
from tests.view_runs import Maker, small_run

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="there is no Chromium here: apt-get install chromium-headless-shell"
)
PAGES = ["overview", "timeline", "ledger", "table", "staleness", "differences", "samples"]
EVIL = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<style>body{display:none}</style>"
    "</pre></td></table><h1>No alarm.</h1>\u202egnp.exe\u2066\u0007\x1b[2J" + "w" * 3_000
)


@contextmanager
def serving(folders):
    """Serve runs from a thread, and yield the link."""
    ready, stop, found = threading.Event(), [], []
    # What takes long on a busy machine is not given a second time: a page shows what is there.
    questions = Questions(folders, rest=0.0)
    for shown in questions.runs.values():
        # Else a page may show a journal that is read in part.
        shown.read_all()

    async def run():
        stop.append(asyncio.Event())
        async with view_server(questions, "127.0.0.1", 0, None) as address:
            found.extend([asyncio.get_running_loop(), address.url])
            ready.set()
            await stop[0].wait()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(TIMEOUT_S)
    try:
        yield found[1]
    finally:
        found[0].call_soon_threadsafe(stop[0].set)
        thread.join(TIMEOUT_S)


@pytest.fixture(scope="module")
def browser():
    opened = Browser(chromium())
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run folders: one that ended, one that was killed, one whose first file is deleted, one that goes on."""
    place = tmp_path_factory.mktemp("runs")
    demo = unpack(DEMO, place)
    killed = small_run(place / "killed")
    maker = Maker(place / "deleted")
    maker.group(2, rewards=[0.0, 1.0])
    maker.train()
    maker.checkpoint()
    maker.new_file()
    maker.group(2, rewards=[0.0, 1.0])
    maker.train()
    deleted = maker.close()
    first = deleted / "journal" / "journal-00000001.log"
    first.rename(first.with_suffix(".released"))
    living = Maker(place / "living")
    living.group(2, rewards=[0.0, 1.0], back=0)
    living.group(2, rewards=[0.5, 0.75], env="words", reward_name="spelling")
    living.train()
    (living.folder / "logs").mkdir()
    for process, second in (("model", 1), ("learner", 2)):
        (living.folder / "logs" / f"{process}.log").write_text(
            f"2026-01-01 00:00:0{second},000 INFO     {process} begins\n"
            f"2026-01-01 00:00:0{second},500 WARNING  {process} waits\n"
        )
    with open(living.folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield {"demo": demo, "killed": killed, "deleted": deleted, "living": living}
    living.close()


@pytest.fixture(scope="module")
def link(runs):
    with serving([runs["demo"], runs["killed"], runs["deleted"], runs["living"].folder]) as url:
        yield url


@pytest.fixture
def page(browser, link):
    """The page, logged in."""
    browser.problems.clear()
    browser.asked.clear()
    browser.size(1_200)
    browser.go("about:blank")
    browser.go(link)
    browser.wait("document.querySelector('h1') && document.getElementById('main').dataset.ready")
    yield browser
    assert browser.problems == []


def fill(field, value, event):
    """Return a script that writes into a field."""
    return (
        f"(() => {{ const f = document.getElementById('{field}'); f.value = {json.dumps(value)}; "
        f"f.dispatchEvent(new Event('{event}')); }})()"
    )


def click(selector):
    """Return a script that clicks on a part of a figure."""
    return f"{selector}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))"


def first_rows(page):
    cells = "[aria-label=trajectories] tbody tr td:first-child"
    return page.run(f"[...document.querySelectorAll('{cells}')].map((cell) => cell.innerText)")


def test_the_link_logs_in_and_its_secret_is_in_no_address(page, link):
    secret = link.partition("#")[2]
    assert secret not in page.run("location.href")
    assert [url for url in page.asked if secret in url.partition("#")[0]] == []
    host = link.partition("/login")[0]
    assert [url for url in page.asked if not url.startswith((host, "about:", "data:"))] == []


def test_whoever_has_no_link_is_asked_for_the_token(browser, link):
    login, _, secret = link.partition("#")
    browser.go("about:blank")
    browser.problems.clear()
    browser.call("Network.clearBrowserCookies")
    browser.go(login.replace("/login", "/"))
    browser.wait("document.querySelector('[role=alert]')")
    assert "open the link that `offbeat view` printed" in browser.text()
    browser.go(login)
    browser.wait("!document.getElementById('form').hidden")
    browser.run(
        "document.getElementById('token').value = 'wrong'; document.querySelector('#form button').click()"
    )
    browser.wait("document.getElementById('said').innerText.startsWith('The secret is wrong')")
    # People copy the whole header that `offbeat keys header` prints.
    browser.run(f"document.getElementById('token').value = 'Authorization: Bearer {secret}'")
    browser.run("document.querySelector('#form button').click()")
    browser.wait("document.querySelector('h1') && document.getElementById('main').dataset.ready")
    # The browser logs answers of 401; they are what is tested here.
    assert [problem for problem in browser.problems if "401" not in problem] == []


@pytest.mark.parametrize(("width", "theme"), [(400, "dark"), (1_600, "light")])
def test_every_page_of_every_run_fits(page, width, theme):
    page.size(width)
    page.settled(
        f"document.documentElement.classList.toggle('dark', {json.dumps(theme != 'dark')});"
        "document.getElementById('theme').click()"
    )
    # The header must not take much of a small screen.
    assert page.run("document.querySelector('header').offsetHeight") < 100
    for run in ("demo", "killed", "deleted", "living"):
        for name in PAGES:
            page.open(f"/{name}?run={run}")
            assert page.run("document.querySelector('.error')?.innerText ?? ''") == "", (run, name)
            assert page.run("document.querySelectorAll('h1').length") == 1
            over = page.run("document.documentElement.scrollWidth - window.innerWidth")
            assert over <= 0, (run, name, width, over)
    assert page.run("document.documentElement.classList.contains('dark')") is (theme == "dark")


OVERLAPS = """[...document.querySelectorAll('figure svg')].flatMap((svg) => {
  const texts = [...svg.querySelectorAll('text')].filter((t) => t.textContent.trim());
  const boxes = texts.map((t) => t.getBoundingClientRect());
  return texts.flatMap((t, i) => texts.slice(i + 1).filter((_, k) => {
    const [a, b] = [boxes[i], boxes[i + 1 + k]];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    return wide > 1 && tall > 0.35 * Math.min(a.height, b.height);
  }).map((other) => `${t.textContent} / ${other.textContent}`));
})"""
"""Pairs of texts in one figure that cover each other. Boxes of lines are a little taller than their letters."""


@pytest.mark.parametrize("width", [400, 1_600])
def test_no_text_of_a_figure_covers_another(page, width):
    page.size(width)
    found = {}
    for run in ("demo", "killed"):
        for name in PAGES:
            page.open(f"/{name}?run={run}")
            if pairs := page.run(OVERLAPS):
                found[f"{run} {name}"] = pairs[:5]
    assert found == {}


def test_a_legend_has_the_colours_of_its_bars(page):
    page.open("/ledger?run=demo")
    looks = (
        ".map((one) => { const s = getComputedStyle(one); return [s.fill, s.stroke, s.fillOpacity].join(); })"
    )
    bars = f"[...document.querySelectorAll('figure.narrow > svg rect')]{looks}"
    keys = f"[...document.querySelectorAll('figure.narrow .swatch rect')]{looks}"
    assert len(page.run(keys)) == 2
    assert {key.rpartition(",")[0] for key in page.run(keys)} == {
        bar.rpartition(",")[0] for bar in page.run(bars)
    }
    # Waiting looks the same in the figure as in its legend, and unlike everything else there.
    page.open("/timeline?run=demo")
    bars = set(page.run(f"[...document.querySelectorAll('figure.wide > svg rect')]{looks}"))
    keys = page.run(f"[...document.querySelectorAll('figure.wide .swatch rect')]{looks}")
    waiting = [key for key in keys if key.endswith(",0.3")]
    assert len(waiting) == 2
    assert set(waiting) <= bars


def test_states_of_runs_are_told_apart(page):
    for run, said in (
        ("demo", "The run has ended at step"),
        ("killed", "The run broke off at step 4"),
        ("living", "The run goes on at step 1"),
    ):
        page.open(f"/overview?run={run}")
        assert said in page.run("document.getElementById('sentence').innerText")
    page.open("/table?run=deleted")
    assert (
        "older files of the journal were deleted at step 1; keep more with broker.journal.keep_bytes"
        in page.text()
    )


def test_a_run_that_goes_on_is_followed(page, runs):
    page.open("/ledger?run=living")
    before = page.run("document.getElementById('sum').innerText")
    runs["living"].group(2, rewards=[0.5, 1.0])
    runs["living"].train()
    page.wait(f"document.getElementById('sum').innerText !== {json.dumps(before)}")
    assert page.run("document.getElementById('sum').innerText").startswith("The ledger closes")


def test_new_points_are_drawn_into_the_same_figure(page, runs):
    page.open("/overview?run=living")
    page.wait("document.querySelectorAll('.plot canvas').length > 1")
    page.run(
        "document.querySelectorAll('.plot canvas').forEach((canvas) => { canvas.dataset.before = 'yes'; })"
    )
    step = runs["living"].step
    runs["living"].line(**{"step": step + 1, "rollout/return_mean": 0.75})
    page.wait(f"document.getElementById('sentence').innerText.includes('at step {step + 1}')")
    # What the figure is read at is the new step; the canvas is the one from before.
    readings = "[...document.querySelectorAll('figure .keys-of')].map((keys) => keys.innerText)"
    page.wait(f"{readings}.some((text) => text.startsWith('step {step + 1}'))")
    assert page.run("document.querySelectorAll('.plot canvas[data-before=yes]').length") > 1


def test_a_page_that_nobody_sees_asks_for_nothing(page):
    page.open("/overview?run=living")
    # Its next rest ends when the test says so. Before it begins, a round has ended.
    page.run(
        "window.asked = 0; window.ask = window.fetch; window.later = window.setTimeout;"
        "window.fetch = (...all) => { window.asked += 1; return window.ask(...all); };"
        "window.setTimeout = (what, ms) => ms < 5000 ? window.later(what, ms) : (window.wake = what, 0)"
    )
    page.wait("window.wake !== undefined")
    assert page.run("window.asked") > 0
    page.run(
        "Object.defineProperty(document, 'hidden', { configurable: true, get: () => true });"
        "window.asked = 0; window.wake();"
        "new Promise((done) => window.later(done, 100))"
    )
    assert page.run("window.asked") == 0
    page.run(
        "Object.defineProperty(document, 'hidden', { configurable: true, get: () => false });"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait("window.asked > 0")


def test_an_alarm_links_to_its_page_of_the_documentation(page):
    page.open("/overview?run=killed")
    page.settled("document.querySelector('#findings a').click()")
    assert page.run("location.hash").startswith("#/docs?")
    assert page.run("document.querySelector('h1').innerText").startswith("Operations: start, watch, stop")
    page.settled("document.querySelector('main table a, main p a[href*=docs]').click()")
    assert page.run("location.hash").startswith("#/docs?")


def test_the_ledger_closes_and_a_band_opens_its_trajectories(page):
    page.open("/ledger?run=killed")
    said = page.run("document.getElementById('sum').innerText")
    assert said == "The ledger closes: 200 tokens journaled = 40 held + 100 trained + 60 dropped."
    page.settled(click("document.querySelector('svg a[aria-label^=\"dropped: evaluated\"]')"))
    assert set(first_rows(page)) == {"1eval-before 0-0.0", "1eval-after 4-0.0"}
    page.open("/ledger?run=killed")
    page.settled(click("document.querySelector('svg a[aria-label^=\"trained: masked\"]')"))
    assert first_rows(page) == ["1g5.0.0"]


@pytest.mark.parametrize(
    ("field", "value", "rows"),
    [
        ("f-purpose", "eval", 2), ("f-evaluation", "before 0", 1), ("f-task", "0", 2), ("f-reward_min", "0.9", 4),
        ("f-correct", "true", 1), ("f-outcome", "trained", 10), ("f-status", "failed", 2), ("f-reason", "KeyError", 2),
        ("f-lag_min", "3", 1), ("f-step_min", "3", 5), ("f-version", "2", 4), ("f-group", "1g8", 2),
        ("filter", "g3.1", 1), ("f-length_min", "6", 0), ("f-uniform", "true", 4), ("f-uniform", "false", 16),
        ("f-step_max", "1", 9), ("f-length_max", "4", 0), ("f-length_max", "5", 20), ("f-reward_max", "0.1", 3),
    ],
)  # fmt: skip
def test_filters_act_and_stand_in_the_address(page, field, value, rows):
    page.open("/table?run=killed")
    page.settled(fill(field, value, "change"))
    assert len(first_rows(page)) == rows
    address = page.run("location.hash")
    page.open("/overview?run=killed")
    page.open(address.removeprefix("#"))
    assert len(first_rows(page)) == rows


def test_filters_that_need_several_environments_or_rewards(page):
    page.open("/table?run=living")
    page.settled(fill("f-env", "words", "change"))
    assert sorted(first_rows(page)) == ["1g1.0.0", "1g1.1.0"]
    page.open("/table?run=living")
    page.settled(fill("f-reward_name", "spelling", "change"))
    page.settled(fill("f-reward_min", "0.6", "change"))
    assert first_rows(page) == ["1g1.1.0"]


def test_logs_are_filtered_by_process_level_and_text(page):
    texts = "[...document.querySelectorAll('[aria-label=\"log lines\"] tbody tr')].map((r) => r.lastChild.innerText)"
    page.open("/overview?run=living")
    # Merged by time, the newest first.
    assert page.run(texts) == ["learner waits", "learner begins", "model waits", "model begins"]
    page.settled(fill("level", "WARNING", "change"))
    assert page.run(texts) == ["learner waits", "model waits"]
    page.settled(fill("process", "model", "change"))
    assert page.run(texts) == ["model waits"]
    page.open("/overview?run=living&log=begins")
    assert page.run(texts) == ["learner begins", "model begins"]


def test_a_bar_of_the_histogram_filters(page):
    page.open("/table?run=killed&purpose=train")
    label = page.run("[...document.querySelectorAll('figure svg a')].at(-1).getAttribute('aria-label')")
    page.settled(
        "[...document.querySelectorAll('figure svg a')].at(-1).dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    assert len(first_rows(page)) == int(label.rpartition(": ")[2])


def test_keys_go_through_list_and_group_and_texts(page):
    page.open("/table?run=killed&sort=trajectory&purpose=train")
    wanted = first_rows(page)
    page.settled("document.querySelector('[aria-label=trajectories] tbody a').click()")
    seen = [page.run("document.querySelector('#facts span').innerText")]
    for key in ("j", "j", "k", "]", "["):
        ready = page.run(READY)
        page.press(key)
        page.wait_for_view(ready)
        seen.append(page.run("document.querySelector('#facts span').innerText"))
    names = [text.removeprefix("trajectory ") for text in seen]
    assert names == [wanted[0], wanted[1], wanted[2], wanted[1], wanted[2], wanted[1]]
    for tab in ("tokens", "shaded", "text"):
        ready = page.run(READY)
        page.press("t")
        page.wait_for_view(ready)
        assert page.run("document.querySelector('.tabs [aria-pressed=true]').innerText") == tab
    page.press("?")
    page.wait("document.querySelector('dialog[open]')")
    page.press("Escape")
    page.wait("!document.querySelector('dialog[open]')")
    page.press("3")
    page.wait("location.hash.startsWith('#/ledger')")


def test_the_inspector_says_where_the_gradient_of_a_token_was_cut(page):
    page.open("/trajectory?run=killed&id=1g5.0.0&tab=shaded&shade=lag")
    # The learner kept nothing here, but versions and bound say what was masked.
    assert page.run("document.getElementById('cuts').innerText") == (
        "Of 5 sampled tokens: 2 masked, because their lag is beyond the bound 2. "
        "Whether others were clipped was not kept."
    )
    words = page.run("[...document.querySelectorAll('.tokens .t')].map((t) => t.innerText)")
    assert words[:4] == ["<bos>", " 2", "+", " 2"]
    assert len(words) == 10
    page.run(
        "document.querySelector('.tokens .t[data-i=\"4\"]').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    said = page.run("document.getElementById('token').innerText")
    assert "version 0" in said
    assert "lag 3" in said
    assert "beyond the bound 2" in said
    # What the learner did not keep is not 0.
    assert "entropy —" in said
    # Observations have no shade.
    assert page.run("document.querySelector('.tokens .t[data-i=\"7\"]').className") == "t o"


def test_a_branch_has_a_tab_of_its_own_and_a_place_in_the_tree(page):
    page.open("/trajectory?run=living&id=1g0.0.0")
    turns = "[...document.querySelectorAll('section.turn b')].map((b) => b.innerText)"
    assert page.run(turns) == ["turn 0: prompt", "turn 1: sampled"]
    page.settled(
        "[...document.querySelectorAll('.tabs button')].find((b) => b.innerText.startsWith('branch 2')).click()"
    )
    assert "branch=1" in page.run("location.hash")
    assert page.run(turns) == ["turn 2: observation", "turn 3: sampled"]
    assert "└ turn 2, observation" in page.text()


def test_rewards_stand_beside_the_turns_that_earned_them(page):
    page.open("/trajectory?run=killed&id=1g4.1.0")
    turns = page.run("[...document.querySelectorAll('section.turn .facts')].map((f) => f.innerText)")
    assert ["rewards: score 0.5" in turn for turn in turns] == [False, True, False, True]
    texts = page.run(
        "[...document.querySelectorAll('[aria-label=siblings] pre')].map((one) => one.innerText)"
    )
    assert len(texts) == 2


def test_tokens_are_read_without_a_mouse(page):
    page.open("/trajectory?run=killed&id=1g5.0.0&tab=shaded&shade=version")
    page.run("document.querySelector('.tokens .t[tabindex=\"0\"]').focus()")
    said = [page.run("document.getElementById('token').innerText")]
    for _ in range(4):
        page.press("ArrowRight")
        said.append(page.run("document.getElementById('token').innerText"))
    assert [text.split()[1] for text in said] == ["0", "1", "2", "3", "4"]
    assert "version 0" in said[-1]


def test_all_that_can_be_clicked_can_be_reached_by_keys(page):
    clickable = "a, button, input, select, .plot[title]"
    for name in PAGES:
        page.open(f"/{name}?run=demo")
        lost = page.run(
            f"[...document.querySelectorAll('{clickable}')].filter((one) => one.tabIndex < 0).map((o) => o.outerHTML)"
        )
        assert lost == [], name
        unnamed = page.run(
            "[...document.querySelectorAll('main button, main a, main select, main input')].filter((one) =>"
            " !(one.textContent || one.ariaLabel || one.labels?.length))"
            ".map((one) => one.outerHTML)"
        )
        assert unnamed == [], name


def test_figures_save_as_svg_and_their_numbers_as_csv(page):
    page.call("Page.setDownloadBehavior", behavior="deny")
    for name in ("overview", "timeline", "ledger", "table", "staleness", "differences"):
        page.open(f"/{name}?run=demo")
        page.wait("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('canvas'))")
        found = page.run(
            """(async () => {
              const make = URL.createObjectURL, saved = [];
              URL.createObjectURL = (blob) => { saved.push(blob); return make.call(URL, blob); };
              const buttons = [...document.querySelectorAll('button.small')]
                .filter((button) => ['SVG', 'CSV'].includes(button.innerText));
              for (const button of buttons) button.click();
              // Some ask the server first.
              while (saved.length < buttons.length) await new Promise((done) => setTimeout(done, 20));
              URL.createObjectURL = make;
              return Promise.all(saved.map(async (blob) => [blob.type, await blob.text()]));
            })()"""
        )
        figures = [text for kind, text in found if kind == "image/svg+xml"]
        sheets = [text for kind, text in found if kind == "text/csv"]
        assert figures or name == "table", name
        assert sheets, name
        for text in figures:
            # It stands alone: no colour of the theme is looked up elsewhere.
            assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
            assert "var(--" not in text, name
        for text in sheets:
            rows = list(csv.reader(text.splitlines()))
            assert len({len(row) for row in rows}) == 1, name
            assert len(rows) > 1, name
        tables = page.run(
            "[...document.querySelectorAll('main table')].filter((t) => t.checkVisibility())"
            ".map((t) => t.querySelector('th:nth-child(2)').innerText.trim())"
        )
        seconds = [next(csv.reader(text.splitlines()))[1].strip() for text in sheets]
        assert [title for title in tables if title not in seconds] == [], name


def test_a_step_of_the_timeline_opens_its_batch(page):
    page.open("/timeline?run=demo")
    page.settled(click("document.querySelector('svg a[aria-label^=\"step 2:\"]')"))
    assert (
        page.run("document.getElementById('batch').innerText") == "The batch of step 2: what did it wait for?"
    )
    bars = "[...document.querySelectorAll('#batch ~ figure svg a text')].map((text) => text.textContent)"
    assert len(page.run(bars)) > 4
    page.settled(click("document.querySelector('#batch ~ figure svg a')"))
    assert page.run("location.hash").startswith("#/trajectory")


def test_answers_to_a_task_stand_in_the_order_of_the_steps(page):
    page.open("/table?run=killed&task=0&sort=step")
    assert first_rows(page) == ["1eval-before 0-0.0", "1eval-after 4-0.0"]


def test_curves_are_smoothed_and_stand_over_wall_time(page):
    reading = "[...document.querySelectorAll('figure .keys-of')][1].innerText"
    page.open("/overview?run=demo")
    whole = page.run(reading)
    page.settled(fill("smooth", "5", "change"))
    assert page.run(reading) != whole
    page.settled(fill("x", "time", "change"))
    assert "x=time" in page.run("location.hash")
    assert re.match(r"\d\d:\d\d:\d\d", page.run(reading))


def test_staleness_is_counted(page):
    page.open("/staleness?run=demo")
    assert re.match(
        r"0 tokens beyond the bound of 1 carried gradient, counted over [\d,]+ tokens",
        page.run("document.getElementById('verdict').innerText"),
    )
    assert (
        page.run(
            "[...document.querySelectorAll('svg text')].filter((t) => t.textContent === 'bound 1').length"
        )
        > 1
    )


def test_a_trajectory_that_was_masked_whole_says_so(page):
    # The learner wrote no log-probability of it, because none of its tokens was trained.
    page.open("/trajectory?run=demo&id=1g27.0.0&tab=shaded")
    said = page.run("document.getElementById('cuts').innerText")
    assert said.startswith("Of 4 sampled tokens: 4 masked")


def test_a_click_on_a_point_opens_the_samples_of_the_step(page):
    page.open("/overview?run=demo")
    page.wait("document.querySelector('.plot canvas')")
    page.run("document.querySelectorAll('.plot')[1].focus()")
    page.press("Enter")
    page.wait("location.hash.startsWith('#/samples')")
    page.wait("document.querySelector('article.card')")


def test_the_evaluations_before_and_after_the_steps_are_drawn(page):
    page.open("/timeline?run=demo")
    titles = page.run("[...document.querySelectorAll('svg title')].map((t) => t.textContent)")
    drawn = [title for title in titles if title.startswith("evaluation held-out")]
    assert [title.partition(":")[0] for title in drawn] == [
        f"evaluation held-out of step {step}" for step in (0, 8, 16)
    ]


def test_pauses_for_new_versions_are_told(page):
    page.open("/timeline?run=demo")
    assert "pause for a new version, mean 0.0" in page.run("document.getElementById('pauses').innerText")
    titles = page.run("[...document.querySelectorAll('svg title')].map((t) => t.textContent)")
    assert [
        t
        for t in titles
        if t.startswith("generator-0: first token of version 8") and "after a pause of 0.06" in t
    ]


def test_metrics_are_found_by_a_regular_expression(page):
    page.open("/overview?run=demo")
    page.run(fill("filter", "^learner/ratio.*max$", "input"))
    rows = page.run("[...document.querySelectorAll('#metric-list tbody tr')].map((row) => row.innerText)")
    assert len(rows) == 2
    assert "largest importance ratio proximal/behaviour of a trained token" in " ".join(rows)
    page.settled("document.querySelector('#metric-list input').click()")
    assert "learner/ratio_current_proximal_max" in page.run(
        "[...document.querySelectorAll('figcaption')].at(-1).innerText"
    )
    page.run(fill("filter", "((", "input"))
    assert "not a regular expression" in page.text()


def test_two_runs_side_by_side(page):
    page.open("/differences?runs=demo,killed&x=tokens")
    text = page.text()
    assert "learner.batch_trajectories" in text
    assert page.run("document.querySelectorAll('.plot').length") > 0


def test_a_page_whose_viewer_has_ended_says_that_it_is_old(browser, runs):
    browser.go("about:blank")
    with serving([runs["killed"]]) as url:
        browser.go(url)
        browser.wait("document.querySelector('h1') && document.getElementById('main').dataset.ready")
    browser.wait("document.getElementById('progress').innerText.includes('the viewer does not answer')")
    assert "The run broke off" in browser.text()
    browser.go("about:blank")
    browser.problems.clear()


def test_an_error_is_shown_and_the_page_stays(page):
    page.open("/trajectory?run=killed&id=../../etc/passwd")
    assert "the journal has no trajectory '../../etc/passwd'" in page.text()
    page.open("/table?run=killed&reward_min=x")
    assert "reward_min is 'x'" in page.text()
    # The browser logs answers other than 200; they are what is tested here.
    page.problems[:] = [problem for problem in page.problems if "status of 40" not in problem]


def test_hostile_texts_stay_texts(browser, tmp_path):
    params = {"env": {"name": "calculator", "params": {EVIL[:90]: EVIL}}}
    maker = Maker(tmp_path / "<b>evil", env="<img src=x onerror=alert(1)>", settings=params)
    maker.group(
        2, rewards=[0.0, 1.0], reward_name="</td><script>alert(1)</script>", stop="\u202e<i>stop", texts=None
    )
    maker.train()
    maker.group(2, rewards=[0.0, 1.0], status="failed", error=EVIL[:3_000])
    maker.journal.flush()
    folder = maker.close()
    kinds = ("answer", "observation")
    parts = [SamplePart("prompt", EVIL + "x" * 60_000, 5), *(SamplePart(kind, EVIL, 5) for kind in kinds)]
    sample = Sample(
        step=1,
        policy_version=0,
        split="train",
        env=EVIL[:200],
        task="1g0.0",
        group="1g0",
        parts=parts,
        end=EVIL,
    )
    with (folder / "samples.jsonl").open("wb") as file:
        file.write(encode_line(sample) + b"\xff\xfe{\n" + b'{"step": 1e999}\n')
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(json.dumps({"step": 2, "note": EVIL}).encode() + b"\n\xff\xff\n" + b"[" * 100_000 + b"\n")
        file.write(json.dumps({"step": 2, "learner/loss": 1.0, f"env/{EVIL[:500]}": 1.0}).encode() + b"\n")
    (folder / "logs").mkdir()
    (folder / "logs" / "<u>x.log").write_bytes(
        b"2026-01-01 00:00:00,000 INFO    " + EVIL.encode() + b"\xff" * 1_000_000 + b"\n"
    )
    (folder / "hosts" / "<b>host").mkdir(parents=True)
    started = {
        EVIL[:90]: {"pid": 1, "restarts": 3, "last_reason": EVIL, "endings": [{"time": 1.0, "reason": EVIL}]}
    }
    record = {"machine": EVIL[:90], "processes": started}
    (folder / "hosts" / "<b>host" / "supervisor.json").write_text(json.dumps(record))
    browser.problems.clear()
    with serving([folder]) as url:
        browser.go("about:blank")
        browser.size(1_000)
        browser.go(url)
        browser.wait("document.querySelector('h1') && document.getElementById('main').dataset.ready")
        for name in [
            *PAGES,
            "trajectory?id=1g1.0.0",
            "trajectory?id=1g0.1.0&tab=shaded",
            "overview?match=env",
        ]:
            browser.open(f"/{name}")
            assert browser.run("document.querySelector('.error')?.innerText ?? ''") == "", name
            assert browser.run("document.title").endswith("· <b>evil")
            assert (
                browser.run(
                    "document.querySelectorAll('main script, main img, main style, main i i, main b b, main u').length"
                )
                == 0
            )
            assert browser.run("document.querySelectorAll('h1').length") == 1
            assert browser.run("document.documentElement.scrollWidth - window.innerWidth") <= 0, name
            hidden = browser.run(
                "/[\\u0000-\\u0008\\u000b-\\u001f\\u007f\\u202a-\\u202e\\u2066-\\u2069]/.test(document.body.textContent)"
            )
            assert not hidden, name
        browser.open("/samples?step=1")
        assert "\\u{202e}gnp.exe" in browser.text()
        assert "<script>document.title='owned'</script>" in browser.text()
        browser.go("about:blank")
    assert browser.problems == []


def test_an_exported_copy_opens_from_the_disk(browser, runs, tmp_path):
    copied = tmp_path / "killed"
    shutil.copytree(runs["killed"], copied)
    said = export(Questions([copied, runs["demo"]]), tmp_path / "copy")
    assert "2 runs" in said
    browser.go("about:blank")
    browser.wait("location.href === 'about:blank'")
    browser.problems.clear()
    browser.asked.clear()
    browser.go(f"file://{tmp_path}/copy/index.html")
    browser.wait("document.querySelector('h1') && document.getElementById('main').dataset.ready")
    for name in [*PAGES, "trajectory?id=1g5.0.0&tab=shaded"]:
        browser.open(f"/{name}")
        assert browser.run("document.querySelector('.error')?.innerText ?? ''") == "", name
    browser.open("/ledger")
    assert browser.run("document.getElementById('sum').innerText").startswith("The ledger closes: 200 tokens")
    for filtered, rows in (
        ("outcome=trained&reward_min=0.9", 3),
        ("uniform=true", 4),
        ("step_min=3&step_max=3", 2),
        ("lag_min=3", 1),
    ):
        browser.open(f"/table?{filtered}")
        assert len(first_rows(browser)) == rows, filtered
    browser.open("/overview?run=demo")
    assert "The run has ended" in browser.text()
    assert browser.problems == []
    assert all(url.startswith(("file:", "about:", "data:")) for url in browser.asked)
