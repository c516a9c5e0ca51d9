# SPDX-License-Identifier: MIT OR Apache-2.0
"""A server that answers as the Hugging Face Hub does, as far as downloads need it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub:
    """The server. Models are directories ``ORGANISATION/MODEL``, and have the revision "main".

    Attributes:
        endpoint: The URL of the server.
        requests: The method and the path of each request.
        gated: The names of models that nobody may download.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.requests: list[str] = []
        self.gated: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path).strip("/")
                hub.requests.append(f"{self.command} {path}")
                status, headers, body = hub.answer(path)
                ranged = self.headers.get("Range")
                if ranged and status == 200:
                    first, _, last = ranged.removeprefix("bytes=").partition("-")
                    stop = int(last) + 1 if last else len(body)
                    headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(body)}"
                    status, body = 206, body[int(first) : stop]
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def commit(self, model: str) -> str:
        """Returns the commit of the main branch of a model."""
        return hashlib.sha1(model.encode(), usedforsecurity=False).hexdigest()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns the status, the headers and the body of the answer to a request."""
        api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        model, rest = "/".join(parts[:2]), parts[4:]
        kind, revision = [*parts[2:4], "", ""][:2]
        directory = self.directory / model
        commit = self.commit(model)
        if len(parts) < 2 or not directory.is_dir():
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if model in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if kind and revision not in ("main", commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        files = {
            str(file.relative_to(directory)): file
            for file in sorted(directory.rglob("*"))
            if file.is_file()
        }
        if api:
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": commit}
                for name, file in files.items()
            ]
            siblings = [{"rfilename": name} for name in files]
            info = {"_id": commit, "id": model, "sha": commit, "siblings": siblings}
            return (
                200,
                {"Content-Type": "application/json"},
                json.dumps(tree if kind == "tree" else info).encode(),
            )
        file = files.get("/".join(rest))
        if kind != "resolve" or file is None:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
        body = file.read_bytes()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}, body

    @contextlib.contextmanager
    def serving(self) -> Iterator[Hub]:
        """Serves until the context ends."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
