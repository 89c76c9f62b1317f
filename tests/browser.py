"""A headless Chromium that tests steer by its debugging protocol; skips tests where there is none."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 180.0
"""Longest wait for anything: far longer than it takes, because a machine may be very busy."""
MAIN = "document.getElementById('main').dataset"
READY = f"{MAIN}.ready"
"""Number of the view that is drawn."""
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Enter": 13, "Tab": 9, "Escape": 27}


def chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser. Methods wait until what they ask for is done; `problems` has what went wrong in it."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="offbeat-browser-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [
                path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0",
                f"--user-data-dir={self._profile.name}", "--no-first-run", "--disable-background-networking",
                "--disable-dev-shm-usage", "about:blank",
            ],
            # The command is a script that starts the browser, so all of its group have to end.
            start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self._process.pid
        """Process, and process group, of all of it."""
        self._runner = asyncio.Runner()
        self.problems: list[str] = []
        """Errors of scripts, refusals of the content security policy, and failed loads."""
        self.asked: list[str] = []
        """Addresses that the page asked for."""
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []
        self._runner.run(self._connect())

    async def _connect(self) -> None:
        assert self._process.stderr is not None
        line = ""
        while "DevTools listening on" not in line:
            line = await asyncio.to_thread(self._process.stderr.readline)
            assert line, "the browser ended"
        port = line.rsplit(":", 1)[1].split("/")[0]
        self._session = aiohttp.ClientSession()
        pages: list[dict[str, Any]] = []
        async with asyncio.timeout(TIMEOUT_S):
            # The browser listens before its page is there.
            while not pages:
                async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
                await asyncio.sleep(0.03)
        (target, *_) = pages
        self._socket = await self._session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._call(f"{domain}.enable")

    async def _call(
        self, method: str, *, lost: dict[str, Any] | None = None, **params: Any
    ) -> dict[str, Any]:
        """Call a method; ``lost`` is returned if the page is left meanwhile."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                message = json.loads((await self._socket.receive()).data)
                if message.get("id") == number:
                    if lost is not None and "error" in message:
                        return lost
                    assert "error" not in message, (method, message["error"])
                    return dict(message["result"])
                self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append("a dialog: " + params["message"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol."""
        return self._runner.run(self._call(method, **params))

    def run(self, script: str) -> Any:
        """Run a script in the page, and return its value; a promise is waited for."""
        found = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            timeout=1_000 * TIMEOUT_S,
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until an expression is true in the page, and return its value. The page may be another one by then."""
        script = (
            f"(() => {{ try {{ const is = ({condition}); return is instanceof Node || is; }}"
            " catch { return false; } })()"
        )

        async def look() -> Any:
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    found = await self._call(
                        "Runtime.evaluate", expression=script, returnByValue=True, lost={}
                    )
                    if value := found.get("result", {}).get("value"):
                        return value
                    await asyncio.sleep(0.03)

        try:
            return self._runner.run(look())
        except TimeoutError:
            raise AssertionError(f"never {condition}: {self.text()[:800]} {self.problems}") from None

    def go(self, url: str) -> None:
        """Load an address."""
        self.call("Page.navigate", url=url)

    def open(self, view: str) -> None:
        """Go to a view of the page, such as ``/table?run=a``, and wait until it is there."""
        self.settled(f"location.hash = {json.dumps('#' + view)}")

    def settled(self, script: str) -> None:
        """Run a script that changes the view, and wait until the new one is there."""
        # In one go, and by its address, too: a page that is followed may draw the old view anew meanwhile.
        before = self.run(f"(() => {{ const before = {READY}; {script}; return before; }})()")
        self.wait_for_view(before)

    def wait_for_view(self, before: str) -> None:
        """Wait for the view of the address, drawn after the one whose number was ``before``."""
        self.wait(f"{READY} !== {json.dumps(before)} && {MAIN}.view === location.hash")

    def press(self, key: str) -> None:
        """Press a key."""
        text = key if len(key) == 1 else ""
        code = KEYS.get(key, ord(key[0].upper()))
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def size(self, width: int, height: int = 900) -> None:
        """Set the size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def text(self) -> str:
        """Return the text of the page as a person sees it."""
        return str(self.run("document.body.innerText"))

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write a picture of the page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""

        async def leave() -> None:
            await self._socket.close()
            await self._session.close()

        self._runner.run(leave())
        self._runner.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        # Its other processes may still write into the profile.
        deadline = time.monotonic() + TIMEOUT_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self._process.pid, 0)
                time.sleep(0.01)
        self._profile.cleanup()
