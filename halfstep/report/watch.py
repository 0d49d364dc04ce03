"""The page of a run that is being trained, served to a browser on this machine.

The page asks again every few seconds; if the record has not grown, the answer is 304 and nothing is made. Else the
new lines are read, the page is made again from all that is known, and the browser swaps its parts
(assets/watch.js).

What keeps it to this machine and this run: it binds the loopback address; it refuses requests whose `Host` is not
that address, which a page of another site cannot send (DNS rebinding); it has one path, and opens one file, the
record of the run, which must lie in the run's folder.
"""

import errno
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from halfstep.core.errors import HalfstepError, OptionError, RunFolderError
from halfstep.report.page import Report
from halfstep.training.paths import EVENTS
from halfstep.training.telemetry.events import Follower

ADDRESS = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class LivePage:
    """The page of a run, as far as its record goes now."""

    def __init__(self, folder: Path):
        self._follower = Follower(record_of(folder))
        self._report = Report(folder.resolve().name or "run")
        self._lock = threading.Lock()
        self._html, self._tag = b"", ""
        self.current()  # what cannot be shown is refused before anything is served

    def current(self) -> tuple[bytes, str]:
        """Returns the page, and a tag that changes with it."""
        with self._lock:
            before = self._follower.place
            for event in self._follower.new():
                self._report.take(event)
            if self._follower.place != before or not self._html:
                html = self._report.html(live=True)
                self._html = html.encode("utf-8", errors="backslashreplace")
                self._tag = f'"{self._follower.place}"'
            return self._html, self._tag


def record_of(folder: Path) -> Path:
    """Returns the record of the run in a folder; refuses a folder without one, and a link out of it."""
    record = folder / EVENTS
    if not record.exists():
        raise RunFolderError(
            f"`{folder}` holds no run that has started: it has no {EVENTS}",
            hint="name the folder of a run; `halfstep runs` lists them",
        )
    if record.resolve().parent != folder.resolve():
        raise RunFolderError(
            f"`{record}` is a link out of the folder, to `{record.resolve()}`", hint="name the folder of that run"
        )
    return record


class Server(ThreadingHTTPServer):
    """Serves one page on the loopback address; port 0 is any that is free."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int):
        self.page = page
        try:
            super().__init__((ADDRESS, port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            reason = "it is in use" if error.errno == errno.EADDRINUSE else "it is reserved for administrators"
            raise OptionError(
                f"port {port} is not free: {reason}", hint="leave --port out for one that is"
            ) from None

    def server_bind(self) -> None:
        """Binds without the search for a host name, which can take seconds without a network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, *_: Any) -> None:
        """Says nothing: a browser that closes its connection early is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "halfstep", ""
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        """Answers with the page, or says that it is still the same."""
        port = self.server.server_port
        if self.headers.get("Host") not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
            return self._answer(421, b"This server answers to its own address only.", kind="text/plain")
        if self.path != "/":
            return self._answer(404, b"There is one page here: /", kind="text/plain")
        try:
            html, tag = self.server.page.current()
        except HalfstepError as error:
            return self._answer(500, error.message.encode("utf-8", "backslashreplace"), kind="text/plain")
        if self.headers.get("If-None-Match") == tag:
            return self._answer(304, b"", tag)
        return self._answer(200, html, tag)

    do_HEAD = do_GET

    def _answer(self, code: int, body: bytes, tag: str = "", kind: str = "text/html") -> None:
        self.send_response(code)
        for name, value in (HEADERS | {"Content-Type": f"{kind}; charset=utf-8"}).items():
            self.send_header(name, value)
        if tag:
            self.send_header("ETag", tag)
        if code != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing of requests."""
