# SPDX-License-Identifier: MIT OR Apache-2.0
"""Makes idle OpenMP threads of PyTorch sleep sooner, so that they do not slow down reading.

PyTorch computes with the OpenMP library libgomp. Its idle threads spin for about 3 ms before they
sleep. While weights are read, they take the processor time that reading needs. libgomp reads its
settings when it is loaded, which is when torch is imported.
"""

from __future__ import annotations

import os
import sys

#: How often idle threads check for work before they sleep, which takes about 40 µs. Fewer checks
#: slow down models that are in memory.
SPINS = 4000


def shorten_waits() -> None:
    """Sets ``GOMP_SPINCOUNT`` for libgomp, unless the user has set how threads wait.

    Has no effect if torch is already imported.
    """
    user_set = "GOMP_SPINCOUNT" in os.environ or "OMP_WAIT_POLICY" in os.environ
    if not user_set and "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
