"""Fetch versions from real servers through a network that breaks, corrupts and stalls."""

import asyncio
import contextlib
import http.client
import itertools
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from aiohttp import web

import actors.generator.weights.fetch
import protocol.weights.server
from actors.config import GeneratorConfig
from actors.generator.generator import relay
from actors.generator.weights.cache import Cache, cache_folder
from actors.generator.weights.staging import Announced, Stage
from launch.processes import free_port
from launch.run_file.sections import RunConfig
from launch.run_folder import save_config
from launch.servers import weights_url
from learner.publisher import Publisher
from learner.weight_copy import OutgoingWeights
from protocol.errors import AddressRefused, WeightsError
from protocol.security.http import Access, access, read_tokens
from protocol.security.key_files import make as make_keys
from protocol.weights.format import DATA, MANIFEST, read_manifest, read_shapes, retire, version_folder
from tests.integration.protocol.weights_harness import CHUNK, RUN, proxy, same, server, size_of, write

pytestmark = pytest.mark.usefixtures("small_chunks")


both_ways = pytest.mark.parametrize("keys", ["as it is", "encrypted"], indirect=True)
"""Parameter for tests that depend on how the bytes travel: plain or encrypted."""


@pytest.fixture
def keys(tmp_path, request):
    if getattr(request, "param", "") != "encrypted":
        return None
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def url(versions, tmp_path, keys):
    with server(versions, tmp_path, keys=keys) as address:
        yield address


@pytest.fixture
def cache(tmp_path, keys):
    held = Cache(tmp_path / "shm" / "offbeat-cache-r-1", RUN, partial(access, keys))
    yield held
    held.close()


@both_ways
def test_a_version_comes_whole_and_only_once(versions, url, cache):
    source = write(versions, 7)
    found = cache.obtain(1, 7, [url])
    assert same(found, source)
    assert read_manifest(found).root == read_manifest(source).root
    assert cache.fetched_bytes == size_of(source)
    assert cache.obtain(1, 7, [url]) == found
    assert cache.fetched_bytes == size_of(source)


@both_ways
def test_a_transfer_broken_at_any_byte_goes_on(versions, url, cache):
    source = write(versions, 7)
    seed = random.randrange(2**32)
    print("seed", seed)
    cut_after = random.Random(seed).randrange(3 * CHUNK, 8 * CHUNK)
    with proxy(url, cut_after=cut_after, cuts=8) as flaky:
        assert same(cache.obtain(1, 7, [flaky.url]), source)
        # Each cut loses at most the chunk in transit, on each of the connections.
        lost = 8 * actors.generator.weights.fetch.CONNECTIONS * (CHUNK + 65_536)
        assert flaky.passed < size_of(source) + lost + 100_000


@both_ways
def test_a_dead_source_leaves_what_was_good_for_the_next(versions, url, cache):
    source = write(versions, 7)
    with proxy(url, cut_after=2_000_000, dies=True) as dying:
        with pytest.raises(WeightsError, match=dying.url):
            cache.obtain(1, 7, [dying.url])
        with proxy(url) as good:
            assert same(cache.obtain(1, 7, [dying.url, good.url]), source)
            assert good.passed < size_of(source) - 1_000_000


def fetch_in_process(folder: str, sources: list[str], version: int, result, go) -> None:
    held = Cache(Path(folder), RUN)
    found = held.obtain(1, version, sources)
    result.put((held.fetched_bytes, found.with_name(DATA).stat().st_ino))
    # Hold the cache until then, so that the other processes find it in use.
    go.wait(60)
    held.close()


def test_a_killed_fetch_is_gone_on_with(versions, url, cache):
    source = write(versions, 7, mib=6)
    context = multiprocessing.get_context("spawn")
    unread, go = context.SimpleQueue(), context.Event()
    with proxy(url, rate=4e6) as slow:
        child = context.Process(target=fetch_in_process, args=(str(cache.folder), [slow.url], 7, unread, go))
        child.start()
        deadline = time.monotonic() + 240.0
        while slow.passed < 3_000_000:
            assert time.monotonic() < deadline
            assert child.is_alive()
            time.sleep(0.01)
        os.kill(child.pid, signal.SIGKILL)
        child.join(20)
    (partial,) = cache.folder.glob("*.partial")
    assert not cache.locate(1, 7).exists()
    assert same(cache.obtain(1, 7, [url]), source)
    assert cache.fetched_bytes < size_of(source) - 1_000_000
    assert not partial.exists()


