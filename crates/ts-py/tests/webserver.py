# SPDX-License-Identifier: MIT OR Apache-2.0
"""Serves the files of a directory with range requests and ETags, as S3 and web servers do."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

__all__ = ["WebServer"]


class WebServer:
    """A web server, which ends with the ``with`` block.

    Args:
        directory: The directory. The path of a request is that of a file in it.
    """

    def __init__(self, directory: Path) -> None:
        #: The paths that were requested.
        self.requests: list[str] = []
        #: The entity tag of all files.
        self.etag = "one"
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                web.requests.append(self.path)
                file = directory / self.path.lstrip("/")
                content = file.read_bytes() if file.is_file() else b""
                total = len(content)
                wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                if wanted:
                    content = content[int(wanted[1]) : int(wanted[2] or total - 1) + 1]
                self.send_response((206 if wanted else 200) if file.is_file() else 404)
                if wanted:
                    end = int(wanted[1]) + len(content) - 1
                    self.send_header("Content-Range", f"bytes {wanted[1]}-{end}/{total}")
                self.send_header("ETag", f'"{web.etag}"')
                self.send_header("Last-Modified", "Tue, 01 Sep 2026 12:00:00 GMT")
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> WebServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
