"""A real Chromium without a window, led through its DevTools protocol."""

import asyncio
import base64
import json
import shutil
import subprocess
import time
import urllib.request
from contextlib import contextmanager

from aiohttp import ClientSession

_START_S, _DEADLINE_S, _POLL_S = 60.0, 30.0, 0.05


def chromium():
    """The program. None where there is none."""
    return shutil.which("chromium") or shutil.which("google-chrome")


class Tab:
    """One page. ``said``: what its console and its policy complained of."""

    def __init__(self, runner, line):
        self._runner = runner
        self._line = line
        self._number = 0
        self.said: list[str] = []

    def call(self, method, **parameters):
        return self._runner.run(self._call(method, parameters))

    async def _call(self, method, parameters):
        self._number += 1
        await self._line.send_str(
            json.dumps({"id": self._number, "method": method, "params": parameters})
        )
        async with asyncio.timeout(_DEADLINE_S):
            while True:
                told = json.loads(await self._line.receive_str())
                if told.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                    self.said.append(json.dumps(told["params"]))
                if told.get("id") == self._number:
                    assert "error" not in told, told
                    return told["result"]

    def value(self, expression):
        told = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def wait(self, expression):
        until = time.monotonic() + _DEADLINE_S
        while not self.value(expression):
            shown = "document.body.innerText"
            assert time.monotonic() < until, (expression, self.said, self.value(shown))
            time.sleep(_POLL_S)

    def press(self, key, code):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            pressed = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", **pressed, **text)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def scheme(self, name):
        """``light`` or ``dark``, as the user's system says."""
        self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}]
        )

    def picture(self, path):
        told = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))

    def named(self):
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored")
        ]


@contextmanager
def opened(url, folder):
    """The page at ``url`` in a browser of its own."""
    program = chromium()
    assert program is not None
    flags = f"""--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage
        --remote-debugging-port=0 --window-size=1200,1400 --user-data-dir={folder}
        --no-first-run about:blank""".split()
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([program, *flags], stdout=log, stderr=log) as process,
    ):
        try:
            port = _port(folder / "DevToolsActivePort", process)
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/json/new?{url}", method="PUT"
            )
            with urllib.request.urlopen(request, timeout=20) as reply:  # noqa: S310
                place = json.load(reply)["webSocketDebuggerUrl"]
            with asyncio.Runner() as runner:
                session, line = runner.run(_connected(place))
                try:
                    tab = Tab(runner, line)
                    for domain in ("Runtime", "Log", "Page", "Accessibility"):
                        tab.call(f"{domain}.enable")
                    yield tab
                finally:
                    runner.run(line.close())
                    runner.run(session.close())
        finally:
            process.kill()


async def _connected(place):
    session = ClientSession()
    return session, await session.ws_connect(place, max_msg_size=1 << 26)


def _port(file, process):
    until = time.monotonic() + _START_S
    while not (file.exists() and file.read_text().strip()):
        assert process.poll() is None and time.monotonic() < until, (
            file.parent / "log"
        ).read_text()
        time.sleep(_POLL_S)
    return file.read_text().splitlines()[0]
