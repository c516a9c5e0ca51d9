# SPDX-License-Identifier: MIT OR Apache-2.0
"""The program that runs in the process of a "local" machine.

It ends when its standard input closes, which happens when the client ends.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading

import torch

from ...errors import DeviceUnavailableError
from ...serve._outgoing import Outgoing
from ...serve._peers import Peers
from ...serve._weights import EVERYTHING, Weights
from .._answers import failure
from ._exchange import LocalExchange
from ._functions import ANY, Functions
from ._server import devices_of, server

_log = logging.getLogger("tensorstream.remote")


def main() -> None:
    """Serves until the standard input closes or SIGTERM arrives. Blocks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("listen")
    parser.add_argument("device", choices=["cpu", "cuda", "accelerator"])
    parser.add_argument("devices", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("budget", type=int, nargs="?")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        devices = devices_of(options.device, options.devices)
        # The process has the rights of its user, who is the client.
        exchange = LocalExchange(Peers(("any",)), Weights(EVERYTHING), Outgoing(("any",)))
        served = server(
            options.listen, devices=devices, exchange=exchange, budget=options.budget,
            functions=Functions((ANY,)),
        )  # fmt: skip
    except DeviceUnavailableError as error:
        # The client raises it.
        print(json.dumps(failure(error)), flush=True)
        sys.exit(1)
    except Exception as error:
        sys.exit(str(error))

    # Ctrl-C sends SIGINT to all processes of the terminal. The client decides whether to stop, and
    # may save its tensors first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: served.stop())

    def watch() -> None:
        while os.read(0, 1):
            pass
        served.stop()

    threading.Thread(target=watch, daemon=True).start()
    print("listening", flush=True)
    served.run(lambda peer, reason: _log.info("%s: %s", peer, reason))


if __name__ == "__main__":
    main()