def test_the_processes_of_a_host_fetch_once_and_share_the_pages(versions, url, tmp_path):
    source = write(versions, 7)
    folder = cache_folder(tmp_path, RUN, "tcp://broker:5755")
    context = multiprocessing.get_context("spawn")
    results, go = context.Queue(), context.Event()
    children = [
        context.Process(target=fetch_in_process, args=(str(folder), [url], 7, results, go)) for _ in range(2)
    ]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    assert sorted(fetched for fetched, _ in found) == [0, size_of(source)]
    assert len({inode for _, inode in found}) == 1
    go.set()
    for child in children:
        child.join(20)
        assert child.exitcode == 0
    assert not folder.exists(), "the last one removes the cache"


def test_a_changed_byte_is_refused_and_the_next_source_asked(versions, url, cache):
    source = write(versions, 7)
    with (
        proxy(url, flip_at=1_234_567) as lying,
        pytest.raises(WeightsError, match=r"127.*do not match their hash"),
    ):
        cache.obtain(1, 7, [lying.url])
    with proxy(url, flip_at=1_234_567) as lying:
        assert same(cache.obtain(1, 7, [lying.url, url]), source)


@both_ways
def test_a_silent_source_is_given_up(versions, url, cache, monkeypatch):
    monkeypatch.setattr(actors.generator.weights.fetch, "STALL_S", 2.0)
    source = write(versions, 7)
    with proxy(url, silent=True) as silent:
        assert same(cache.obtain(1, 7, [silent.url, url]), source)


def test_the_error_names_every_source(cache, url):
    nobody = "http://127.0.0.1:9"
    with pytest.raises(WeightsError) as caught:
        cache.obtain(1, 7, [nobody, "ftp://x", url])
    for said in (f"{nobody} ", "ftp://x is no http(s) URL", f"{url} answers 404"):
        assert said in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone", "altered manifest"])
def test_a_damaged_version_is_not_taken_from_a_server(versions, url, cache, tmp_path, damage):
    source = write(versions, 7)
    intact = tmp_path / "intact"
    shutil.copytree(versions, intact)
    data = source.with_name(DATA)
    content = bytearray(data.read_bytes())
    if damage == "truncated":
        data.write_bytes(content[:-1])
    elif damage == "flipped":
        content[1_000_000] ^= 1
        data.write_bytes(content)
    elif damage == "gone":
        data.unlink()
    else:
        manifest = bytearray(source.read_bytes())
        manifest[len(manifest) // 2] ^= 1
        source.write_bytes(manifest)
    with pytest.raises(WeightsError, match=url):
        cache.obtain(1, 7, [url])
    assert not cache.locate(1, 7).exists()
    with server(intact, tmp_path) as second:
        assert same(cache.obtain(1, 7, [url, second]), intact / "v00000007" / MANIFEST)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 6}, "sends epoch 1 version 6, asked for epoch 1 version 7"),
        ({"epoch": 0}, "sends epoch 0 version 7"),
        ({"run": "other"}, "serves run 'other'"),
        ({"chunk_bytes": 0, "chunks": b""}, ">= 1"),
        ({"chunks": b""}, "chunk hashes"),
        ({"root": "0" * 64}, "root hash"),
    ],
)
def test_a_manifest_of_something_else_is_refused(versions, url, cache, monkeypatch, change, said):
    source = write(versions, 7)
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("GET", "/v1/1/7/manifest")
    forged = msgspec.structs.replace(
        msgspec.msgpack.decode(connection.getresponse().read(), type=protocol.weights.format.Manifest),
        **change,
    )
    connection.close()

    async def lie(self, request):
        return web.Response(body=msgspec.msgpack.encode(forged))

    with monkeypatch.context() as patched:
        patched.setattr(protocol.weights.server.WeightsServer, "_manifest", lie)
        with server(versions, versions.parent) as liar, pytest.raises(WeightsError, match=said):
            cache.obtain(1, 7, [liar])
    assert same(cache.obtain(1, 7, [url]), source)


