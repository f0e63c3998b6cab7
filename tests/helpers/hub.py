"""A Hugging Face Hub on the loopback, with one model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(NamedTuple):
    """A server, and what it was asked for."""

    endpoint: str
    downloads: list[str]
    """Files that were sent, in order."""


@contextmanager
def hub(model: str, folder: Path, revision: str = "main") -> Iterator[Hub]:
    """Serve a folder as a model of the Hub."""
    downloads: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _json(self, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _answer(self, *, sends: bool) -> None:
            path = unquote(urlparse(self.path).path)
            files = [f for f in sorted(folder.rglob("*")) if f.is_file()]
            names = [f.relative_to(folder).as_posix() for f in files]
            resolve = (f"/{model}/resolve/{revision}/", f"/{model}/resolve/{COMMIT}/")
            if path.startswith(f"/api/models/{model}/tree/"):
                self._json(
                    [
                        {"type": "file", "path": n, "size": f.stat().st_size, "oid": _etag(f)}
                        for n, f in zip(names, files, strict=True)
                    ]
                )
            elif path in (f"/api/models/{model}", f"/api/models/{model}/revision/{revision}"):
                siblings = [{"rfilename": name} for name in names]
                self._json({"id": model, "sha": COMMIT, "siblings": siblings})
            elif path.startswith(resolve) and (name := _name(path, resolve)) in names:
                data = (folder / name).read_bytes()
                self.send_response(200)
                self.send_header("ETag", f'"{_etag(folder / name)}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if sends:
                    downloads.append(name)
                    self.wfile.write(data)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def do_GET(self) -> None:
            self._answer(sends=True)

        def do_HEAD(self) -> None:
            self._answer(sends=False)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_address[1]}", downloads)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()


def _name(path: str, prefixes: tuple[str, ...]) -> str:
    return next(path.removeprefix(p) for p in prefixes if path.startswith(p))
