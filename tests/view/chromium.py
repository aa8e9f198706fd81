"""A headless Chromium for tests of pages, controlled by HTTP requests to chromedriver (W3C WebDriver).

It needs only the standard library.
"""

import contextlib
import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Browser:
    """A browser, as a session of the chromedriver at `url`."""

    def __init__(self, url: str, binary: str, profile: str) -> None:
        self._address = url
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += [f"--user-data-dir={profile}", "--hide-scrollbars", "--no-first-run", "--disable-extensions"]
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": binary, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        answer = self.call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._address = f"{url}/session/{answer['sessionId']}"

    def open(self, path: Path) -> None:
        """Empty the logs and open a page from the disk."""
        self._log("browser")
        self._log("performance")
        self.call("POST", "/url", {"url": path.absolute().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function in the page and return its result."""
        return self.call("POST", "/execute/sync", {"script": script, "args": arguments})

    def console(self) -> list[str]:
        """Return the errors and warnings of the console since the page was opened."""
        return [entry["message"] for entry in self._log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return the URLs that the page requested since it was opened."""
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]

    def press(self, *keys: str) -> None:
        """Press keys, one after the other. The focused element gets them."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def set_screen(self, width: int, height: int, scheme: str) -> None:
        """Set the size of the screen and its colour scheme, "light" or "dark"."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        colours = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        for command, parameters in (("DeviceMetricsOverride", screen), ("EmulatedMedia", colours)):
            self.call("POST", "/goog/cdp/execute", {"cmd": f"Emulation.set{command}", "params": parameters})

    def close(self) -> None:
        self.call("DELETE", "")

    def _log(self, kind: str) -> Any:
        return self.call("POST", "/se/log", {"type": kind})

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a command to the driver, or to the session once it exists. Return the answer's value."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._address + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:500]}") from error


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser and yield it. Skip the test if no Chromium or no chromedriver is installed."""
    binary = next(filter(None, map(shutil.which, _NAMES)), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs a real browser: Debian's packages chromium and chromium-driver")
    with tempfile.TemporaryDirectory(prefix="grain_sft_chromium_", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            lines = (line.split("successfully on port ") for line in process.stdout)  # the loop ends if the driver does
            port = next(words[1].strip(". \n") for words in lines if len(words) == 2)
            with contextlib.closing(Browser(f"http://127.0.0.1:{port}", binary, profile)) as browser:
                yield browser
        finally:
            process.terminate()
            process.wait(10)