def test_another_root_than_announced_is_refused(versions, url, cache):
    source = write(versions, 7)
    with pytest.raises(WeightsError, match="announced was 0000"):
        cache.obtain(1, 7, [url], root="0" * 64)
    assert same(cache.obtain(1, 7, [url], root=read_manifest(source).root), source)


def test_another_run_is_not_served(versions, tmp_path, cache):
    write(versions, 7, run="other")
    with server(versions, tmp_path) as url, pytest.raises(WeightsError, match="of run 'other'"):
        cache.obtain(1, 7, [url])


def test_a_relay_serves_what_it_has_and_its_death_does_not_matter(versions, url, cache, tmp_path):
    source = write(versions, 7)
    cache.obtain(1, 7, [url])
    second = Cache(tmp_path / "shm2" / "offbeat-cache-r-1", RUN)
    with server(cache.folder, tmp_path, locate=cache.locate) as relay:
        with proxy(relay, cut_after=1_500_000, dies=True) as dying, proxy(url) as learner:
            assert same(second.obtain(1, 7, [dying.url, learner.url]), source)
            assert dying.passed >= 1_500_000
            assert 0 < learner.passed < size_of(source) - 500_000
        with pytest.raises(WeightsError, match="404"):
            second.obtain(1, 8, [relay])
    second.close()


def test_what_is_half_fetched_is_not_served(versions, url, cache, tmp_path):
    write(versions, 7)
    with proxy(url, cut_after=1_000_000, dies=True) as dying, contextlib.suppress(WeightsError):
        cache.obtain(1, 7, [dying.url])
    assert list(cache.folder.glob("*.partial"))
    second = Cache(tmp_path / "shm2" / "offbeat-cache-r-1", RUN)
    with (
        server(cache.folder, tmp_path, locate=cache.locate) as relay,
        pytest.raises(WeightsError, match="404"),
    ):
        second.obtain(1, 7, [relay])
    second.close()


@both_ways
def test_a_version_retired_in_the_middle_is_fetched_to_its_end(versions, url, cache):
    source = write(versions, 7)
    expected = source.with_name(DATA).read_bytes()
    with proxy(url, rate=8e6) as slow:
        thread = threading.Timer(0.2, lambda: (write(versions, 8), write(versions, 9), retire(versions, 2)))
        thread.start()
        found = cache.obtain(1, 7, [slow.url])
        thread.join(20)
    assert not version_folder(versions, 7).exists()
    assert found.with_name(DATA).read_bytes() == expected


@both_ways
def test_a_small_step_travels_as_a_delta(versions, url, cache):
    write(versions, 7)
    cache.obtain(1, 7, [url])
    full = cache.fetched_bytes
    second = write(versions, 8, step=0.01)
    found = cache.obtain(1, 8, [url])
    assert same(found, second)
    assert cache.fetched_bytes - full < 0.1 * full
    assert read_manifest(found).encoding == "full"
    assert sorted(p.name for p in found.parent.iterdir()) == [MANIFEST, DATA]


def test_a_large_step_travels_whole(versions, url, cache):
    write(versions, 7)
    cache.obtain(1, 7, [url])
    full = cache.fetched_bytes
    second = write(versions, 8, seed=1)
    assert same(cache.obtain(1, 8, [url]), second)
    assert cache.fetched_bytes == 2 * full


@both_ways
def test_a_delta_that_breaks_is_gone_on_with(versions, url, cache):
    write(versions, 7)
    cache.obtain(1, 7, [url])
    full = cache.fetched_bytes
    second = write(versions, 8, step=0.2)
    with proxy(url, cut_after=300_000, dies=True) as dying, pytest.raises(WeightsError):
        cache.obtain(1, 8, [dying.url])
    assert same(cache.obtain(1, 8, [url]), second)
    assert cache.fetched_bytes - full < 0.6 * full


