"""Chromium without a window, over its devtools protocol: what a person sees and clicks."""

import json
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import websocket

from specexp.commands import store

FIND = """(text => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; node = walker.nextNode();) {
    const at = node.data.indexOf(text), range = document.createRange();
    if (at < 0) continue;
    if (%s) node.parentElement.scrollIntoView({block: "center"});
    range.setStart(node, at);
    range.setEnd(node, at + text.length);
    const box = range.getBoundingClientRect(), y = box.top + box.height / 2;
    const shown = x => document.elementsFromPoint(x, y).includes(node.parentElement);
    if (box.width && shown(box.left + 1) && shown(box.right - 1))
      return [box.left + box.width / 2, y];
  }
})(%s)"""


class Browser:
    """A window of this size. `patience_s`: how long a page may take to show a text."""

    def __init__(self, width: int, height: int, patience_s: float = 600) -> None:
        self.patience_s, self._sent = patience_s, 0
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        line = [*store.chromium(), f"--user-data-dir={self._profile.name}",
                f"--window-size={width},{height}", "--remote-debugging-port=0"]  # fmt: skip
        self._process = subprocess.Popen(line, stderr=subprocess.DEVNULL)
        listening = Path(self._profile.name, "DevToolsActivePort")
        while not (listening.exists() and listening.read_text().count("\n")):
            assert self._process.poll() is None
            time.sleep(0.1)
        url = f"http://127.0.0.1:{listening.read_text().split()[0]}/json"
        [page] = [p for p in json.load(urllib.request.urlopen(url)) if p["type"] == "page"]
        self._socket = websocket.create_connection(
            page["webSocketDebuggerUrl"], suppress_origin=True
        )
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *exception: object) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait()
        self._profile.cleanup()

    def _call(self, method: str, **params: object) -> dict:
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while (answer := json.loads(self._socket.recv())).get("id") != self._sent:
            pass
        return answer["result"]

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def sees(self, text: str, scroll: bool = False) -> list[float]:
        """Wait until this text stands whole and still in the window, cut by no edge; where."""
        until, before = time.monotonic() + self.patience_s, None
        while time.monotonic() < until:
            place = self._value(FIND % (json.dumps(scroll), json.dumps(text)))
            if place and place == before:
                return place
            before = place
            time.sleep(0.3)
        there = self._value("document.body.innerText")
        raise AssertionError(f"{text!r} is not to be seen, but {there!r:.2000}")

    def _value(self, script: str) -> Any:
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        return found["result"].get("value")

    def click(self, text: str) -> None:
        x, y = self.sees(text, scroll=True)
        for kind in ("mousePressed", "mouseReleased"):
            where = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self._call("Input.dispatchMouseEvent", **where)
