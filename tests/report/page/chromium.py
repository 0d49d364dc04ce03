"""A real browser, driven as a person would: size, colors, mouse, keys, network. Speaks DevTools over a pipe."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
WIDE, PHONE = (1280, 900), (390, 844)


class Chromium:
    """A browser with one page open. `complaints` are what its console said and what its scripts threw."""

    def __init__(self, folder):
        ours, theirs = os.pipe(), os.pipe()  # they read commands from `theirs`, and write answers to `ours`

        def connect():
            given = [fcntl.fcntl(pipe, fcntl.F_DUPFD, 100) for pipe in (theirs[0], ours[1])]
            os.dup2(given[0], 3), os.dup2(given[1], 4)  # where it expects them

        command = [PROGRAM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}/user", "about:blank"]
        self._process = subprocess.Popen(
            command, preexec_fn=connect, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(theirs[0]), os.close(ours[1])
        self._write, self._read, self._rest, self._number = theirs[1], ours[0], b"", 0
        self.complaints, self.requests, self._session = [], [], None
        (page,) = [t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._write), os.close(self._read)
        self._process.kill()
        self._process.wait()

    def send(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self):
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], 30)[0], "the browser does not answer"
            self._rest += os.read(self._read, 1 << 20)
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        kind, details = message.get("method"), message.get("params", {})
        if kind in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(details))
        if kind == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        return message

    def look(self, size=WIDE, *, dark=False, offline=False):
        """Sets how the page is looked at."""
        width, height = size
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=size == PHONE)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1,
                  uploadThroughput=-1)  # fmt: skip

    def open(self, url):
        """Opens a page and waits until its scripts have run."""
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script):
        """Returns the value of an expression on the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script, seconds=20):
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def press(self, key):
        """Presses a key, as a keyboard does."""
        codes = {"ArrowDown": 40, "ArrowRight": 39, "ArrowLeft": 37, "ArrowUp": 38, "Tab": 9, "Enter": 13}
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def point(self, found, across=0.5, down=0.5, *, click=False):
        """Moves the mouse into an element, scrolling to it first, and clicks if asked to."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(found)});"
            " e.scrollIntoView({block: 'center'}); const {left, top, width, height} = e.getBoundingClientRect();"
            " return [left, top, width, height]; })()"
        )
        place = {"x": box[0] + across * box[2], "y": box[1] + down * box[3]}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased") if click else ():
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def picture(self, path, *, whole=True):
        """Saves what is seen, or the whole page."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