@pytest.mark.parametrize("damage", ["base", "delta"])
def test_a_delta_of_no_use_gives_way_to_the_whole_version(versions, url, cache, monkeypatch, damage):
    first = cache.obtain(1, 7, [url]) if write(versions, 7) else None
    second = write(versions, 8, step=0.01)
    if damage == "base":
        data = first.with_name(DATA)
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
    else:
        monkeypatch.setattr(actors.generator.weights.cache, "apply_delta", lambda *_: None)
    assert same(cache.obtain(1, 8, [url]), second)
    assert not list(cache.folder.glob("*.partial"))


def test_a_base_the_server_never_had_gives_the_whole_version(versions, url, cache):
    write(versions, 7)
    cache.obtain(1, 7, [url])
    shutil.rmtree(version_folder(versions, 7))
    write(versions, 9, step=0.01)
    with server(versions, versions.parent) as fresh:
        before = cache.fetched_bytes
        cache.obtain(1, 9, [fresh])
        # Equal chunks are not fetched again, but a step of 1 % leaves no equal chunks.
        assert cache.fetched_bytes - before > 0.9 * before


def test_equal_chunks_are_not_fetched_again(versions, url, cache, monkeypatch):
    monkeypatch.setattr(protocol.weights.server.VersionOpener, "delta", lambda *_: None)
    write(versions, 7)
    cache.obtain(1, 7, [url])
    before = cache.fetched_bytes
    same(cache.obtain(1, 8, [url]), second) if (second := write(versions, 8)) else None
    assert cache.fetched_bytes == before


def test_the_cache_keeps_the_newest_two(versions, url, cache):
    for version in (7, 8, 9, 10):
        write(versions, version, seed=version, mib=1)
        cache.obtain(1, version, [url])
    assert [p.name for p in cache._shared.whole_versions()] == ["e00000001-v00000010", "e00000001-v00000009"]


@pytest.mark.parametrize("found", ["before", "while writing"])
def test_without_room_nothing_is_left(versions, url, cache, monkeypatch, found):
    write(versions, 7)

    def full(*_):
        raise OSError(28, "No space left on device")

    if found == "before":
        none = types.SimpleNamespace(f_blocks=9, f_bavail=9, f_frsize=4096)
        monkeypatch.setattr(os, "fstatvfs", lambda _: none)
    else:
        monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WeightsError, match=r"no room for .* bytes; give the host more shared memory"):
        cache.obtain(1, 7, [url])
    assert not list(cache.folder.glob("*.partial"))


def test_no_room_is_said_though_another_connection_has_failed_first(versions, url, tmp_path, monkeypatch):
    manifest = read_manifest(write(versions, 7))
    fetching = actors.generator.weights.fetch
    monkeypatch.setattr(fetching, "STALL_S", 2.0)

    def full(*_):
        raise OSError(28, "No space left on device")

    with proxy(url, silent=True) as silent:
        made = itertools.count()

        def connect():
            # The first connection of each try hears nothing.
            at = silent.url if next(made) % fetching.CONNECTIONS == 0 else url
            return fetching.Source(at, Access(), threading.Event())

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(WeightsError, match="no room for"):
            fetching.fetch(connect, manifest, tmp_path / "data", threading.Event())


def test_a_stage_fetches_from_elsewhere_and_links(versions, url, cache, tmp_path, monkeypatch):
    source = write(versions, 7)
    stage = Stage("generator-0", read_shapes(source.with_name(DATA)), root=tmp_path, cache=cache)
    announced = Announced(1, 7, str(source), sources=(url,))
    _, data = stage.stage(announced, RUN)
    assert data.samefile(source.with_name(DATA)), "on the learner's host nothing travels"
    monkeypatch.setattr("actors.generator.weights.staging.host_id", lambda: "elsewhere")
    _, data = stage.stage(announced, RUN)
    assert data.samefile(cache.locate(1, 7) / DATA)
    stage.close()
    assert not cache.folder.exists()


