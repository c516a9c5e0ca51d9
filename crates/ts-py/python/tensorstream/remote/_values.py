# SPDX-License-Identifier: MIT OR Apache-2.0
"""Values of functions that run on machines: JSON, with tensors next to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

#: Whether this thread runs a function on a machine. Functions that it calls then run there too.
running = threading.local()
#: The types of values that JSON has.
_PLAIN = (type(None), bool, int, float, str)
#: What can be passed, for errors.
EXPECTED = (
    "tensors, numbers, strings, None, dtypes and devices, and lists, tuples and dicts of them"
)


def encode(value: Any, tensors: list[torch.Tensor], device: Callable[[torch.device], int]) -> Any:
    """Returns a value for JSON, and appends its tensors to ``tensors``.

    Args:
        value: The value.
        tensors: The tensors, which the result refers to by their positions.
        device: Returns the number of a device on its machine.

    Raises:
        TypeError: The value has a part of another type than ``EXPECTED`` lists.
    """
    # Subclasses, such as named tuples, would arrive as something else.
    match value:
        case None | bool() | int() | float() | str() if type(value) in _PLAIN:
            encoded: Any = value
        case torch.Tensor():
            tensors.append(value)
            encoded = {"tensor": len(tensors) - 1}
        case complex() if type(value) is complex:
            encoded = {"complex": [value.real, value.imag]}
        case torch.dtype():
            encoded = {"dtype": str(value).removeprefix("torch.")}
        case torch.device():
            encoded = {"device": device(value)}
        case list() if type(value) is list:
            encoded = {"list": [encode(each, tensors, device) for each in value]}
        case tuple() if type(value) in (tuple, torch.Size):
            encoded = {"tuple": [encode(each, tensors, device) for each in value]}
        case dict() if type(value) is dict:
            pairs = [[encode(each, tensors, device) for each in pair] for pair in value.items()]
            encoded = {"dict": pairs}
        case _:
            raise TypeError(f"cannot pass a {type(value).__name__}: expected {EXPECTED}")
    return encoded


def decode(value: Any, tensors: list[torch.Tensor], device: Callable[[int], torch.device]) -> Any:
    """Returns the value that ``encode`` has encoded.

    Args:
        value: The value from JSON. It may come from an adversary.
        tensors: The tensors.
        device: Returns the device with a number.

    Raises:
        ValueError: The value is invalid.
    """
    match value:
        case None | bool() | int() | float() | str():
            decoded: Any = value
        case {"tensor": int(position)} if 0 <= position < len(tensors):
            decoded = tensors[position]
        case {"complex": [float() | int() as real, float() | int() as imaginary]}:
            decoded = complex(real, imaginary)
        case {"dtype": str(name)} if isinstance(getattr(torch, name, None), torch.dtype):
            decoded = getattr(torch, name)
        case {"device": int(number)}:
            decoded = device(number)
        case {"list": list(values)}:
            decoded = [decode(each, tensors, device) for each in values]
        case {"tuple": list(values)}:
            decoded = tuple(decode(each, tensors, device) for each in values)
        case {"dict": list(pairs)} if all(isinstance(p, list) and len(p) == 2 for p in pairs):
            decoded = {
                decode(key, tensors, device): decode(each, tensors, device) for key, each in pairs
            }
        case _:
            raise ValueError(f"invalid value: {str(value)[:100]}")
    return decoded
