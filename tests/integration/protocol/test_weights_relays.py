"""Relays pass verified chunks on while they fetch; one that lies, dies, stalls or is slow is left for the next."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import protocol.weights.server
from actors.generator.weights import fetch
from actors.generator.weights.cache import Cache
from protocol.weights.format import DATA, MANIFEST, read_manifest
from tests.integration.protocol.weights_harness import RUN, proxy, same, server, size_of, write

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.fixture
def url(versions, tmp_path):
    with server(versions, tmp_path) as address:
        yield address


@pytest.fixture
def caches(tmp_path):
    """A relay, and a host behind it."""
    held = [Cache(tmp_path / name / "offbeat-cache-r-1", RUN) for name in ("relay", "child")]
    for cache in held:
        cache.folder.mkdir(parents=True)
    yield held
    for cache in held:
        cache.close()


@pytest.fixture
def relay(caches, tmp_path):
    held = caches[0]
    with server(held.folder, tmp_path, locate=held.locate, passes_on=True, prepares=held.prepares) as address:
        yield address


def fetched_by_both(caches, above, relay, learner, version=7):
    """Let the relay fetch from ``above``, and the host behind it from the relay at the same time."""
    seconds = []

    def obtain(cache, sources):
        began = time.monotonic()
        found = cache.obtain(1, version, sources, ordered=True)
        seconds.append(time.monotonic() - began)
        return found

    with ThreadPoolExecutor(2) as pool:
        behind = pool.submit(obtain, caches[1], [relay, learner])
        first = pool.submit(obtain, caches[0], [above])
        return first.result(60), behind.result(60), seconds


def test_chunks_are_passed_on_while_they_come(versions, url, caches, relay):
    source = write(versions, 7)
    with proxy(url, rate=600_000) as slow, proxy(url) as learner:
        first, behind, (first_s, behind_s) = fetched_by_both(caches, slow.url, relay, learner.url)
        assert same(first, source)
        assert same(behind, source)
        # Nothing came from the learner, and the transfers took place at one time.
        assert learner.passed == 0
        assert first_s > 1.0
        assert behind_s < 1.5 * first_s
    assert sorted(path.name for path in behind.parent.iterdir()) == [MANIFEST, DATA]
    assert not caches[1].complaints


def test_a_delta_is_passed_on(versions, url, caches, relay):
    write(versions, 7)
    for cache in caches:
        cache.obtain(1, 7, [url])
    before = caches[1].fetched_bytes
    source = write(versions, 8, step=0.01)
    with proxy(url) as learner:
        first, behind, _ = fetched_by_both(caches, url, relay, learner.url, version=8)
        assert same(first, source)
        assert same(behind, source)
        assert learner.passed == 0
    assert caches[1].fetched_bytes - before < 0.1 * size_of(source)
    assert read_manifest(behind).encoding == "full"


def test_a_relay_whose_source_prepares_a_delta_is_waited_for(versions, url, caches, relay, monkeypatch):
    write(versions, 7)
    for cache in caches:
        cache.obtain(1, 7, [url])
    made, asked, ready = protocol.weights.server.VersionOpener.delta, threading.Event(), threading.Event()
    monkeypatch.setattr(protocol.weights.server, "PATIENCE_S", 0.1)
    monkeypatch.setattr(fetch, "START_S", 0.5)
    monkeypatch.setattr(fetch, "HOP_S", 0.0)

    def slow(opener, new, base):
        assert ready.wait(60)
        return made(opener, new, base)

    def passed_on(source, *arguments, **settings):
        if source.url == relay:
            asked.set()
        return manifest(source, *arguments, **settings)

    manifest = fetch.Source.manifest
    monkeypatch.setattr(protocol.weights.server.VersionOpener, "delta", slow)
    monkeypatch.setattr(fetch.Source, "manifest", passed_on)
    source = write(versions, 8, step=0.01)
    with proxy(url) as learner, ThreadPoolExecutor(2) as pool:
        first = pool.submit(caches[0].obtain, 1, 8, [url], ordered=True)
        deadline = time.monotonic() + 60
        while not caches[0].prepares(1, 8):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        behind = pool.submit(caches[1].obtain, 1, 8, [relay, learner.url], ordered=True)
        assert asked.wait(60)
        # As for a large model: longer than a relay may take to begin.
        with pytest.raises(TimeoutError):
            behind.result(2.0)
        monkeypatch.setattr(fetch, "START_S", 60.0)
        ready.set()
        assert same(first.result(60), source)
        assert same(behind.result(60), source)
        assert learner.passed == 0
    assert not caches[0].prepares(1, 8)
    assert not caches[1].complaints


def test_a_relay_that_lies_is_left_out_for_good(versions, url, caches, relay, caplog):
    source, second = write(versions, 7), write(versions, 8)
    for version in (7, 8):
        caches[0].obtain(1, version, [url])
    with proxy(relay, flip_at=1_000_000) as lying:
        assert same(caches[1].obtain(1, 7, [lying.url, url], ordered=True), source)
        assert caches[1].complaints == {lying.url: True}
        assert f"from {lying.url}" in caplog.text
        heard = lying.passed
        assert same(caches[1].obtain(1, 8, [lying.url, url], ordered=True), second)
        assert lying.passed == heard
    assert caches[1].complaints == {lying.url: True}


def test_a_relay_that_dies_is_left_for_the_next_and_may_be_asked_again(versions, url, caches, relay):
    source = write(versions, 7)
    caches[0].obtain(1, 7, [url])
    with proxy(relay, cut_after=1_500_000, dies=True) as dying, proxy(url) as learner:
        assert same(caches[1].obtain(1, 7, [dying.url, learner.url], ordered=True), source)
        # What the relay sent was kept.
        assert 0 < learner.passed < size_of(source) - 1_000_000
    assert caches[1].complaints == {dying.url: False}
    second = write(versions, 8)
    caches[0].obtain(1, 8, [url])
    assert same(caches[1].obtain(1, 8, [relay, url], ordered=True), second)
    assert not caches[1].complaints


def test_a_relay_that_does_not_begin_is_left_for_the_next(versions, url, caches, relay, monkeypatch, caplog):
    monkeypatch.setattr(protocol.weights.server, "PATIENCE_S", 0.1)
    monkeypatch.setattr(fetch, "START_S", 0.2)
    monkeypatch.setattr(fetch, "HOP_S", 0.0)
    source = write(versions, 7)
    assert same(caches[1].obtain(1, 7, [relay, url], ordered=True), source)
    assert "has not begun with the version" in caplog.text
    # A relay that is beyond the version will not fetch it any more, and says so at once.
    write(versions, 9)
    caches[0].obtain(1, 9, [url])
    write(versions, 8)
    monkeypatch.setattr(fetch, "START_S", 600.0)
    caches[1].obtain(1, 8, [relay, url], ordered=True)
    assert "version 8 is behind e00000001-v00000009" in caplog.text


def test_a_relay_that_stalls_is_left_for_the_next(versions, url, caches, relay, monkeypatch, caplog):
    monkeypatch.setattr(protocol.weights.server, "WAIT_S", 0.1)
    source = write(versions, 7)
    with proxy(url, cut_after=1_500_000, dies=True) as dying, contextlib.suppress(Exception):
        caches[0].obtain(1, 7, [dying.url])
    assert list(caches[0].folder.glob("*.partial"))
    with proxy(url) as learner:
        assert same(caches[1].obtain(1, 7, [relay, learner.url], ordered=True), source)
        # What the relay had was taken from it.
        assert 0 < learner.passed < size_of(source) - 500_000
    assert "has not come yet" in caplog.text


def test_a_slow_relay_is_left_for_the_next(versions, url, caches, relay, monkeypatch, caplog):
    monkeypatch.setattr(fetch, "SLOW_LOOK_S", 0.3)
    monkeypatch.setattr(fetch, "SPAN_CHUNKS", 1)
    source = write(versions, 7)
    with proxy(url, rate=20_000_000) as line, ThreadPoolExecutor(1) as pool:
        first = pool.submit(caches[0].obtain, 1, 7, [line.url])
        # The child asks while the relay fetches, so that the relay can say how fast it was.
        with proxy(relay, rate=150_000) as slow:
            assert same(caches[1].obtain(1, 7, [slow.url, url], ordered=True), source)
        assert same(first.result(60), source)
    assert "sends " in caplog.text
    assert " MB/s of what it got at " in caplog.text
    assert caches[1].complaints == {slow.url: False}


def test_a_slow_source_is_better_than_none(versions, url, caches, monkeypatch):
    monkeypatch.setattr(fetch, "SLOW_LOOK_S", 0.1)
    source = write(versions, 7)
    with proxy(url, rate=3_000_000) as slow:
        assert same(caches[1].obtain(1, 7, [slow.url], ordered=True), source)