@both_ways
def test_a_stage_that_closes_ends_its_fetch(versions, url, cache, tmp_path):
    source = write(versions, 7)
    stage = Stage("generator-0", read_shapes(source.with_name(DATA)), root=tmp_path, cache=cache)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            stage.stage(Announced(1, 7, "/nowhere", sources=(slow.url,)), RUN)
        except WeightsError as error:
            errors.append(error)

    with proxy(url, rate=200_000) as slow:
        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.5)
        stage.close()
        thread.join(5)
        assert not thread.is_alive()
    assert "this process ends" in str(errors[0])


def refusal(access, url, folder):
    stranger = Cache(folder / "offbeat-cache-r-9", RUN, lambda: access)
    with pytest.raises(WeightsError) as refused:
        stranger.obtain(1, 7, [url])
    stranger.close()
    return str(refused.value)


@pytest.mark.parametrize("keys", ["encrypted"], indirect=True)
def test_only_who_has_the_token_and_the_certificate_is_served(versions, keys, url, cache, tmp_path):
    source, other = write(versions, 7), tmp_path / "other"
    make_keys(other)
    mine = access(keys)
    assert same(cache.obtain(1, 7, [url]), source)
    assert "answers 401" in refusal(Access({}, mine.context), url, tmp_path)
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(Access(mine.headers, access(other).context), url, tmp_path)
    assert "CERTIFICATE_VERIFY_FAILED" in refusal(Access(), url, tmp_path)


@pytest.mark.parametrize("keys", ["encrypted"], indirect=True)
def test_neither_token_nor_weights_travel_in_the_clear(versions, keys, url, cache):
    source = write(versions, 7)
    with proxy(url) as listening:
        assert same(cache.obtain(1, 7, [listening.url]), source)
    assert listening.passed > size_of(source)
    for secret in (
        read_tokens(keys)[0].encode(),
        b"Bearer",
        source.with_name(DATA).read_bytes()[5_000:5_064],
    ):
        assert secret not in listening.heard
    with (
        server(versions, versions.parent) as plain,
        pytest.raises(WeightsError, match="token is not sent there"),
    ):
        cache.obtain(1, 7, [plain])


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 200),
        ("/v1/1/7/data", {}, 200),
        ("/v1/1/7/data", {"Range": "bytes=0-9"}, 206),
        ("/v1/1/7/data", {"Range": "bytes=-10"}, 206),
        ("/v1/1/7/data", {"Range": "bytes=99999999-"}, 416),
        ("/v1/1/7/data", {"Range": "nonsense"}, 416),
        ("/v1/1/7/data?base=1.6." + "0" * 64, {}, 404),
        ("/v1/1/7/manifest?base=nonsense", {}, 400),
        ("/v1/2/7/manifest", {}, 404),
        ("/v1/1/7/../../etc/passwd", {}, 404),
        ("/v1/1/99999999999999999999/data", {}, 404),
    ],
)
def test_what_a_server_answers(versions, url, path, headers, status):
    data = write(versions, 7, mib=1).with_name(DATA).read_bytes()
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    body = response.read()
    assert response.status == status
    if status == 206:
        assert body == (data[:10] if "0-9" in headers["Range"] else data[-10:])
    connection.close()


def test_a_client_that_reads_slowly_holds_nobody_up(versions, url, cache):
    source = write(versions, 7, mib=16)
    sluggard = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    sluggard.sendall(b"GET /v1/1/7/data HTTP/1.1\r\nHost: x\r\n\r\n")
    stop = threading.Event()

    def read() -> None:
        while not stop.wait(0.64):
            sluggard.recv(65_536)  # 0.1 MB/s

    thread = threading.Thread(target=read)
    thread.start()
    try:
        began = time.monotonic()
        assert same(cache.obtain(1, 7, [url]), source)
        write(versions, 8, mib=1)
        # Buffers of the kernel take a part, and the rest takes longer than this.
        assert time.monotonic() - began < 40, "alone, a client at 0.1 MB/s takes 160 s"
    finally:
        stop.set()
        thread.join(5)
        sluggard.close()


