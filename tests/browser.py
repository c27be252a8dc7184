"""Headless Chromium through chromedriver's W3C WebDriver, spoken with the standard library."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_KEYS = {"ArrowRight": "\ue014", "ArrowLeft": "\ue012", "Home": "\ue011", "End": "\ue010"}

_UNNAMED = """
return [...document.querySelectorAll(
    'button, input, select, figure, summary, [role=img], [role=group]')]
  .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
  .map(e => e.outerHTML.slice(0, 80))
"""
_FAINT = """
const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1});
const ink = canvas.getContext('2d', {willReadFrequently: true}), seen = new Map();
const rgb = text => {
  if (!seen.has(text)) {
    ink.clearRect(0, 0, 1, 1); ink.fillStyle = text; ink.fillRect(0, 0, 1, 1);
    seen.set(text, [...ink.getImageData(0, 0, 1, 1).data]);
  }
  return seen.get(text);
};
const light = c => c.slice(0, 3).map(x => x / 255)
  .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
  .reduce((s, x, k) => s + x * [0.2126, 0.7152, 0.0722][k], 0);
const grounds = new Map();
const ground = e => {
  if (!e) return [255, 255, 255, 255];
  if (!grounds.has(e)) {
    const over = rgb(getComputedStyle(e).backgroundColor);
    grounds.set(e, ground(e.parentElement).map(
      (x, k) => k < 3 ? x + (over[k] - x) * over[3] / 255 : 255));
  }
  return grounds.get(e);
};
return arguments[0].flatMap(selector => [...document.querySelectorAll(selector)].filter(e =>
    e.innerText?.trim() && !e.closest('.ghost')).map(e => {
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))];
    return [selector, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  })).filter(([, ratio]) => ratio < 4.5).map(([name, ratio]) => `${name} ${ratio.toFixed(2)}`)
"""


def why_absent() -> str | None:
    """Why there is no browser here, or None."""
    missing = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    if missing:
        return f"{' and '.join(missing)} not found (Debian: apt install chromium chromium-driver)"
    return None


class Browser:
    """One window."""

    def __init__(self, driver: str, profile: Path) -> None:
        options = {
            "binary": shutil.which("chromium"),
            "args": [*_FLAGS, f"--user-data-dir={profile}"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._base = driver
        created = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._base = f"{driver}/session/{created['sessionId']}"

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        """Load a page; a blank one first, because a new fragment alone loads nothing."""
        for address in ("about:blank", url):
            self._send("POST", "/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """What `return` in the script gives."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, *keys: str) -> None:
        """Press and release keys, one after the other."""
        actions = [
            {"type": kind, "value": _KEYS.get(key, key)}
            for key in keys
            for kind in ("keyDown", "keyUp")
        ]
        keyboard = {"type": "key", "id": "keyboard", "actions": actions}
        self._send("POST", "/actions", {"actions": [keyboard]})

    def click(self, selector: str) -> None:
        """Click the first element that a CSS selector finds."""
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        self._send("POST", f"/element/{next(iter(found.values()))}/click", {})

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._send("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def resize(self, width: int, height: int, mobile: bool = False) -> None:
        """Size of the visible page in CSS pixels."""
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def prefer(self, scheme: str) -> None:
        """Whether the reader's system is "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        """The visible page as PNG."""
        return base64.b64decode(self._send("GET", "/screenshot"))

    def unnamed(self) -> list[str]:
        """Controls, pictures and groups that a screen reader has no name for."""
        return list(self.run(_UNNAMED))

    def faint(self, *selectors: str) -> list[str]:
        """Texts whose contrast with the ground behind them is under WCAG's 4.5, with its value."""
        return list(self.run(_FAINT, list(selectors)))

    def messages(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        """End the browser."""
        self._send("DELETE", "")


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A fresh browser, ended with its driver afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url)
        window = Browser(url, profile)
        try:
            yield window
        finally:
            window.close()
    finally:
        driver.terminate()
        driver.wait(10)


def _wait_for(url: str, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(f"{url}/status", timeout=5):
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
