"""Test the server of `offbeat view`: who is refused, who gets in, and what every answer has."""

import asyncio
import os
import subprocess
import sys
from dataclasses import fields

import aiohttp
import pytest
from yarl import URL

from launch.errors import ConfigError
from launch.view.questions import ANSWERS, Questions
from launch.view.recorded import DEMO
from launch.view.server import ASSETS, view_server
from launch.view.table import Filter
from protocol.security import key_files
from protocol.security.http import access, read_tokens
from tests.view_runs import small_run

QUESTIONS = ["runs", "differences", "docs", *ANSWERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("runs") / "small")


def served(folder, visit, *, keys=None, host="127.0.0.1"):
    """Serve a run, and return what ``visit(session, base, secret)`` returns."""
    questions = Questions([folder])
    for shown in questions.runs.values():
        # Else the journal is read while it is asked about, and an answer says how far that is.
        shown.read_all()

    async def run():
        async with view_server(questions, host, 0, keys) as address:
            link, _, secret = address.url.partition("#")
            connector = aiohttp.TCPConnector(ssl=access(keys).context or False)
            jar = aiohttp.CookieJar(unsafe=True)
            async with aiohttp.ClientSession(connector=connector, cookie_jar=jar) as session:
                return await visit(session, link.removesuffix("/login"), secret)

    return asyncio.run(run())


async def login(session, base, secret):
    async with session.get(f"{base}/api/login", headers={"Authorization": f"Bearer {secret}"}) as answer:
        assert answer.status == 200
        return answer


def test_nothing_is_told_without_the_cookie(folder):
    async def visit(session, base, secret):
        for name in QUESTIONS:
            async with session.get(f"{base}/api/{name}") as answer:
                assert answer.status == 401, name
        async with session.get(f"{base}/api/login", headers={"Authorization": f"Bearer {secret}x"}) as answer:
            assert answer.status == 401
            assert "Set-Cookie" not in answer.headers
        await login(session, base, secret)
        for name in QUESTIONS:
            async with session.get(
                f"{base}/api/{name}", params={"id": "1g2.0.0", "page": "run/view.md"}
            ) as answer:
                assert answer.status == 200, (name, await answer.text())

    served(folder, visit)


def test_an_answer_that_is_as_before_is_not_sent_again(folder):
    async def visit(session, base, secret):
        await login(session, base, secret)
        for name in ("overview", "names", "logs"):
            async with session.get(f"{base}/api/{name}") as answer:
                tag = answer.headers["ETag"]
            async with session.get(f"{base}/api/{name}", headers={"If-None-Match": tag}) as answer:
                assert (answer.status, await answer.read()) == (304, b""), name
            async with session.get(f"{base}/api/{name}", headers={"If-None-Match": '"x"'}) as answer:
                assert answer.status == 200

    served(folder, visit)


def test_the_cookie_is_for_this_page_alone(folder):
    async def visit(session, base, secret):
        answer = await login(session, base, secret)
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert secret not in cookie
        assert f"offbeat-view-{base.rpartition(':')[2]}=" in cookie

    served(folder, visit)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    ],
)
def test_foreign_hosts_and_origins_are_refused_even_with_the_cookie(folder, headers, status):
    async def visit(session, base, secret):
        await login(session, base, secret)
        for path in ("/api/overview", "/", "/app.js", "/api/login"):
            async with session.get(base + path, headers=headers) as answer:
                assert answer.status == status
                assert "offbeat view" not in await answer.text()

    served(folder, visit)


def test_only_get_is_answered(folder):
    async def visit(session, base, secret):
        await login(session, base, secret)
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            async with session.request(method, f"{base}/api/overview", data=b"x") as answer:
                assert answer.status == 405

    served(folder, visit)


def test_paths_lead_nowhere_else(folder):
    async def visit(session, base, secret):
        await login(session, base, secret)
        paths = [
            "/../config.json",
            "/..%2f..%2fetc/passwd",
            "/%2e%2e/server.py",
            "/assets/../server.py",
            "/server.py",
        ]
        for path in [*paths, "//etc/passwd", "/demo.zip", "/api/..%2foverview", "/api/../overview"]:
            async with session.get(URL(base + path, encoded=True)) as answer:
                assert answer.status in (400, 404), path
        parameters = [
            "run",
            "id",
            "step",
            "names",
            "process",
            "level",
            "text",
            "sort",
            "start",
            "runs",
            "task",
            "group",
            "page",
            "since",
            "count",
        ]
        filters = [field.name for field in fields(Filter)]
        for name in QUESTIONS:
            for parameter in [*parameters, *(filters if name == "table" else [])]:
                for value in ("../../etc/passwd", "%00", "x" * 9_000, "\u202e"):
                    async with session.get(f"{base}/api/{name}", params={parameter: value}) as answer:
                        text = await answer.text()
                        assert answer.status in (200, 400, 404, 414), (name, parameter, text)
                        assert "root:" not in text

    served(folder, visit)


def test_every_answer_forbids_foreign_content(folder):
    async def visit(session, base, secret):
        await login(session, base, secret)
        for path in ("/", "/login", "/app.js", "/api/overview", "/nothing", "/api/table?start=x"):
            async with session.get(base + path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'self';")
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Cache-Control"] == "no-store"

    served(folder, visit)


def test_another_address_needs_tls_and_the_runs_token(folder, tmp_path):
    async def nothing(session, base, secret):
        raise AssertionError("it must not be served")

    with pytest.raises(ConfigError, match="--keys FOLDER"):
        served(folder, nothing, host="10.0.0.5")
    keys = tmp_path / "keys"
    key_files.make(keys)
    token = read_tokens(keys)[0]

    async def visit(session, base, secret):
        assert base.startswith("https://")
        assert secret == ""
        async with session.get(f"{base}/api/overview") as answer:
            assert answer.status == 401
        answer = await login(session, base, token)
        assert "Secure" in answer.headers["Set-Cookie"]
        async with session.get(f"{base}/api/overview") as answer:
            assert answer.status == 200

    served(folder, visit, keys=keys)


def test_what_the_package_brings_along_is_small_and_has_its_licence():
    assert DEMO.stat().st_size < 500_000
    assert "(v1.6.32)" in (ASSETS / "uplot.js").read_text(encoding="utf-8")[:100]
    assert (ASSETS / "uplot-licence.txt").read_text(encoding="utf-8").startswith("The MIT License")


def test_all_assets_are_small_and_hold_no_inline_script_or_foreign_address():
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) < 200_000
    for path in ASSETS.iterdir():
        text = path.read_text(encoding="utf-8")
        own = path.name not in ("uplot.js", "uplot-licence.txt")
        if own:
            assert "innerHTML" not in text, path
            assert "http://" not in text.replace("http://www.w3.org/", ""), path
            assert "https://" not in text, path
        if path.suffix == ".html":
            assert "<script>" not in text
            assert "<style" not in text
            assert " style=" not in text
            assert " on" not in text.replace(" one", "")


def test_the_command_prints_a_link_and_ends_at_a_signal(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.cli", "view", str(folder), "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "open this link" in process.stdout.readline()
    assert "/login#" in process.stdout.readline()
    # A run on the same machine goes first.
    assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10
    assert os.sched_getscheduler(process.pid) == os.SCHED_BATCH
    process.terminate()
    assert process.wait(200) == 0
    process.stdout.close()
