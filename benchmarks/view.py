"""Measure the page of a run: how fast it is on a large journal, and what it takes from a run that goes on.

`large` writes a journal, starts `offbeat view` on it with a cold cache, and times pages, filters and trajectories.
`beside` trains, and three arms take turns as A P D D P A in windows of some seconds, with the same time for each:

    A  nobody looks; viewer and browser are stopped by SIGSTOP
    P  a headless Chromium on the run's own cores has the page Learning open, and a client asks the same beside it
    D  the same, but page and client rest for a twentieth of the time, so that what they cost can be told from noise

Throughput wavers by several percent from window to window, and a page costs less than one, so P alone cannot
settle a limit of 0.99. D costs many times as much; its loss, divided by how much oftener page and client asked than
in P, is the loss of one page, with an error that is as many times smaller.

    python -m benchmarks.view large [--trajectories 100000] [--json FILE]
    python -m benchmarks.view beside [--blocks 13] [--cores 2] [--json FILE]

Thirteen blocks take fourteen minutes. Nothing else should work on the machine meanwhile.
"""

import argparse
import contextlib
import http.cookiejar
import importlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import ROOT, Figure, half_interval, save_results, table
from learner.run_files import METRICS

# Helpers of the tests, which are not typed.
BROWSER: Any = importlib.import_module("tests.browser")
RUNS: Any = importlib.import_module("tests.view_runs")

GROUP = 8
SAMPLED = 3_700
"""Sampled tokens of a trajectory in its first answer, so that 100,000 trajectories take 5 GB."""
TRAIN_EVERY, FILE_EVERY = 16, 250
"""Groups of a learner step, and of a file of the journal."""
POLL_S = 5.0
"""Seconds between two rounds of the client, as in launch/view/assets/app.js."""
ROUND = "APDDPA"
ARMS = {"P": "a page and a client", "D": "both asking oftener"}
PACES = {"A": 0, "P": 1, "D": 20}
"""How many times as fast the rests of page and client pass in an arm."""
ASKED = ("runs", "overview", "metrics", "names", "logs")
"""What the page Learning asks in a round."""
METRICS_ASKED = (
    "rollout/return_mean,rollout/correct_share,learner/idle_share,generator/idle_share,learner/entropy_nats"
)
STEADY = ("learner.evaluation_tasks=0", "learner.optimizer.lr=1e-8", "learner.optimizer.warmup_steps=0")
"""Settings with which the job is the same in the first window and in the last: no evaluation, and no progress."""
SETTLE_S = 1.0
"""Time that a window leaves out at its beginning."""
PACED = """(() => {
  const [set, clear] = [window.setTimeout.bind(window), window.clearTimeout.bind(window)];
  let [pace, left, since, timer, wake, rests, rounds] = [1, 0, 0, 0, null, null, 0];
  const fire = () => { const go = wake; wake = null; timer = 0; rounds += 1; go(); };
  const wait = () => { since = performance.now(); timer = pace && wake ? set(fire, Math.max(0, left) / pace) : 0; };
  window.setTimeout = (what, ms, ...given) => {
    if (!(ms >= LEAST_MS)) return set(what, ms, ...given);
    [wake, left] = [what, ms];
    wait();
    if (rests) rests();
    return 0;
  };
  window.rounds = () => rounds;
  window.pace = async (now, firstMs) => {
    if (timer) { clear(timer); left -= pace * (performance.now() - since); }
    [timer, pace] = [0, now];
    if (!wake) await new Promise((done) => { rests = done; });
    else if (now) { left = Math.min(left, now * firstMs); wait(); }
  };
})()""".replace("LEAST_MS", str(int(1_000 * POLL_S)))
"""Script that comes before the page's own: it counts the rests in launch/view/assets/app.js, and lets them pass at a
pace. `pace` returns while the page rests: a round that is stopped midway would make the next rest long."""
WRITTEN = "written"
"""File that says that a large run was written whole."""
WARM_STEPS = 10
PAGES = {
    "Learning": "overview",
    "Waiting": "timeline",
    "Tokens": "ledger",
    "Writing": "table",
    "Staleness": "staleness",
}
FILTERS: dict[str, dict[str, str]] = {
    "reward of at least 0.5": {"reward_min": "0.5"},
    "sorted by reward": {"sort": "-reward"},
    "groups with equal returns": {"uniform": "true"},
    "trained, with their lag": {"outcome": "trained", "lag_min": "0"},
    "part of a name": {"trajectory": "77"},
}


