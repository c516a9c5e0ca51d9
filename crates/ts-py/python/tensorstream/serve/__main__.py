# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs PyTorch operators for remote clients, each session in its own process."""

from __future__ import annotations

import argparse
import logging
import re
import resource
import signal
import sys

from .. import _native
from ..errors import TensorStreamError
from ..wire._connection import LIMIT_BYTES, _settings
from ._broker import Broker
from ._peers import Peers
from ._weights import Weights

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


def token_in(path: str) -> str:
    """Reads the token from the first line of a file, as ``tensorstream serve-weights`` does.

    Removes whitespace around the token.

    Raises:
        OSError: The file cannot be read.
        ValueError: The line is empty or not UTF-8.
    """
    with open(path, encoding="utf-8") as file:
        token = file.readline().strip()
    if not token:
        raise ValueError(f"no token in {path}: its first line is empty")
    return token


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tensorstream serve", description=__doc__)
    add = parser.add_argument
    add(
        "--listen", metavar="ADDRESS", default="127.0.0.1:7470",
        help="HOST:PORT, with port 0 for a free port, or unix:PATH (default: %(default)s)",
    )  # fmt: skip
    add("--token-file", metavar="FILE", help="a file whose first line is the clients' secret")
    add("--tls-cert", metavar="FILE", help="a certificate chain (PEM); clients then use TLS")
    add("--tls-key", metavar="FILE", help="the private key of the certificate (PEM)")
    add(
        "--tls-client-ca", metavar="FILE",
        help="accept only clients with a certificate of these authorities (PEM)",
    )  # fmt: skip
    add("--insecure", action="store_true", help="accept clients without a token or certificate")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="the type of the devices")
    add(
        "--devices", type=int, metavar="N",
        help="the number of devices (default: all GPUs; 8 for cpu)",
    )  # fmt: skip
    add("--threads", type=int, metavar="N", help="the number of PyTorch threads of each session")
    add(
        "--max-sessions", type=int, default=256, metavar="N",
        help="the most sessions at a time (default: %(default)s)",
    )  # fmt: skip
    add(
        "--session-memory", metavar="SIZE",
        help='the most memory of one session, such as "4GiB" (default: unlimited)',
    )  # fmt: skip
    add(
        "--peer", action="append", default=[], metavar="ADDRESS",
        help="a server with the same token, from which tensors can be copied directly",
    )  # fmt: skip
    add("--peer-ca", metavar="FILE", help="certificates (PEM) to trust for --peer")
    add(
        "--weights", action="append", default=[], metavar="PLACE",
        help="a directory, hf:// with the beginning of the names of models, or any: checkpoints "
        "that clients can load from here",
    )  # fmt: skip
    add(
        "--budget", metavar="SIZE",
        help="the most memory of one session for weights that it loads from here; those that do "
        "not fit are streamed (default: unlimited)",
    )  # fmt: skip
    add(
        "--once", action="store_true",
        help="end with the first session, or after 60 seconds without one",
    )  # fmt: skip
    add("--no-sandbox", action="store_true", help="do not restrict the processes of sessions")
    return parser


def _size(parser: argparse.ArgumentParser, option: str, text: str | None) -> int | None:
    try:
        return None if text is None else _native.parse_bytes(text)
    except ValueError as error:
        parser.error(f"{option}: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Runs ``tensorstream serve`` until a signal ends it.

    Args:
        arguments: The arguments. None means those of the process.

    Returns:
        The exit status: 0, or 2 if the server cannot start.

    Raises:
        SystemExit: The arguments are invalid.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if sys.platform != "linux":
        parser.error(f"unsupported platform {sys.platform}: expected linux")
    token = None
    if options.token_file:
        try:
            token = token_in(options.token_file)
        except (OSError, ValueError) as error:
            parser.error(f"--token-file: {error}")
    if options.max_sessions < 1:
        parser.error(f"--max-sessions must be at least 1, got {options.max_sessions}")
    memory = _size(parser, "--session-memory", options.session_memory)
    budget = _size(parser, "--budget", options.budget)
    if budget is not None and options.device != "cpu":
        parser.error("--budget: weights stream only on CPUs so far; leave it out")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    tls = {"cert": options.tls_cert, "key": options.tls_key}

    peers = Peers(tuple(options.peer), token, {"ca": options.peer_ca, **tls})
    try:
        settings = _settings(token, 30.0, 300.0, True, None, LIMIT_BYTES)
        dispatcher = _native.Dispatcher(
            options.listen, settings, options.insecure, ca=options.tls_client_ca, **tls
        )
        sessions = {
            "device": options.device, "devices": options.devices, "threads": options.threads,
            "memory": memory, "budget": budget,
            "sandbox": not options.no_sandbox,
        }  # fmt: skip
        weights = Weights(tuple(options.weights))
        served = Broker(
            dispatcher, peers, weights, sessions, options.max_sessions, once=options.once
        )
    except (TensorStreamError, RuntimeError, OSError, ValueError) as error:
        print(f"tensorstream serve: {_with_options(str(error))}", file=sys.stderr)
        return 2
    # Each session needs file descriptors, and so does each tensor that it offers.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: served.stop())
    if options.no_sandbox:
        _log.warning("--no-sandbox: a malicious client can read this user's files")
    elif not served.restrictions:
        _log.warning("the system lacks Landlock and seccomp, so sessions have no sandbox")
    elif len(served.restrictions) < 2:
        prevented = ", ".join(served.restrictions)
        _log.warning(
            "the system lacks Landlock or seccomp, so the sandbox of sessions blocks access only "
            "to %s",
            prevented,
        )
    elif options.device == "cuda":
        _log.warning("sessions on GPUs can open files, because the GPU driver must open files")
    print(f"listening at {dispatcher.address}", flush=True)
    served.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
