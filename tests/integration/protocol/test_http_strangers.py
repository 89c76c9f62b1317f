"""Strangers at the HTTP port hold no connection for long and write nothing into the log."""

import asyncio
import contextlib
import logging
import ssl

import pytest
from aiohttp import web

from protocol.security import http
from protocol.security.http import client_context, serving
from protocol.security.key_files import make, rotate


async def answer_to(sent, application, *, keys=None, context=None):
    async with serving(application, "127.0.0.1", 0, keys, shutdown_s=1.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 120.0)
        await ended(writer)
        return answer


async def ended(writer):
    """Close a connection and wait until it is gone, so that none is left for the test behind this one."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n", b"junk\r\n\r\n", bytes(range(256)) * 100]
)
def test_a_connection_without_a_whole_request_is_closed_and_nothing_is_logged(sent, monkeypatch, caplog):
    monkeypatch.setattr(http, "IDLE_S", 0.5)
    caplog.set_level(logging.DEBUG)

    answer = asyncio.run(answer_to(sent, web.Application()))
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_fault_of_ours_is_logged(caplog):
    async def fails(request):
        raise RuntimeError("ours")

    application = web.Application()
    application.router.add_get("/", fails)
    assert b" 500 " in asyncio.run(answer_to(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n", application))
    assert "RuntimeError: ours" in caplog.text


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01", bytes(range(256)) * 100]
)
def test_a_connection_without_a_handshake_is_closed_and_nothing_is_logged(
    sent, tmp_path, monkeypatch, caplog
):
    make(tmp_path)
    monkeypatch.setattr(http, "HANDSHAKE_S", 0.5)
    caplog.set_level(logging.DEBUG)
    answer = asyncio.run(answer_to(sent, web.Application(), keys=tmp_path))
    assert b"HTTP" not in answer
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_member_without_a_whole_request_is_cut_under_tls_too(tmp_path, monkeypatch):
    make(tmp_path)
    monkeypatch.setattr(http, "IDLE_S", 0.5)
    context = client_context(tmp_path)
    assert asyncio.run(answer_to(b"GET / HT", web.Application(), keys=tmp_path, context=context)) == b""


def test_a_member_is_answered_in_tls_1_3(tmp_path):
    make(tmp_path)

    async def version(request):
        return web.Response(text=request.transport.get_extra_info("ssl_object").version())

    application = web.Application()
    application.router.add_get("/", version)
    context = client_context(tmp_path)
    sent = b"GET / HTTP/1.0\r\nHost: x\r\n\r\n"
    assert asyncio.run(answer_to(sent, application, keys=tmp_path, context=context)).endswith(b"TLSv1.3")


def test_a_certificate_that_is_replaced_is_shown_while_the_server_runs(tmp_path, monkeypatch, caplog):
    make(tmp_path)
    monkeypatch.setattr(http, "LOOK_S", 0.01)

    async def taken(port, context):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        except ssl.SSLCertVerificationError:
            return False
        await ended(writer)
        return True

    async def until(condition):
        for _ in range(1_000):
            if await condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("waited in vain")

    async def complained():
        return "the certificate stays as it was" in caplog.text

    async def main():
        async with serving(web.Application(), "127.0.0.1", 0, tmp_path, shutdown_s=1.0) as port:
            before, private = client_context(tmp_path), (tmp_path / "http.key").read_bytes()
            assert await taken(port, before)
            # A file may be broken in the middle of a change: the certificate before it stays in force.
            (tmp_path / "http.key").write_bytes(b"nonsense")
            await until(complained)
            assert await taken(port, before)
            (tmp_path / "http.key").write_bytes(private)
            rotate(tmp_path, "tls")
            await until(lambda: taken(port, client_context(tmp_path)))
            assert not await taken(port, before)

    asyncio.run(main())