# --- a viewer in a process of its own -----------------------------------------------------------------------


class Viewer:
    """A process of `offbeat view`, logged in."""

    def __init__(self, folder: Path) -> None:
        began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch.cli", "view", str(folder), "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.link = self.process.stdout.readline().strip()
        self._tags: dict[str, str] = {}
        self._mark = ""
        self.start_s = time.monotonic() - began
        """Seconds until the link was printed."""
        self.base, _, secret = self.link.partition("/login#")
        self._opener = urllib.request.build_opener(
            urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        )
        login = urllib.request.Request(
            f"{self.base}/api/login", headers={"Authorization": f"Bearer {secret}"}
        )
        self._opener.open(login, timeout=30).read()

    def ask(self, question: str, **given: str) -> tuple[dict[str, Any], float]:
        """Return an answer, and the seconds that it took."""
        began = time.perf_counter()
        query = urllib.parse.urlencode(given)
        with self._opener.open(f"{self.base}/api/{question}?{query}", timeout=120) as response:
            answer = response.read()
        return dict(json.loads(answer)), time.perf_counter() - began

    def look(self) -> None:
        """Ask what an open page asks in a round, with the tags of the answers before."""
        for question in ASKED:
            given = {"count": "200"} if question == "logs" else {}
            if question == "metrics":
                given = {"names": METRICS_ASKED, "since": self._mark}
            url = f"{self.base}/api/{question}?{urllib.parse.urlencode(given)}"
            tags = {"If-None-Match": self._tags[url]} if url in self._tags else {}
            try:
                with self._opener.open(urllib.request.Request(url, headers=tags), timeout=120) as response:
                    answer = json.loads(response.read())
                    self._tags[url] = response.headers["ETag"]
            except urllib.error.HTTPError as error:
                if error.code != 304:
                    raise
                continue
            if question == "metrics":
                self._mark = answer["mark"]

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def cpu_seconds(root: int, *, group: bool = False) -> float:
    """Return the CPU seconds of a process and of all below it, the ended ones included.

    Args:
        group: of the living processes of a process group instead, and of their children that have ended.
    """
    found: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            found[int(stat.parent.name)] = int(words[2 if group else 1]), sum(map(int, words[11:15]))
    if group:
        of = [ticks for above, ticks in found.values() if above == root]
        return sum(of) / os.sysconf("SC_CLK_TCK")
    below, todo = set[int](), [root]
    while todo:
        below.add(above := todo.pop())
        todo += [pid for pid, (parent, _) in found.items() if parent == above]
    return sum(found[pid][1] for pid in below if pid in found) / os.sysconf("SC_CLK_TCK")


# --- a large journal ----------------------------------------------------------------------------------------


