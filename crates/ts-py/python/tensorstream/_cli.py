# SPDX-License-Identifier: MIT OR Apache-2.0
"""The console script ``tensorstream``: the program that ``cargo install`` builds, and more.

The server of ``serve device``, and the commands ``generate`` and ``serve-openai``, are written in
Python because they need PyTorch.
"""

import os
import signal
import sys
from types import FrameType

from ._native import main as run
from ._signals import ending_signals
from ._standard_streams import give_up_messages, open_closed_streams
from .errors import TensorStreamError

#: The return value of ``run`` after an interrupt.
_INTERRUPTED = 130


class _Signals:
    """Handles SIGINT, SIGTERM and SIGHUP.

    The first signal stops the command cleanly. A second signal exits at once.
    """

    def __init__(self) -> None:
        self.received = 0
        for number in ending_signals():
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
        raise KeyboardInterrupt


def _path_of(name: str) -> str:
    """Returns the path of a model on the Hugging Face Hub, which is downloaded if necessary.

    Returns paths and URLs as they are.
    """
    from .files._hub import HubModel
    from .files._places import find

    return name if HubModel.named(name, {}) is None else find(name).weights


def _serve_device(options: str) -> int:
    from ._systems import require_unix

    require_unix("a server of the device ts", "run it on Linux")
    from .serve.__main__ import serve

    return serve(options)


def main() -> int:
    """Runs ``tensorstream`` with the arguments of this process. Blocks.

    Returns:
        The exit status. If a signal stopped the command, it is usually 128 plus the number of the
        signal. Servers that stop cleanly return 0.
    """
    open_closed_streams()
    try:
        return _run()
    finally:
        give_up_messages()


def _run() -> int:
    if sys.argv[1:2] == ["generate"]:
        from .streaming._generate_cli import main as generate

        return generate(sys.argv[2:])
    if sys.argv[1:2] == ["serve-openai"]:
        from .streaming._openai import main as serve_openai

        return serve_openai(sys.argv[2:])
    arguments = sys.argv[1:]
    signals = _Signals()
    try:
        if arguments[:1] in (["info"], ["plan"]) and "/" in "".join(arguments[1:2]):
            arguments[1] = _path_of(arguments[1])
        status = run(["tensorstream", *arguments], _serve_device)
    except TensorStreamError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = _INTERRUPTED
    return 128 + signals.received if status == _INTERRUPTED and signals.received else status
