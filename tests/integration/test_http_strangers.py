"""Strangers at the HTTP port: they hold no connection for long and write nothing into the log."""

import asyncio
import logging

import pytest
from aiohttp import web

from protocol import http_serving
from protocol.http_serving import app_runner


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n", b"junk\r\n\r\n", bytes(range(256)) * 100]
)
def test_a_connection_without_a_whole_request_is_closed_and_nothing_is_logged(sent, monkeypatch, caplog):
    monkeypatch.setattr(http_serving, "IDLE_S", 0.5)
    caplog.set_level(logging.DEBUG)

    async def main():
        runner = app_runner(web.Application(), shutdown_s=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
        await runner.cleanup()
        return answer

    answer = asyncio.run(main())
    assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_fault_of_ours_is_logged(caplog):
    async def fails(request):
        raise RuntimeError("ours")

    async def main():
        application = web.Application()
        application.router.add_get("/", fails)
        runner = app_runner(application, shutdown_s=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.0\r\nHost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 10.0)
        writer.close()
        await runner.cleanup()
        return answer

    assert b" 500 " in asyncio.run(main())
    assert "RuntimeError: ours" in caplog.text