def write_run(folder: Path, trajectories: int) -> Path:
    """Write a run folder whose journal has so many trajectories, by the broker's own state."""
    maker = RUNS.Maker(folder)
    for number in range(trajectories // GROUP):
        maker.group(GROUP, versions=[[maker.version] * SAMPLED] * GROUP)
        if number % TRAIN_EVERY == TRAIN_EVERY - 1:
            maker.train()
            maker.checkpoint()
        if number % FILE_EVERY == FILE_EVERY - 1:
            maker.new_file()
    maker.close()
    return folder


def forget(folder: Path) -> int:
    """Have the kernel drop a folder's files from its cache; return their bytes."""
    nbytes = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                nbytes += path.stat().st_size
    return nbytes


def large(
    trajectories: int, starts: int, repetitions: int, kept: Path | None
) -> tuple[list[Figure], dict[str, Any]]:
    """Time a viewer of a large journal, started ``starts`` times with a cold cache.

    Args:
        kept: run folder that is used if it is there, else written and kept; None: one that is removed afterwards.
    """
    seconds: dict[str, list[float]] = {}
    draw = random.Random(3)

    def note(name: str, value: float) -> None:
        seconds.setdefault(name, []).append(value)

    with tempfile.TemporaryDirectory(prefix="offbeat-view-") as place:
        folder = kept or Path(place) / "large"
        if not (folder / WRITTEN).exists():
            write_run(folder, trajectories)
            (folder / WRITTEN).touch()
        peaks, nbytes = [], 0
        for _ in range(starts):
            nbytes = forget(folder)
            began = time.monotonic()
            viewer = Viewer(folder)
            try:
                note("start until the link is printed", viewer.start_s)
                first, took = viewer.ask("overview")
                note("first page, while the journal is read", took)
                assert first["progress"]["whole"] is False, "the journal is too small to be still unread"
                while not viewer.ask("overview")[0]["progress"]["whole"]:
                    time.sleep(0.2)
                note("journal read whole, after the start", time.monotonic() - began)
                for _ in range(repetitions):
                    _time_answers(viewer, trajectories, draw, note)
                _time_browser(viewer, trajectories, draw, note)
                peaks.append(float(peak_bytes(viewer.process.pid) / 2**20))
            finally:
                viewer.close()
    figures = [_timed(name, values) for name, values in seconds.items()]
    figures.append(Figure("peak memory of the server", "MiB", peaks, note="limit 300"))
    return figures, {
        "trajectories": trajectories,
        "journal_bytes": nbytes,
        "seconds": seconds,
        "peaks_mib": peaks,
    }


def _timed(name: str, values: list[float]) -> Figure:
    limits = {
        "start until": "3 s",
        "first page": "1 s",
        "filter": "300 ms",
        "trajectory": "300 ms",
        "page": "1 s",
    }
    limit = next((f"limit {limit}" for word, limit in limits.items() if name.startswith(word)), "")
    whole = name.startswith(("start", "journal"))
    return Figure(
        name, "s" if whole else "ms", [value if whole else 1_000 * value for value in values], note=limit
    )


def _time_answers(
    viewer: Viewer, trajectories: int, draw: random.Random, note: Callable[[str, float], None]
) -> None:
    for title, question in PAGES.items():
        note(f"page {title}, the server's answer", viewer.ask(question)[1])
    for what, given in FILTERS.items():
        answer, took = viewer.ask("table", **given)
        assert answer["total"] == trajectories
        note(f"filter: {what}", took)
    name = f"1g{draw.randrange(trajectories // GROUP)}.{draw.randrange(GROUP)}.0"
    answer, took = viewer.ask("trajectory", id=name)
    assert answer["row"]["trajectory"] == name if "row" in answer else answer["trajectory"] == name
    note("trajectory, the server's answer", took)


def _time_browser(
    viewer: Viewer, trajectories: int, draw: random.Random, note: Callable[[str, float], None]
) -> None:
    """Time what a person sees: from the change of the address until the page says that it is there."""
    path = BROWSER.chromium()
    if path is None:
        return
    browser = BROWSER.Browser(path)
    try:
        browser.size(1_400)
        browser.go(viewer.link)
        browser.wait("document.querySelector('h1') && document.getElementById('main').dataset.ready")
        views = {f"page {title}, in the browser": f"/{page}" for title, page in PAGES.items()}
        name = f"1g{draw.randrange(trajectories // GROUP)}.0.0"
        views |= {
            "filter: reward of at least 0.5, in the browser": "/table?reward_min=0.5",
            "trajectory, in the browser": f"/trajectory?id={name}",
        }
        for what, view in views.items():
            began = time.perf_counter()
            browser.open(view)
            note(what, time.perf_counter() - began)
    finally:
        browser.close()


# --- a run that goes on -------------------------------------------------------------------------------------


class Watched:
    """The steps of a run that goes on, with their time on the wall clock and totals."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._path, self.pid = folder / METRICS, pid

    def rows(self) -> list[tuple[float, float, float]]:
        """Return time, learner step and sampled tokens of each step so far."""
        found = []
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if "generator/tokens_total" in row:
                    found.append((row["time"], row["step"], row["generator/tokens_total"]))
        return found

    def rates(self, begin: float, end: float) -> tuple[float, float]:
        """Return learner steps and sampled tokens per second in a part of the run."""
        times, steps, tokens = np.array(self.rows()).T
        assert times[0] < begin
        assert times[-1] >= end, "the run ended before its window"
        return tuple(
            float(np.diff(np.interp([begin, end], times, values))[0] / (end - begin))
            for values in (steps, tokens)
        )  # type: ignore[return-value]


@contextlib.contextmanager
def training(place: Path) -> Iterator[Watched]:
    """Train `recipes/spell_backward.toml` in processes of its own, until this context ends."""
    command = [sys.executable, "-m", "launch.cli", "train", str(ROOT / "recipes" / "spell_backward.toml")]
    command += [f"run.dir={place}", "run.name=run", "learner.steps=100000", "run.max_minutes=60", *STEADY]
    with (place / "train.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        try:
            run = Watched(place / "run", process.pid)
            until = time.monotonic() + 300
            while len(run.rows()) < WARM_STEPS:
                assert process.poll() is None, (place / "train.log").read_text(encoding="utf-8")[-2_000:]
                assert time.monotonic() < until, "the run does not get going"
                time.sleep(1.0)
            yield run
        finally:
            process.terminate()
            process.wait(120)


class Watchers:
    """A page that is open in a browser, and a client that asks the same. Both can rest, and ask at another pace."""

    def __init__(self, folder: Path) -> None:
        self._viewer = Viewer(folder)
        self._browser = BROWSER.Browser(BROWSER.chromium())
        self._browser.call("Page.addScriptToEvaluateOnNewDocument", source=PACED)
        self._browser.go(self._viewer.link)
        self._browser.wait("document.querySelector('h1') && document.getElementById('main').dataset.ready")
        self._change, self._pace, self._asked = threading.Condition(), 0, 0
        self._ended = False
        self._second = threading.Thread(target=self._poll)
        self._second.start()
        self._set(0)

    def _poll(self) -> None:
        with self._change:
            while not self._ended:
                self._change.wait(POLL_S / self._pace if self._pace else None)
                if self._pace and not self._ended:
                    self._viewer.look()
                    self._asked += 1

    def _set(self, pace: int) -> None:
        with self._change:
            self._pace = pace
            self._change.notify()
        self._browser.run(f"window.pace({pace}, {1_500 * SETTLE_S})")

    @contextlib.contextmanager
    def arm(self, name: str) -> Iterator[None]:
        """Let both ask at the pace of an arm until the context is left; at its end they rest."""
        if PACES[name]:
            self._set(PACES[name])
        else:
            self._viewer.process.send_signal(signal.SIGSTOP)
            os.killpg(self._browser.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if PACES[name]:
                self._set(0)
            else:
                os.killpg(self._browser.pid, signal.SIGCONT)
                self._viewer.process.send_signal(signal.SIGCONT)

    def rounds(self) -> dict[str, int]:
        """Return how often both have asked so far; neither may be stopped."""
        return {"page": self._browser.run("window.rounds()"), "client": self._asked}

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of all sides so far."""
        return {
            "viewer": cpu_seconds(self._viewer.process.pid),
            "browser": cpu_seconds(self._browser.pid, group=True),
            # The thread has begun, so it has a number.
            "client": time.clock_gettime(time.pthread_getcpuclockid(self._second.ident or 0)),
        }

    def close(self) -> None:
        """End them; they must not be stopped."""
        with self._change:
            self._ended = True
            self._change.notify()
        self._second.join()
        self._browser.close()
        self._viewer.close()


def beside(blocks: int, window_s: float, cores: int) -> tuple[list[Figure], dict[str, Any]]:
    """Compare the throughput of windows in which somebody looks to that of windows without, in one run.

    Args:
        cores: cores that run, viewer and browser share; all of them are children of this process.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    windows: list[dict[str, Any]] = []
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="offbeat-view-") as place, training(Path(place)) as run:
        watchers = Watchers(Path(place) / "run")
        try:
            for number, arm in enumerate(ROUND * blocks):
                rounds = watchers.rounds()
                with watchers.arm(arm):
                    time.sleep(SETTLE_S)
                    begin, before = time.time(), watchers.cpu_s() | {"run": cpu_seconds(run.pid)}
                    time.sleep(window_s)
                    end, after = time.time(), watchers.cpu_s() | {"run": cpu_seconds(run.pid)}
                one: dict[str, Any] = {
                    "arm": arm, "block": number // len(ROUND), "begin": begin, "end": end
                }  # fmt: skip
                one["rounds"] = {who: count - rounds[who] for who, count in watchers.rounds().items()}
                one["cpu_share"] = {
                    side: 100 * (after[side] - before[side]) / (end - begin) for side in before
                }
                windows.append(one)
        finally:
            watchers.close()
        loads.append(os.getloadavg()[0])
        # The last window needs a step after its end.
        until = time.monotonic() + 60
        while run.rows()[-1][0] < windows[-1]["end"] and time.monotonic() < until:
            time.sleep(0.5)
        for one in windows:
            one["steps_per_s"], one["tokens_per_s"] = run.rates(one["begin"], one["end"])
            one["run_cpu_ms_per_token"] = 10 * one["cpu_share"]["run"] / one["tokens_per_s"]
    return beside_figures(windows), {
        "windows": windows,
        "window_s": window_s,
        "settle_s": SETTLE_S,
        "paces": PACES,
        "cores": cores,
        "nice": os.nice(0),
        "loads": loads,
    }


RATES = {
    "tokens_per_s": ("sampled tokens", "tokens/s"),
    "steps_per_s": ("learner steps", "steps/s"),
    "run_cpu_ms_per_token": ("CPU of the run for a sampled token", "ms"),
}


def beside_figures(windows: Sequence[dict[str, Any]]) -> list[Figure]:
    """Return the table of `beside`. A window of P or D in which the page asked nothing is not counted."""
    blocks: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for one in windows:
        if one["arm"] == "A" or one["rounds"]["page"]:
            blocks.setdefault(one["block"], {}).setdefault(one["arm"], []).append(one)
    whole = [block for block in blocks.values() if len(block) == len(PACES)]

    def of(arm: str, key: str, part: str = "") -> list[float]:
        """Return for each block the mean of an arm's windows."""
        return [
            statistics.fmean(one[key][part] if part else one[key] for one in block[arm]) for block in whole
        ]

    rounds = {arm: {who: of(arm, "rounds", who) for who in ("page", "client")} for arm in ARMS}
    # As often as the one of both that gained less.
    oftener = min(sum(rounds["D"][who]) / sum(rounds["P"][who]) for who in ("page", "client"))
    figures = []
    for key, (name, unit) in RATES.items():
        for arm, what in ARMS.items():
            looked, bare = of(arm, key), of("A", key)
            note = f"mean {_interval(looked, bare)}"
            if arm == "D":
                note += f"; for one of {oftener:.1f} times as many rounds {_interval(looked, bare, oftener)}"
            figures.append(Figure(f"{name}, with {what}", unit, looked, "nobody", bare, note))
    for arm, what in ARMS.items():
        for who, counts in rounds[arm].items():
            figures.append(Figure(f"rounds of the {who} in a window, with {what}", "", counts))
        for side in ("viewer", "browser", "client"):
            figures.append(
                Figure(f"CPU of the {side}, with {what}", "% of a core", of(arm, "cpu_share", side))
            )
    return figures


def _interval(values: Sequence[float], bare: Sequence[float], oftener: float = 1.0) -> str:
    """Say how well the ratio is known: the geometric mean of the blocks' ratios, and its interval of 95 %.

    Args:
        oftener: number that the loss is divided by.
    """
    logs = np.log(np.array(values) / np.array(bare)) / oftener
    mean = float(logs.mean())
    half = half_interval(logs.tolist(), 0.975) if len(logs) > 1 else float("nan")
    ends = ", ".join(f"{float(np.exp(end)):.4f}" for end in (mean - half, mean + half))
    return f"{float(np.exp(mean)):.4f} [{ends}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    of_large = kinds.add_parser("large")
    of_large.add_argument("--trajectories", type=int, default=100_000)
    of_large.add_argument("--starts", type=int, default=3)
    of_large.add_argument("--repetitions", type=int, default=5)
    of_large.add_argument("--folder", type=Path, help="keep the run here, or use the one that is here")
    of_beside = kinds.add_parser("beside")
    of_beside.add_argument("--blocks", type=int, default=13)
    of_beside.add_argument("--window-s", type=float, default=9.0)
    of_beside.add_argument("--cores", type=int, default=2)
    for one in (of_large, of_beside):
        one.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.kind == "large":
        figures, found = large(
            arguments.trajectories, arguments.starts, arguments.repetitions, arguments.folder
        )
    else:
        figures, found = beside(arguments.blocks, arguments.window_s, arguments.cores)
    shown = table(figures)
    sys.stdout.write(shown + "\n")
    if arguments.json is not None:
        save_results(arguments.json, {"figures": shown}, found)


if __name__ == "__main__":
    main()
