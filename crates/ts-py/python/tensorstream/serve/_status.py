# SPDX-License-Identifier: MIT OR Apache-2.0
"""Serves the state of ``tensorstream serve`` over HTTP: /metrics and /healthz."""

from __future__ import annotations

import http.server
import socket
import threading
from types import TracebackType
from typing import Any, Protocol

from ..errors import ConfigurationError

#: The most connections at a time.
_MAX_CONNECTIONS = 64
#: The time that a client may take for a request, in seconds.
_TIMEOUT = 5.0


class Observed(Protocol):
    """A server whose state is served."""

    def metrics(self) -> str:
        """Returns counters in the text format of Prometheus."""

    def refuses(self) -> str:
        """Returns why new clients are refused, or an empty string."""


class StatusPages:
    """An HTTP server with the pages of a server. A context manager.

    - ``/metrics``: counters in the text format of Prometheus.
    - ``/healthz``: status 200 while new clients are accepted, and else 503 with the reason.

    Args:
        address: "HOST:PORT", with port 0 for a free port.
        of: The server.

    Raises:
        ConfigurationError: The address is invalid.
        OSError: The address cannot be bound.
    """

    def __init__(self, address: str, of: Observed) -> None:
        host, colon, port = address.rpartition(":")
        if not colon or not port.isdecimal() or int(port) > 65535:
            raise ConfigurationError(f"invalid --metrics {address!r}: expected HOST:PORT")
        self._server = _Server((host.strip("[]"), int(port)), of)
        bound = self._server.server_address
        #: The address, with the actual port.
        self.address = f"{host}:{bound[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="tensorstream-status", daemon=True
        )

    def __enter__(self) -> StatusPages:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    #: Limits the connections at a time.
    _free = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread for a connection, or closes it if there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers the request of a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: a client has closed its connection."""

    def __init__(self, address: tuple[str, int], of: Observed) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.of = of
        super().__init__(address, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _TIMEOUT

    def do_GET(self) -> None:
        """Answers a request."""
        match self.path.partition("?")[0]:
            case "/metrics":
                self._answer(200, self.server.of.metrics(), "text/plain; version=0.0.4")
            case "/healthz":
                reason = self.server.of.refuses()
                self._answer(503 if reason else 200, f"{reason or 'ok'}\n")
            case _:
                self._answer(404, "expected /metrics or /healthz\n")

    do_HEAD = do_GET

    def _answer(self, status: int, text: str, kind: str = "text/plain") -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: monitors ask every few seconds."""
