# SPDX-License-Identifier: MIT OR Apache-2.0
"""Dtypes by the numbers that they have between machines, which are PyTorch's own
(``c10::ScalarType``).
"""

from __future__ import annotations

import torch

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6

#: Name, PyTorch's number, bytes of an element, DLPack's code and bits.
_TABLE = [
    ("uint8", 0, 1, (_UINT, 8)),
    ("int8", 1, 1, (_INT, 8)),
    ("int16", 2, 2, (_INT, 16)),
    ("int32", 3, 4, (_INT, 32)),
    ("int64", 4, 8, (_INT, 64)),
    ("float16", 5, 2, (_FLOAT, 16)),
    ("float32", 6, 4, (_FLOAT, 32)),
    ("float64", 7, 8, (_FLOAT, 64)),
    ("complex32", 8, 4, (_COMPLEX, 32)),
    ("complex64", 9, 8, (_COMPLEX, 64)),
    ("complex128", 10, 16, (_COMPLEX, 128)),
    ("bool", 11, 1, (_BOOL, 8)),
    ("bfloat16", 15, 2, (_BFLOAT, 16)),
    ("float8_e5m2", 23, 1, (12, 8)),
    ("float8_e4m3fn", 24, 1, (10, 8)),
    ("float8_e5m2fnuz", 25, 1, (13, 8)),
    ("float8_e4m3fnuz", 26, 1, (11, 8)),
    ("uint16", 27, 2, (_UINT, 16)),
    ("uint32", 28, 4, (_UINT, 32)),
    ("uint64", 29, 8, (_UINT, 64)),
    ("float8_e8m0fnu", 44, 1, (14, 8)),
]

DTYPES = [(getattr(torch, name), *rest) for name, *rest in _TABLE if hasattr(torch, name)]
NUMBERS = {dtype: number for dtype, number, *_ in DTYPES}

#: Operators that may be called with a number in a tensor's place. Of others there is an overload
#: for numbers.
TAKES_NUMBERS = frozenset(
    name + suffix
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "subtract",
        "multiply",
        "divide",
        "true_divide",
        "floor_divide",
        "copy",
    )
    for suffix in ("", "_")
)
