"""Tools of a server that speaks the Model Context Protocol (MCP): a program on this machine, or a URL."""

import asyncio
import concurrent.futures
import contextlib
import fcntl
import os
import shlex
import tempfile
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from envs.errors import EnvError
from envs.tools.toolbox import LoopThread, Tool, ToolError, as_text

START_S = 60.0
"""Longest wait until a server has listed its tools."""
CLOSE_S = 8.0
"""Longest wait for the end of a server. The client ends its process after 4 s by itself."""
STDERR_CHARS = 500
"""Characters of a server's stderr that an error repeats."""
MAX_STDERR_BYTES = 1 << 20
"""Size of a server's stderr beyond which it is dropped."""


class McpServer:
    """Connection to one MCP server. The constructor starts it, and blocks until it has listed its tools.

    Args:
        entry: command line of a program that speaks over stdin and stdout, or an ``http(s)://`` URL.
        loop: event loop for the connection.
        timeout_s: longest time of one call, in seconds.

    Raises:
        EnvError: the package `mcp` is missing, or the server did not start; the text has the end of its stderr.
    """

    def __init__(self, entry: str, loop: LoopThread, timeout_s: float) -> None:
        self._entry, self._loop, self._timeout_s = entry, loop, timeout_s
        # The server writes into it for as long as it runs, so no block closes it.
        self._stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        # Each write goes to the end of the file, also after it was cut.
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, fcntl.fcntl(self._stderr, fcntl.F_GETFL) | os.O_APPEND)
        self._client: Any = None
        self._stop = asyncio.Event()
        ready: concurrent.futures.Future[list[Any]] = concurrent.futures.Future()
        self._served = loop.start(self._serve(ready))
        try:
            listed = ready.result(START_S)
        except Exception as error:
            late = isinstance(error, TimeoutError) and not ready.done()
            why = (
                f"did not list its tools within {START_S:g} s" if late else f"did not start: {_reason(error)}"
            )
            refusal = EnvError(self._words(why))
            self.close()
            raise refusal from None
        self.tools = [self._tool(tool) for tool in listed]

    def close(self) -> None:
        """End the connection, and with it a program that this process started. Blocks for at most `CLOSE_S`."""
        if not self._served.done():
            self._loop.call(self._set_stop(), CLOSE_S)
            with contextlib.suppress(Exception):
                self._served.result(CLOSE_S)
        self._stderr.close()

    async def _set_stop(self) -> None:
        self._stop.set()

    async def _serve(self, ready: "concurrent.futures.Future[list[Any]]") -> None:
        """Hold the connection until `close`. One task opens and closes it, as the client's library requires."""
        try:
            async with self._connect() as self._client:
                ready.set_result(await _all_tools(self._client))
                await self._stop.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            self._client = None

    def _connect(self) -> Any:
        try:
            from mcp.client.client import Client
            from mcp.client.stdio import StdioServerParameters, stdio_client
        except ImportError:
            raise EnvError(
                "env.params.mcp needs the package mcp, which comes with vLLM; install it: pip install 'mcp>=2,<3'"
            ) from None
        if self._entry.startswith(("http://", "https://")):
            return Client(self._entry, read_timeout_seconds=self._timeout_s)
        command, *arguments = shlex.split(self._entry)
        server = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
        errlog: IO[str] = self._stderr
        return Client(stdio_client(server, errlog=errlog), read_timeout_seconds=self._timeout_s)  # type: ignore[arg-type]

    def _tool(self, tool: Any) -> Tool:
        function = {
            "name": tool.name,
            "description": tool.description or tool.name,
            "parameters": tool.input_schema,
        }

        def run(arguments: dict[str, Any]) -> str:
            return self._call(tool.name, arguments)

        return Tool({"type": "function", "function": function}, run)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        if self._client is None:
            raise EnvError(self._words("has ended"))
        if os.fstat(self._stderr.fileno()).st_size > MAX_STDERR_BYTES:
            os.ftruncate(self._stderr.fileno(), 0)
        try:
            result = self._loop.call(self._client.call_tool(name, arguments), self._timeout_s)
        except TimeoutError as error:
            raise ToolError(str(error)) from None
        except Exception as error:
            if _is_closed(error):
                raise EnvError(self._words(f"has ended: {_reason(error)}")) from None
            raise ToolError(_reason(error)) from None
        text = _text_of(result)
        if result.is_error:
            raise ToolError(text)
        return text

    def _words(self, what: str) -> str:
        said = ""
        if not self._stderr.closed:
            self._stderr.seek(max(0, self._stderr.seek(0, os.SEEK_END) - 8 * STDERR_CHARS))
            said = " ".join(self._stderr.read().split())[-STDERR_CHARS:]
        return f"mcp server {shown_entry(self._entry)} {what}" + (
            f"; its stderr ends: {said}" if said else ""
        )


def shown_entry(entry: str) -> str:
    """Return the part of an entry that names the server: the program and files, without what may be a secret.

    Example:
        >>> shown_entry("npx server --token x"), shown_entry("https://u:p@host:1/mcp?key=x")
        ("'npx'", "'https://host:1/mcp'")
    """
    if entry.startswith(("http://", "https://")):
        parts = urlsplit(entry)
        return repr(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")
    program, *arguments = shlex.split(entry) or [""]
    return repr(" ".join([program, *(text for text in arguments if Path(text).is_file())]))


async def _all_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    page = await client.list_tools()
    tools += page.tools
    while page.next_cursor:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _text_of(result: Any) -> str:
    """Return the text of a tool's result, or else its structured content as JSON."""
    texts = [block.text if block.type == "text" else f"[{block.type}]" for block in result.content]
    if not texts and result.structured_content is not None:
        return as_text(result.structured_content)
    return "\n".join(texts)


def _is_closed(error: Exception) -> bool:
    """Return whether an error means that the server is gone, not that it refused one call."""
    from mcp_types import CONNECTION_CLOSED

    gone = type(error).__name__ in ("ClosedResourceError", "BrokenResourceError")
    return gone or getattr(error, "code", None) == CONNECTION_CLOSED


def _reason(error: BaseException) -> str:
    """Return type and text of an error; of a group, those of its first member."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
