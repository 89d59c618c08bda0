"""A headless Chromium, driven over a pipe by the DevTools protocol: no driver, no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WAIT_MS = 60_000


def installed() -> str | None:
    """The browser of this machine; None if it has none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a headless browser, with all that it logs, requests and throws.

    Attributes:
        problems: Exceptions, dialogs and logged errors.
        requests: Addresses that were requested, but for the page's own.
    """

    def __init__(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        program = installed()
        assert program is not None
        self._profile = tempfile.mkdtemp(prefix="kvbench-browser-")
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()

        def descriptors() -> None:
            # The browser reads from descriptor 3 and writes to 4. Both are moved away first, in
            # case that one of them is 3 or 4 already.
            here, there = os.dup(to_read), os.dup(to_write)
            os.dup2(here, 3)
            os.dup2(there, 4)

        self._process = subprocess.Popen(
            [
                program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--remote-debugging-pipe", f"--user-data-dir={self._profile}", "about:blank",
            ],
            preexec_fn=descriptors,
            pass_fds=(3, 4, to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._bytes = b""
        self._last = 0
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        found = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.emulate(width, height, dark=dark)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def emulate(self, width: int, height: int = 900, *, dark: bool = False, media: str = "") -> None:
        """Set the size of the window, the scheme of the system, and the medium: "" for a screen, or "print"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def open(self, page: Path, fragment: str = "") -> None:
        """Open a file, with what follows `#` in its address, and wait until it is loaded."""
        self.open_address(page.resolve().as_uri() + f"#{fragment}" * bool(fragment))

    def open_address(self, address: str) -> None:
        """Open an address, and wait until it is loaded."""
        self._loaded = False
        self._call("Page.navigate", url=address)
        while not self._loaded:
            self._event(self._receive())

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        wanted = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self._call("Runtime.evaluate", timeout=_WAIT_MS, **wanted)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, value: Any = True) -> None:
        """Wait until an expression in the page has a value: figures are drawn when they are seen.

        Raises:
            AssertionError: It still has another after half a minute.
        """
        for _ in range(300):
            found = self.run(script)
            if found == value:
                return
            time.sleep(0.1)
        raise AssertionError(f"{script} is {found!r}, not {value!r}")

    def move(self, x: float, y: float) -> None:
        """Move the mouse, and wait until the page has drawn what follows."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 1, y=y)
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def download(self, script: str, folder: Path) -> str:
        """The text of the file that an expression in the page downloads.

        Args:
            script: The expression.
            folder: An empty folder for the file.
        """
        self._call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self.run(script)
        for _ in range(100):
            files = [path for path in folder.iterdir() if path.suffix != ".crdownload"]
            if files:
                return files[0].read_text()
            time.sleep(0.1)
        raise AssertionError(f"{script} downloads nothing")

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self._call("Page.printToPDF")["data"])

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Write a PNG of the page, or of what its window shows."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(found["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._last:
                assert "error" not in found, found["error"]
                return dict(found["result"])
            self._event(found)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._bytes:
            read = os.read(self._from, 1 << 20)
            assert read, "the browser has gone"
            self._bytes += read
        message, _, self._bytes = self._bytes.partition(b"\0")
        return dict(json.loads(message))

    def _event(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Page.javascriptDialogOpening":
                self.problems.append(f"dialog: {params['message']}")
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.problems.append(json.dumps(params["args"]))
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith("file:"):
                self.requests.append(params["request"]["url"])
