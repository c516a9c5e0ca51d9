# SPDX-License-Identifier: MIT OR Apache-2.0
"""The types of NVIDIA GPUs that can be requested by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """A type of GPU.

    Attributes:
        pattern: A pattern in the name that the driver gives the GPU.
        at_least: Its least memory, in bytes. The driver reports less than the nominal memory.
        below: Its memory is below this size, in bytes, if another type has the same name.
    """

    pattern: re.Pattern[str]
    at_least: int
    below: int | None = None

    def matches(self, name: str, memory: int) -> bool:
        """Returns whether a GPU with this name and memory, in bytes, is of the type."""
        fits = self.at_least <= memory and (self.below is None or memory < self.below)
        return fits and self.pattern.search(name) is not None


def _gpu(name: str, gigabytes: int, below: int | None = None) -> Gpu:
    # "A100" is not in "A1000", and "L4" is not in "L40".
    pattern = re.compile(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])")
    return Gpu(pattern, gigabytes * _GIB, None if below is None else below * _GIB)


#: The types by name. The sizes are below those of data sheets, because the driver keeps a part.
GPUS = {
    "T4": _gpu("T4", 14),
    "L4": _gpu("L4", 21),
    "A10G": _gpu("A10G", 21),
    "A100": _gpu("A100", 38),
    "A100-40GB": _gpu("A100", 38, 60),
    "A100-80GB": _gpu("A100", 76),
    "L40S": _gpu("L40S", 43),
    "H100": _gpu("H100", 76),
    "H200": _gpu("H200", 135),
    "B200": _gpu("B200", 170),
}
