"""A headless Chromium and one page in it, driven over its DevTools socket."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

_LIMIT_S = 60.0
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


class Page:
    """One tab. Everything raises AssertionError when it takes too long."""

    def __init__(self, socket: ClientConnection) -> None:
        self.asked: list[str] = []
        """The addresses that the page asked for."""
        self.complaints: list[str] = []
        """What the browser or the page's code found wrong."""
        self._socket = socket
        self._numbers = itertools.count(1)

    def open(self, url: str) -> None:
        """Begin to load it."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.do(f"{domain}.enable")
        self.do("Page.navigate", url=url)

    @contextmanager
    def another(self, url: str) -> Iterator[Page]:
        """A tab beside this one and before all others, which nobody looks at any more."""
        tab = self.do("Target.createTarget", url="about:blank")["targetId"]
        host, port = self._socket.remote_address
        place = f"ws://{host}:{port}/devtools/page/{tab}"
        with connect(place, max_size=None, ping_interval=None) as socket:
            page = Page(socket)
            page.open(url)
            yield page
        self.do("Target.closeTarget", targetId=tab)

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=_LIMIT_S))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def eval(self, expression: str) -> Any:
        """What an expression of JavaScript is."""
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """What a click there does."""
        self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text: str) -> None:
        """Into what has the focus, in place of what it holds."""
        self.eval("document.activeElement.select()")
        self.do("Input.insertText", text=text)

    def enter(self) -> None:
        """The key."""
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.do("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self.do("Input.dispatchKeyEvent", type="keyUp", **key)

    def text(self, selector: str) -> str:
        """What is read there."""
        said: str = self.eval(f"document.querySelector({json.dumps(selector)}).innerText")
        return said

    def until(self, expression: str) -> Any:
        """What an expression is as soon as it is true of anything."""
        deadline = time.monotonic() + _LIMIT_S
        while not (found := self.eval(expression)):
            assert time.monotonic() < deadline, (expression, self.complaints, self.text("body"))
            time.sleep(0.05)
        return found

    def says(self, selector: str, words: str) -> None:
        """Wait until `words` are read there."""
        place = f"(document.querySelector({json.dumps(selector)})?.innerText ?? '')"
        self.until(f"{place}.includes({json.dumps(words)})")

    def size(self, width: int, height: int) -> None:
        """The window's, in CSS pixels; a narrow one is a phone."""
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height,
                deviceScaleFactor=1, mobile=width < 600)  # fmt: skip

    def picture(self, file: Path) -> None:
        """A PNG of what is seen."""
        shot = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown" | "Log.entryAdded":
                self.complaints.append(json.dumps(parameters)[:500])


@contextmanager
def browsing(url: str) -> Iterator[Page]:
    """A page that has begun to load `url`, in a browser that knows nothing else."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-dev-shm-usage", "--disable-background-networking", "--no-proxy-server",
             "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            place = _tab(Path(profile) / "DevToolsActivePort")
            with connect(place, max_size=None, ping_interval=None) as socket:
                page = Page(socket)
                page.open(url)
                yield page
        finally:
            browser.terminate()
            browser.wait(_LIMIT_S)


def _tab(file: Path) -> str:
    deadline = time.monotonic() + _LIMIT_S
    while not (file.exists() and "\n" in file.read_text("ascii")):
        assert time.monotonic() < deadline, "the browser does not start"
        time.sleep(0.05)
    port = file.read_text("ascii").splitlines()[0]
    with httpx.Client(trust_env=False, timeout=_LIMIT_S) as http:
        tabs = http.get(f"http://127.0.0.1:{port}/json/list").json()
    found: str = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
    return found
