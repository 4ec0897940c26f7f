"""A hub with one model, as far as huggingface_hub asks: revisions, listings, files."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "tests/tiny"


class Hub:
    """``revisions``: name -> folder. ``fetched``: (revision, file) of every download."""

    def __init__(self, **revisions: Path) -> None:
        self.revisions = revisions
        self.fetched: list[tuple[str, str]] = []

    def commit(self, revision: str) -> str:
        return hashlib.sha1(revision.encode()).hexdigest()

    def named(self, revision: str) -> str | None:
        """The name of a revision given by name or commit."""
        known = (n for n in self.revisions if revision in (n, self.commit(n)))
        return next(known, None)

    @contextmanager
    def serve(self):
        """Yields the endpoint's URL."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:4] == ["api", "models", *NAME.split("/")]:
            what, revision = [*parts[4:6], "revision", "main"][:2] if parts[4:] else ("", "main")
            name = self.hub.named(revision)
            if name is None:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            files = [p for p in sorted(self.hub.revisions[name].iterdir()) if p.is_file()]
            if what == "tree":
                found = [
                    {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": _etag(p)}
                    for p in files
                ]
            else:
                siblings = [{"rfilename": p.name} for p in files]
                found = {"id": NAME, "sha": self.hub.commit(name), "siblings": siblings}
            return self._send(200, json.dumps(found).encode(), {})
        if parts[:2] == NAME.split("/") and parts[2] == "resolve":
            name = self.hub.named(parts[3])
            file = self.hub.revisions.get(name, Path("/nowhere")) / "/".join(parts[4:])
            if not file.is_file():
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            if self.command == "GET":
                self.hub.fetched.append((name, file.name))
            headers = {"X-Repo-Commit": self.hub.commit(name), "ETag": f'"{_etag(file)}"'}
            return self._send(200, file.read_bytes(), headers)
        return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_args) -> None:
        pass


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
