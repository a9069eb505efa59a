"""A headless Chromium, driven over a pipe in the words of its DevTools protocol; nothing to install beside it."""

import base64
import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, BinaryIO

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
)
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


def _spawn(command: list[str]) -> tuple[int, BinaryIO, BinaryIO]:
    """A process that reads commands from descriptor 3 and answers on 4; its id, and our ends of the two pipes."""
    (there, write), (read, back) = os.pipe(), os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (there, back)]  # clear of 3 and 4
    actions: list[tuple[Any, ...]] = [
        (os.POSIX_SPAWN_DUP2, end, place) for end, place in zip(high, (3, 4), strict=True)
    ]
    actions += [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    pid = os.posix_spawn(command[0], command, dict(os.environ), file_actions=actions)
    for end in (there, back, *high):
        os.close(end)
    return pid, os.fdopen(write, "wb", 0), os.fdopen(read, "rb", 0)


class Chromium:
    """One page of a browser; a context manager."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        assert BINARY is not None
        flags = (*_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank")
        self._pid, self._write, self._read = _spawn([BINARY, *flags])
        self._number, self._rest, self._session = 0, b"", None
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.colour(dark)

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: Any) -> None:
        self._write.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._read.close()

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def colour(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its answer; what the console said on the way is kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 20.0) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < deadline, f"never came true: {expression}; console: {self.console}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = _KEYS[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = self._read.read(1 << 16)
            assert chunk, "the browser ended"
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(event["params"]["exceptionDetails"].get("exception", {}).get("description")))
        elif event.get("method") == "Log.entryAdded":
            self.console.append(event["params"]["entry"]["text"])
