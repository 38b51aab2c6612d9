"""A real browser, told what to do through its debugging pipe; nothing of it listens anywhere."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

_PATIENCE_SECONDS = 60


def missing() -> str:
    """Why pages cannot be looked at here; empty: they can."""
    return "" if shutil.which("chromium") else "chromium is not installed: Debian's package chromium"


class Page:
    """One page of a browser.

    Attributes:
        complaints: what the browser's console told: errors of scripts, what a policy forbade, what did not load.
    """

    def __init__(self, to: BinaryIO, back: int) -> None:
        self._to, self._back, self._rest = to, back, b""
        self._number, self._session = 0, ""
        self._loaded = 0
        self.complaints: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        """Go there, and wait until it has loaded."""
        before = self._loaded
        self._call("Page.navigate", url=address)
        self._wait(lambda: self._loaded > before)

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Be of that size, light or dark."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """What an expression, or a promise, comes to in the page."""
        found = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true; it is looked at each time that something changes in the page."""
        watch = f"""new Promise((done, late) => {{
            const look = () => {{ if ({condition}) done(true); }};
            new MutationObserver(look).observe(document, {{subtree: true, childList: true, characterData: true,
                                                          attributes: true}});
            setTimeout(() => late(new Error("never: " + document.body.innerText)), 20000);
            look();
        }})"""
        assert self.value(watch)

    def press(self, key: str, text: str = "") -> None:
        """Press a key of the keyboard."""
        code = {"Tab": 9, "Enter": 13, " ": 32}[key]
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

    def press_and_load(self, key: str, text: str = "") -> None:
        """Press a key that leads to another page."""
        before = self._loaded
        self.press(key, text)
        self._wait(lambda: self._loaded > before)

    def screenshot(self, file: Path) -> None:
        """Keep a picture of the whole page, for people to look at."""
        taken = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        session = {"sessionId": self._session} if self._session else {}
        self._to.write(json.dumps(asked | session).encode() + b"\0")
        self._to.flush()
        while (told := self._next()).get("id") != self._number:
            pass
        assert "error" not in told, told
        result: dict[str, Any] = told["result"]
        return result

    def _wait(self, condition: Any) -> None:
        while not condition():
            self._next()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._back], [], [], _PATIENCE_SECONDS)[0], "the browser does not answer"
            more = os.read(self._back, 65536)
            assert more, "the browser has ended"
            self._rest += more
        content, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(content)
        match told.get("method"):
            case "Page.loadEventFired":
                self._loaded += 1
            case "Log.entryAdded":
                self.complaints.append(told["params"]["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(told["params"]["exceptionDetails"]))
        return told


@contextmanager
def page() -> Iterator[Page]:
    """A browser with one page."""
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        options = [
            "--headless",
            "--disable-gpu",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        command = [
            "bash", "-c", f'exec "$@" 3<&{read_there} 4>&{write_there}', "bash", "chromium", *options, *root
        ]  # fmt: skip
        process = subprocess.Popen(
            command, pass_fds=(read_there, write_there), env={**os.environ, "HOME": profile},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_there)
        os.close(write_there)
        with process, os.fdopen(write_here, "wb") as to:
            try:
                yield Page(to, read_here)
            finally:
                process.terminate()
                os.close(read_here)
