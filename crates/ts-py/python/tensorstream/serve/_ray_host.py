# SPDX-License-Identifier: MIT OR Apache-2.0
"""The actor with which the provider "ray" hosts a server. It does not import PyTorch."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

#: The time that a server may take to stop, in seconds.
STOP = 10.0


class Host:
    """A Ray actor that hosts a server."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._broker: Any = None
        self._failure = ""

    def start(self, options: dict[str, Any]) -> str:
        """Starts the server. Returns its address.

        Args:
            options: Those of ``tensorstream serve`` that this provider sets.
        """
        import ray.util

        from ._broker import broker_of
        from ._weights import EVERYTHING

        node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
        # The server has the rights of its user, who is the client.
        self._broker, address = broker_of({
            "listen": f"{node}:0", "insecure": False,
            "cert": None, "key": None, "ca": None, "peers": ["any"], "peer_ca": None,
            "send_to": ["any"],
            "weights": list(EVERYTHING), "functions": ["any"], "sandbox": True, "max_sessions": 256,
            "client_sessions": 256, "idle_timeout": None, "drain": 0, "once": False,
            **options,
        })  # fmt: skip
        threading.Thread(target=self._run, name="tensorstream-serve", daemon=True).start()
        return address

    def process(self) -> int:
        """Returns the ID of the actor's process."""
        return os.getpid()

    def _run(self) -> None:
        try:
            self._broker.run()
        except Exception as error:
            self._failure = f": {error}"
        finally:
            self._stopped.set()

    def wait(self) -> str:
        """Blocks until the server has ended. Returns why."""
        self._stopped.wait()
        return f"the server in its Ray actor has ended{self._failure}"

    def stop(self) -> None:
        """Ends the server. Blocks."""
        if self._broker is not None:
            self._broker.stop()
            self._stopped.wait(STOP)
