"""A weights server that has enough transfers is waited for, and nobody is refused or much later for it."""

import contextlib
import http.server
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import protocol.weights.server
from actors.errors import SourceFailed
from actors.generator.weights import fetch, staging
from actors.generator.weights.cache import Cache
from protocol.errors import WeightsError
from protocol.security.http import Access
from protocol.weights.format import DATA, read_shapes
from tests.integration.protocol.weights_harness import RUN, proxy, server, size_of, write

pytestmark = pytest.mark.usefixtures("small_chunks")
HOSTS, LIMIT = 24, 4
"""Each host has four connections, so that 24 times as many want to transfer as may."""


def fetched_by_all(tmp_path, versions, nbytes, name, **limits):
    """Let all hosts fetch at once. Return the seconds until the last one has the version."""
    caches = [Cache(tmp_path / f"{name}-{i}" / "offbeat-cache-r-1", RUN) for i in range(HOSTS)]
    try:
        with server(versions, tmp_path, **limits) as url, ThreadPoolExecutor(HOSTS) as pool:
            began = time.monotonic()
            list(pool.map(lambda cache: cache.obtain(1, 7, [url]), caches))
            seconds = time.monotonic() - began
        assert {cache.fetched_bytes for cache in caches} == {nbytes}
        return seconds
    finally:
        for cache in caches:
            cache.close()


def test_nobody_is_refused_at_24_times_the_limit_and_the_last_host_is_as_early(versions, tmp_path, caplog):
    nbytes = size_of(write(versions, 7, mib=6))
    free, busy = [], []
    # What a crowded machine adds is different each time: the best of some rounds, taken in turn, are compared.
    while len(free) < 2 or (min(busy) > 1.2 * min(free) and len(free) < 6):
        free.append(fetched_by_all(tmp_path, versions, nbytes, f"free{len(free)}"))
        busy.append(fetched_by_all(tmp_path, versions, nbytes, f"busy{len(busy)}", transfers=LIMIT))
    assert min(busy) <= 1.2 * min(free), (free, busy)
    assert not [line for line in caplog.messages if "could not be fetched" in line]


def test_who_is_sent_away_comes_again_and_is_served(versions, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(protocol.weights.server, "PLACE_S", 0.0)
    monkeypatch.setattr(fetch, "LONGEST_RETRY_S", 0.05)
    fetched_by_all(tmp_path, versions, size_of(write(versions, 7, mib=1)), "busy", transfers=LIMIT)
    assert not [line for line in caplog.messages if "could not be fetched" in line]


@contextlib.contextmanager
def always(status, **headers):
    """Answer every request with this status. Yield the URL, and the times of the requests."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            asked.append(time.monotonic())
            self.send_response(status)
            for name, value in {"Content-Length": "0", **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}", asked
    finally:
        httpd.shutdown()
        httpd.server_close()


def test_a_source_that_stays_busy_is_given_up_in_the_end(monkeypatch):
    monkeypatch.setattr(fetch, "BUSY_S", 0.3)
    with always(503, Retry_After="0") as (url, asked):
        with (
            contextlib.closing(fetch.Source(url, Access(), threading.Event())) as source,
            pytest.raises(SourceFailed, match="has been busy for"),
        ):
            source.manifest(1, 7, None)
        assert len(asked) >= 3, "it is asked again"


def test_busy_without_a_time_is_a_failure_as_before(tmp_path):
    cache = Cache(tmp_path / "shm" / "offbeat-cache-r-1", RUN)
    with always(503) as (url, asked), pytest.raises(WeightsError, match="503"):
        cache.obtain(1, 7, [url])
    assert len(asked) == 1
    cache.close()


def test_who_waits_for_a_busy_source_can_be_stopped():
    cancelled = threading.Event()
    with always(503, Retry_After="9") as (url, asked):
        threading.Timer(0.2, cancelled.set).start()
        with (
            contextlib.closing(fetch.Source(url, Access(), cancelled)) as source,
            pytest.raises(fetch.Cancelled),
        ):
            source.manifest(1, 7, None)
        assert len(asked) == 1


def test_a_slow_line_is_named_with_its_rate_and_that_of_the_versions(versions, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_is_of_this_host", lambda manifest: False)
    source = write(versions, 7, mib=1)
    pace = staging.VersionPace()
    cache = Cache(tmp_path / "shm" / "offbeat-cache-r-1", RUN)
    shapes = read_shapes(source.with_name(DATA))
    with server(versions, tmp_path) as url, proxy(url, rate=2e6) as slow:
        stage = staging.Stage("generator-0", shapes, root=tmp_path, cache=cache, pace=pace)
        for version, now in ((5, 0.0), (6, 0.1), (7, 0.2)):
            pace.announced(1, version, now)
        stage.stage(staging.Announced(1, 7, str(source), (slow.url,)), RUN)
        stage.close()
    # One MiB at 2 MB/s.
    assert pace.seconds > 0.1
    assert pace.nbytes > 2**20
    said = pace.sentence()
    assert said.startswith(f"a version takes {pace.seconds:.2g} s at ")
    assert "and one is published each 0.1 s: take a faster line" in said
