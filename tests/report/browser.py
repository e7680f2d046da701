"""A headless Chromium, driven through its own protocol over a pair of pipes: what a page says, asks for, looks like."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe about:blank"
).split()
CODES = {"Tab": 9, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Tab:
    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._rest = b""
        self._number = 0
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        """Errors and warnings of the console, and exceptions nobody caught."""
        self.requests: list[str] = []
        pages = [entry for entry in self.send("Target.getTargets")["targetInfos"] if entry["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._back, 1 << 20)
            if not part:
                raise RuntimeError("the browser has gone")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        found = told.get("params", {})
        if told["method"] == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif told["method"] == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.complaints.append(found["entry"]["text"])
        elif told["method"] == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(found["args"]))
        elif told["method"] == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._receive()
            if told.get("id") == self._number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                result: dict[str, Any] = told["result"]
                return result
            if "method" in told:
                self._note(told)

    def open(self, address: str, width: int, height: int = 900, dark: bool = False) -> float:
        """Returns when the page says that it is drawn: after so many seconds."""
        self.complaints.clear()
        self.requests.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=theme)
        start = time.perf_counter()
        self.send("Page.navigate", url=address)
        while not self.value("document.documentElement?.dataset.ready === 'true'"):
            if time.perf_counter() - start > 300:
                raise RuntimeError(f"{address} was never drawn: {self.complaints}")
            time.sleep(0.02)
        seconds = time.perf_counter() - start
        self.wait_for_frames()
        return seconds

    def wait_for_frames(self) -> None:
        """What waits for its width is drawn a frame later."""
        frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        self.value(frame)
        self.value(frame)

    def value(self, expression: str) -> Any:
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        more = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": CODES[key]}
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0, **more)

    def _box(self, selector: str) -> tuple[float, float, float, float]:
        """Of an element, in the window."""
        found = json.dumps(selector)
        box = self.value(f"document.querySelector({found}).getBoundingClientRect().toJSON()")
        return box["x"], box["y"], box["width"], box["height"]

    def point(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """At so much of an element's width and height, scrolled to first."""
        self.value(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        left, top, width, height = self._box(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=left + x * width, y=top + y * height)

    def pinch(self, selector: str, before: tuple[float, float], after: tuple[float, float]) -> None:
        """Two fingers go from two places of an element's width to two others."""
        self.value(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        left, top, width, height = self._box(selector)
        for kind, places in (("touchStart", before), ("touchMove", after), ("touchEnd", ())):
            fingers = [{"x": left + x * width, "y": top + height / 2, "id": index} for index, x in enumerate(places)]
            self.send("Input.dispatchTouchEvent", type=kind, touchPoints=fingers)
        self.wait_for_frames()

    def picture(self, path: Path, selector: str = "html") -> None:
        left, top, width, height = self._box(selector)
        right, down = self.value("[scrollX, scrollY]")
        clip = {"x": left + right, "y": top + down, "width": width, "height": height, "scale": 1}
        told = self.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))


def find_chromium() -> str | None:
    """The program, if there is one."""
    return shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def chromium() -> Iterator[Tab]:
    program = find_chromium()
    if program is None:
        raise RuntimeError("no chromium here; apt-get install chromium")
    theirs_in, to = os.pipe()
    back, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads descriptor 3 and writes 4.
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", shell, program, f"--user-data-dir={profile}", *FLAGS],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Tab(to, back)
        finally:
            process.terminate()
            process.wait(timeout=60)
            os.close(to)
            os.close(back)
