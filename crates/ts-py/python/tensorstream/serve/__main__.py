# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs PyTorch operators for remote clients, each session in its own process."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import re
import signal
import sys
from typing import Any

from .. import _native
from .._signals import ending_signals
from .._standard_streams import give_up_messages, open_closed_streams
from ..errors import TensorStreamError
from ._broker import Broker, broker_of
from ._status import StatusPages

_log = logging.getLogger("tensorstream.remote")

#: The option for each parameter that an error message names.
_OPTIONS = {
    "token=": "--token-file",
    "ca=": "--tls-client-ca",
    "cert=": "--tls-cert",
    "key=": "--tls-key",
    "insecure=True": "--insecure",
}


def _with_options(message: str) -> str:
    """Replaces the names of parameters in an error message by the options of this command."""
    return re.sub(rf"(?<!\w)({'|'.join(_OPTIONS)})", lambda name: _OPTIONS[name[0]], message)


class _JsonFormatter(logging.Formatter):
    """Formats log lines as JSON objects with the time in UTC."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def serve(text: str) -> int:
    """Runs the server of devices until a signal ends it.

    Args:
        text: The options, as a JSON object: see crates/tensorstream/src/cli/serve_device.rs.

    Returns:
        The exit status: 0, or 2 if the server cannot start.
    """
    options = json.loads(text)
    if sys.platform != "linux":
        print(
            f"tensorstream serve: cannot run on {sys.platform}: it needs Linux; run it on a Linux "
            "machine",
            file=sys.stderr,
        )
        return 2
    if options["budget"] is not None and options["device"] != "cpu":
        print(
            "tensorstream serve: --budget: weights stream only on CPUs so far; leave it out",
            file=sys.stderr,
        )
        return 2
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter()
        if options["log_format"] == "json"
        else logging.Formatter("%(asctime)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    with contextlib.ExitStack() as stack:
        try:
            broker, address = broker_of(options)
            if options["metrics"] is not None:
                pages = stack.enter_context(StatusPages(options["metrics"], broker))
                _log.info("metrics at http://%s/metrics", pages.address)
        except (TensorStreamError, RuntimeError, OSError, ValueError) as error:
            print(f"tensorstream serve: {_with_options(str(error))}", file=sys.stderr)
            return 2
        for number in ending_signals():
            signal.signal(number, lambda *_: broker.stop())
        _warn_of_open_doors(options, broker)
        print(f"listening at {address}", flush=True)
        broker.run()
    return 0


def _warn_of_open_doors(options: dict[str, Any], broker: Broker) -> None:
    if not options["sandbox"]:
        _log.warning("--no-sandbox: a malicious client can read this user's files")
    elif not broker.restrictions:
        _log.warning("the system lacks Landlock and seccomp, so sessions have no sandbox")
    elif len(broker.restrictions) < 2:
        prevented = ", ".join(broker.restrictions)
        _log.warning(
            "the system lacks Landlock or seccomp, so the sandbox of sessions blocks access only "
            "to %s",
            prevented,
        )
    elif options["device"] != "cpu":
        _log.warning("sessions on GPUs can open files, because the GPU driver must open files")


def main(arguments: list[str] | None = None) -> int:
    """Runs ``tensorstream serve``, by default with the arguments of this process. Blocks.

    Returns:
        The exit status.
    """
    open_closed_streams()
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return _native.main(["tensorstream", "serve", *given], serve)
    finally:
        give_up_messages()


if __name__ == "__main__":
    sys.exit(main())
