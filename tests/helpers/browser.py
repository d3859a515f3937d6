"""A headless Chromium that tests talk to over a pipe: widths, colour schemes, console messages, pictures."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")
_SECONDS = 60.0
# What a failed wait shows: where the page stands.
_PLACE = "[location.hash, scrollX, scrollY, innerWidth, document.documentElement.scrollHeight]"


class Browser:
    """One page of a running Chromium (DevTools protocol, messages end with a zero byte)."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._buffer, self._number = send, receive, b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._send, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, end - time.monotonic()))
            assert ready, "chromium does not answer"
            read = os.read(self._receive, 1 << 16)
            assert read, "chromium has gone"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def open(self, path: Path, *, width: int, dark: bool = False, media: str = "") -> None:
        """Load a file at a width in CSS pixels, in a colour scheme; ``media`` may be ``print``."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        end = time.monotonic() + _SECONDS
        while self.value("document.getElementById('charts') && !document.documentElement.dataset.drawn"):
            assert time.monotonic() < end, "the charts are not drawn"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression is worth, or what it promises."""
        made = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in made, made
        return made["result"].get("value")

    def demand(self, expression: str, holds: Callable[[Any], bool] = bool) -> None:
        """Wait until what an expression is worth holds: what a click or a scroll starts ends a few frames later."""
        end = time.monotonic() + _SECONDS
        while not holds(found := self.value(expression)):
            assert time.monotonic() < end, (expression, found, self.value(_PLACE))
            time.sleep(0.05)

    def point(self, element: str) -> dict[str, float]:
        """Bring an element to the middle, and return where it is when nothing has moved it for some frames.

        What a scroll shows may change letters, and with them the lines of all that is beside it.
        """
        found: dict[str, float] = self.value(
            f"new Promise(done => {{const e = {element}; let last = '', same = 0; e.scrollIntoView({{block: 'center'}});"
            "const look = () => {const r = e.getBoundingClientRect(), now = [r.x, r.y, r.width, r.height].join();"
            "same = now === last ? same + 1 : 0; last = now; if (same < 5) requestAnimationFrame(look);"
            "else done({x: r.x + Math.min(r.width, 20) / 2, y: r.y + r.height / 2});}; look();})"
        )
        return found

    def click(self, element: str) -> None:
        """Press a real mouse button over an element."""
        place = self.point(element)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def complaints(self) -> list[str]:
        """Return console messages, log entries and exceptions since the page was opened."""
        self.value("1")
        bad = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event) for event in self.events if event.get("method") in bad]

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def picture(self, path: Path, selector: str = "body") -> None:
        """Write a PNG of the first element that matches."""
        box = self.value(
            f"(() => {{const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            "return {x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height};})()"
        )
        made = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip={**box, "scale": 1})
        path.write_bytes(base64.b64decode(made["data"]))


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Run Chromium with its files in ``folder`` and yield a page."""
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += [
        "--disable-sync",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'chromium'}",
    ]
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()
    # The browser reads descriptor 3 and writes descriptor 4; a shell puts them there.
    wiring = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", wiring, "bash", CHROMIUM, "--remote-debugging-pipe", *flags],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(send, receive)
    finally:
        os.close(send)
        os.close(receive)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
