"""The page of a run, served while the run is running: read-only, two addresses, on loopback unless told otherwise."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cuboid.errors import UserError
from cuboid.report.collect import STILL, collect
from cuboid.report.page import page
from cuboid.report.source import open_source

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Fresh:
    """The data of a page, collected anew only when a file of the run has changed; what cannot change is kept."""

    def __init__(self, path: Path, cluster: str, with_search: bool) -> None:
        self._path, self._cluster = path, cluster
        self._lock = threading.Lock()
        self._data = collect(open_source(path, cluster), with_search)
        self._seen = self._state()

    def _state(self) -> list[tuple[str, int, int]]:
        if not self._path.is_dir():
            return []
        found = []
        for entry in self._path.iterdir():
            try:
                facts = entry.stat()
            except OSError:
                continue  # gone since it was listed
            found.append((entry.name, facts.st_size, facts.st_mtime_ns))
        return sorted(found)

    def data(self) -> dict[str, Any]:
        with self._lock:
            state = self._state()
            if state != self._seen:
                kept = {name: self._data[name] for name in STILL}
                self._data = collect(open_source(self._path, self._cluster), False) | kept
                self._seen = state
            return self._data


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    fresh: Fresh
    names: tuple[str, ...]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        # A page elsewhere may have let its own name point here: only our names are answered.
        host = self.headers.get("Host", "").rsplit(":", 1)[0].strip("[]")
        if self.server.names and host not in self.server.names:
            return self._answer(403, "text/plain", "not a name of this server\n")
        if self.path == "/":
            return self._answer(200, "text/html", page(self.server.fresh.data(), live=True))
        if self.path == "/data.json":
            return self._answer(200, "application/json", json.dumps(self.server.fresh.data(), allow_nan=False))
        return self._answer(404, "text/plain", "only / and /data.json are here\n")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        unchanged = status == 200 and self.headers.get("If-None-Match") == tag
        self.send_response(304 if unchanged else status)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        if not unchanged:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not unchanged:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


def serve(
    path: Path, host: str, port: int, cluster: str = "", with_search: bool = True, ready: Callable[[str], None] = print
) -> None:
    """Until the process is ended; `ready` is told the address."""
    fresh = Fresh(path, cluster, with_search)
    try:
        server = _Server((host, port), _Handler)
    except (OSError, OverflowError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UserError(f"host={host} port={port} cannot be listened on: {reason}; use another --port") from None
    server.fresh = fresh
    server.names = LOOPBACK if host in LOOPBACK else ()
    with server:
        ready(f"http://{host}:{server.server_address[1]}/")
        server.serve_forever()
