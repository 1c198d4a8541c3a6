"""Headless Chromium by its debugging pipe (Chrome DevTools Protocol): open a page, ask it, click in it.

https://chromedevtools.github.io/devtools-protocol: messages are JSON, ended by a NUL, over file descriptors 3 and 4."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# What a reader cannot read: text below 11 px, contrast to what lies behind it below 4.5 (WCAG 2.1, 1.4.3), and a page
# that is wider than the window.
UNREADABLE = """(() => {
  const channels = (text) => { const v = text.match(/[0-9.]+/g).map(Number); return v.length < 4 ? [...v, 1] : v; };
  const light = ([r, g, b]) => {
    const f = (c) => { c /= 255; return c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; };
    return .2126 * f(r) + .7152 * f(g) + .0722 * f(b); };
  const behind = (element) => { for (let e = element; e; e = e.parentElement) {
      const c = channels(getComputedStyle(e).backgroundColor); if (c[3] > 0) return c; }
    return matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255]; };
  const faults = [], seen = new Set();
  if (document.documentElement.scrollWidth > innerWidth + 1)
    faults.push(`page ${document.documentElement.scrollWidth} px wide`);
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !element.checkVisibility() || ['STYLE', 'SCRIPT', 'OPTION'].includes(element.tagName)) continue;
    const style = getComputedStyle(element), drawn = element instanceof SVGElement;
    if (drawn && ['title', 'desc', 'style'].includes(element.tagName)) continue;
    const size = parseFloat(style.fontSize) * (drawn ? element.getScreenCTM().a : 1);
    const a = light(channels(drawn ? style.fill : style.color)), b = light(behind(element));
    const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const small = size < 10.95 && `text of ${size.toFixed(1)} px`;
    const faint = contrast < 4.5 && `contrast ${contrast.toFixed(1)}`;
    for (const fault of [small, faint]) {
      const key = fault + element.tagName + element.className;
      if (fault && !seen.has(key)) { seen.add(key); faults.push(`${fault}: ${element.tagName} ${text.slice(0, 40)}`); }
    }
  }
  return faults; })()"""


class Browser:
    """One tab. Raises AssertionError for an error of the protocol."""

    def __init__(self, write: int, read: int):
        self._write, self._read = os.fdopen(write, "wb", 0), os.fdopen(read, "rb", 0)
        self._number, self._rest, self._session = 0, b"", ""
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self._call("Page.enable", {})

    def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            self._rest += self._read.read(1 << 16)
        message, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(message))

    def view(self, width: int, dark: bool) -> None:
        """A window of so many CSS pixels, and what the user prefers."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, url: str) -> None:
        self._call("Page.navigate", {"url": url})
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self._call("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.ask(f"Boolean(document.body) && ({condition})"):  # no body while a page is replaced
            assert time.monotonic() < deadline, f"{condition}: not within {seconds} s"
            time.sleep(0.02)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self._call("Page.captureScreenshot", {"captureBeyondViewport": True})["data"])
        )


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """Skips the test where Chromium is not installed. folder: for its profile."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium is not installed (apt install chromium)")
    to_browser, from_browser = os.pipe(), os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    shell = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", program, *options, f"--user-data-dir={folder / 'chromium'}"],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Browser(to_browser[1], from_browser[0])
    finally:
        process.kill()
        process.wait()