def test_the_role_serves_the_learners_folder_until_it_is_told_to_stop(tmp_path, monkeypatch, cache):
    run_dir = tmp_path / RUN
    run_dir.mkdir()
    config = RunConfig.model_validate(
        {
            "model": {"tiny": {}},
            "env": {"name": "calculator_game"},
            "weights": {"http": f"127.0.0.1:{free_port()}"},
            "security": {"encrypt": False},
        }
    )
    save_config(config, run_dir / "config.json")
    publisher = Publisher(RUN, run_dir, epoch=1, keep=2, url=weights_url(config, None))
    values = torch.arange(300_000, dtype=torch.float32)
    told = []
    weights = OutgoingWeights({"a": ("F32", tuple(values.shape))}, [("a", values)])
    publisher.publish(3, weights, announce=told.append)
    publisher.settle()
    (published,) = told
    command = [sys.executable, "-m", "launch.role", "weights", str(run_dir)]
    role = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])})
    try:
        deadline = time.monotonic() + 240.0
        while True:
            try:
                found = cache.obtain(1, 3, [published.url])
                break
            except WeightsError:
                assert role.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert same(found, Path(published.manifest))
        role.terminate()
        assert role.wait(20) == 0
    finally:
        role.kill()
        role.wait(20)
        publisher.close()


def test_a_generator_tells_where_it_serves_and_serves_what_it_has(versions, url, cache, tmp_path):
    source = write(versions, 7)
    cache.obtain(1, 7, [url])
    second = Cache(tmp_path / "shm2" / "offbeat-cache-r-1", RUN)

    async def pass_on() -> str:
        config = GeneratorConfig(weights_http="127.0.0.1:0")
        async with relay(config, cache, RUN, "tcp://127.0.0.1:5755", None) as address:
            found = await asyncio.to_thread(second.obtain, 1, 7, [address])
            assert same(found, source)
            return address

    assert asyncio.run(pass_on()).startswith("http://127.0.0.1:")
    second.close()

    async def none() -> str:
        async with relay(GeneratorConfig(), cache, RUN, "tcp://127.0.0.1:5755", None) as address:
            return address

    assert asyncio.run(none()) == ""


def test_a_relay_beyond_loopback_needs_keys(cache):
    async def begin() -> None:
        async with relay(GeneratorConfig(weights_http="0.0.0.0:0"), cache, RUN, "tcp://x:1", None):
            pass

    with pytest.raises(AddressRefused, match="only loopback"):
        asyncio.run(begin())


def test_a_version_written_again_is_served_as_it_is_now(versions, url, cache, tmp_path):
    write(versions, 6)
    write(versions, 7, step=0.01)
    cache.obtain(1, 6, [url])
    cache.obtain(1, 7, [url])
    source = write(versions, 7, seed=3)
    second = Cache(tmp_path / "shm2" / "offbeat-cache-r-1", RUN)
    assert same(second.obtain(1, 7, [url]), source)
    second.close()


@both_ways
def test_a_file_of_the_model_is_sent_whole_or_in_part_and_the_connection_stays(
    versions, tmp_path, keys, caplog
):
    (tmp_path / "model").mkdir()
    content = random.Random(7).randbytes(300_000)
    (tmp_path / "model" / "config.json").write_bytes(content)
    given = access(keys)
    with server(versions, tmp_path / "scratch", keys=keys, model=lambda: tmp_path / "model") as url:
        place = url.partition("://")[2]
        connection = (
            http.client.HTTPSConnection(place, context=given.context)
            if given.context
            else http.client.HTTPConnection(place)
        )
        got = []
        for bounds in ({}, {"Range": "bytes=10-19"}, {"Range": "bytes=999999-"}, {}):
            connection.request("GET", "/v1/model/config.json", headers={**given.headers, **bounds})
            answer = connection.getresponse()
            got.append((answer.status, answer.read()))
            assert not answer.will_close
        connection.close()
    assert got[0] == got[3] == (200, content)
    assert got[1] == (206, content[10:20])
    assert got[2][0] == 416
    assert "Unhandled" not in caplog.text
