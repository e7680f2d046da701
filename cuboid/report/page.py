"""One page that holds its data, its style and its script, and asks nobody for anything; or, served while a run is
running, only this server: read-only, two addresses, on loopback unless told otherwise. Elsewhere they begin with a
token that only those have who were given the address."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

import cuboid
from cuboid.errors import UserError
from cuboid.report.islands import islands
from cuboid.report.layouts import considered, explorer
from cuboid.report.metrics import curves, experts, layers, rank_time
from cuboid.report.ranks import communication, memory, ranks
from cuboid.report.source import Source, open_source
from cuboid.report.summary import summary
from cuboid.report.timeline import timeline

STILL = ("considered", "explorer")
"""Sections that stay as they are while a run is running."""


def collect(source: Source, with_search: bool = True) -> dict[str, Any]:
    """`with_search`: also what other layouts would cost, which takes seconds on a large cluster."""
    run = source.run
    return {
        "kind": "plan" if source.folder is None else "run",
        "title": f"{run.model.name}, {run.layout}",
        "folder": None if source.folder is None else source.folder.name,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": cuboid.__version__,
        "summary": summary(source),
        "ranks": ranks(source),
        "timeline": timeline(source),
        "memory": memory(source),
        "communication": communication(source),
        "curves": curves(source),
        "experts": experts(source),
        "layers": layers(source),
        "islands": islands(source),
        "rank_time": rank_time(source),
        "considered": considered(source) if with_search else None,
        "explorer": explorer(source) if with_search else None,
    }


SCRIPTS = (
    "core",
    "summary",
    "ranks",
    "timeline",
    "memory",
    "communication",
    "curves",
    "experts",
    "layers",
    "islands",
    "rank_time",
    "considered",
    "explorer",
    "main",
)


def page(data: dict[str, Any], live: bool = False) -> str:
    """`live`: the page asks the server that gave it for newer data."""
    script = "\n".join(_part(f"{name}.js") for name in (*SCRIPTS, *(["live"] if live else [])))
    parts = {
        "TITLE": escape(str(data["title"])),
        "CONNECT": "; connect-src 'self'" if live else "",
        "STYLE": _part("style.css"),
        "SCRIPT": script,
        "DATA": embedded(data),
    }
    shell = _part("page.html")
    # Split, not replaced in turn: what stands in the data is never taken for a place to fill.
    segments = shell.split("@@")
    return "".join(parts[segment] if index % 2 else segment for index, segment in enumerate(segments))


def embedded(data: dict[str, Any]) -> str:
    """JSON that no text in it can end: whatever could open or close a tag is written as an escape."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _part(name: str) -> str:
    return resources.files("cuboid.report").joinpath("page", name).read_text(encoding="utf-8")


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


MOST = 64
"""Connections that have asked for nothing that is here; one more ends the oldest of them."""
SECONDS = 10.0
"""For a request to be heard, or an answer to be taken."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    fresh: Fresh
    names: tuple[str, ...]
    root: str
    """What addresses begin with."""

    def __init__(self, where: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(where, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._strangers[request] = None
            if len(self._strangers) > MOST:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def know(self, request: Any) -> None:
        with self._lock:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.know(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is nobody's news."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = SECONDS

    def do_GET(self) -> None:
        # A page elsewhere may have let its own name point here: only our names are answered.
        host = self.headers.get("Host", "").rsplit(":", 1)[0].strip("[]")
        if self.server.names and host not in self.server.names:
            return self._answer(403, "text/plain", "not a name of this server\n")
        if not hmac.compare_digest(self.path[: len(self.server.root)].encode(), self.server.root.encode()):
            return self._answer(
                404, "text/plain", "the address lacks its token; use the one that the command printed\n"
            )
        self.server.know(self.connection)
        path = self.path[len(self.server.root) :]
        if path not in ("", "data.json"):
            return self._answer(404, "text/plain", "only / and /data.json are here\n")
        try:
            data = self.server.fresh.data()
        except (UserError, OSError) as problem:  # of a run that was damaged or removed meanwhile
            return self._answer(503, "text/plain", f"{problem}\n")
        if path == "":
            return self._answer(200, "text/html", page(data, live=True))
        return self._answer(200, "application/json", json.dumps(data, allow_nan=False))

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        unchanged = status == 200 and self.headers.get("If-None-Match") == tag
        self.send_response(304 if unchanged else status)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Referrer-Policy", "no-referrer")  # the token is in the address
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
    """Until the process is ended; `ready` is told the address, which has a token in it where others reach it."""
    fresh = Fresh(path, cluster, with_search)
    try:
        server = _Server((host, port), _Handler)
    except (OSError, OverflowError, UnicodeError, TypeError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        reason = "no host has this name" if isinstance(problem, UnicodeError | TypeError) else reason
        raise UserError(f"host={host} port={port} cannot be listened on: {reason}; use another --port") from None
    server.fresh = fresh
    server.names = LOOPBACK if host in LOOPBACK else ()
    server.root = "/" if host in LOOPBACK else f"/{secrets.token_urlsafe(32)}/"
    with server:
        ready(f"http://{host}:{server.server_address[1]}{server.root}")
        server.serve_forever()
