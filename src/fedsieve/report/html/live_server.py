"""`fedsieve watch`: a read-only server for the page of a running run, on the loopback address."""

import json
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from fedsieve.report.html.page import render_report
from fedsieve.report.html.run_record import find_runs, read_round_metrics
from fedsieve.storage import run_directory

LOOPBACK = "127.0.0.1"
WATCHED_FILES = (run_directory.METRICS, run_directory.SUPPORTS_NPZ, run_directory.RESULT, run_directory.MODEL)


class PageCache:
    """The page of a directory; it is rendered again only if a file has changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = Lock()
        self.cached: tuple[str, bytes] | None = None

    def state(self) -> dict[str, Any]:
        """Return the number of finished rounds, whether all runs are finished, and a stamp that changes with every file."""
        runs = find_runs(self.folder)
        stats = [(path.stat().st_mtime_ns, path.stat().st_size) for run in runs for name in WATCHED_FILES if (path := run / name).exists()]
        return {
            "round": sum(len(read_round_metrics(run / run_directory.METRICS)) for run in runs),
            "done": all((run / run_directory.RESULT).exists() for run in runs),
            "stamp": f"{len(runs)}-{hash(tuple(stats)):x}",
        }

    def page(self) -> bytes:
        """Return the current page."""
        with self.lock:
            stamp = self.state()["stamp"]
            if self.cached is None or self.cached[0] != stamp:
                self.cached = stamp, render_report([self.folder], live=True).encode()
            return self.cached[1]


class Handler(BaseHTTPRequestHandler):
    """Serve / and /state; requests for other host names are rejected."""

    cache: PageCache
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send the page, or the state of the run."""
        address: Any = self.server.server_address
        port = address[1]
        if self.headers.get("Host") not in {f"{name}:{port}" for name in (LOOPBACK, "localhost")}:
            self.send_content(HTTPStatus.FORBIDDEN, "text/plain", b"only requests to 127.0.0.1 and localhost are answered\n")
        elif self.path in ("/", "/state"):
            self.send_page()
        else:
            self.send_content(HTTPStatus.NOT_FOUND, "text/plain", b"only / and /state exist\n")

    do_HEAD = do_GET  # noqa: N815

    def send_page(self) -> None:
        """Send the content; if a file is being replaced, the page asks again after a second."""
        try:
            if self.path == "/":
                self.send_content(HTTPStatus.OK, "text/html; charset=utf-8", self.cache.page())
            else:
                self.send_content(HTTPStatus.OK, "application/json", json.dumps(self.cache.state()).encode())
        except (run_directory.RunDirectoryError, OSError) as error:
            self.send_content(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())

    def send_content(self, status: HTTPStatus, content_type: str, content: bytes) -> None:
        """Send headers that forbid framing and caching, then the content."""
        self.send_response(status)
        headers = {"Content-Type": content_type, "Content-Length": str(len(content)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def create_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server for the page of a directory on the loopback address; port 0 selects a free port."""
    find_runs(folder)
    handler = type("Handler", (Handler,), {"cache": PageCache(folder)})
    try:
        server = ThreadingHTTPServer((LOOPBACK, port), handler)
    except (OSError, OverflowError) as error:
        raise run_directory.RunDirectoryError(
            f"--port {port} cannot be used: {getattr(error, 'strerror', None) or error}; choose another"
        ) from None
    server.daemon_threads = True
    return server


def serve(folder: Path, port: int, log: Callable[[str], None]) -> None:
    """Serve until interrupted."""
    with create_server(folder, port) as server:
        try:
            log(f"http://{LOOPBACK}:{server.server_address[1]}/ shows {folder}; stop with Ctrl-C")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            log("stopped")
