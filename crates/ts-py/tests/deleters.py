# SPDX-License-Identifier: MIT OR Apache-2.0
"""Drops tensors in several orders. `cargo xtask valgrind` runs this program.

It does not import torch, which is slow under valgrind. With the argument `twice`, it frees a tensor
twice, which valgrind must report.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading

import numpy as np
from tensorstream import _native as ts


def orders() -> None:
    for order in range(6):
        array = np.arange(100, dtype=np.int64)
        tensor = ts.Tensor.from_dlpack(array)
        holders = [array, tensor, np.from_dlpack(tensor), tensor.to_dlpack(), memoryview(tensor)]
        holders.append(tensor.__dlpack__(max_version=(1, 0)))
        del array, tensor
        holders = holders[order:] + holders[:order]
        while holders:
            last = holders.pop()
            if isinstance(last, np.ndarray):
                assert last.sum() == 4950
            del last
            gc.collect()


def others() -> None:
    own = ts.Tensor.zeros([10, 10], "float32")
    view = np.from_dlpack(own)
    del own
    view[3] = 1
    assert view.sum() == 10
    holders = [np.from_dlpack(ts.Tensor.zeros([5], "int8"))]
    thread = threading.Thread(target=holders.clear)
    thread.start()
    thread.join()
    backwards = ts.Tensor.from_dlpack(np.zeros((4, 4))[::-1, 1])
    assert bytes(memoryview(backwards)) == bytes(32)
    ts.Tensor.zeros([3], "float32").to_dlpack()  # never consumed


def twice() -> None:
    capsule = ts.Tensor.zeros([3], "float32").to_dlpack()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    managed = pointer(capsule, b"dltensor")
    # The deleter comes after the tensor (48 bytes) and the context pointer (8 bytes).
    deleter = ctypes.cast(managed + 56, ctypes.POINTER(ctypes.c_void_p))[0]
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter)(managed)
    del capsule


if __name__ == "__main__":
    if sys.argv[1:] == ["twice"]:
        twice()
    else:
        for _ in range(3):
            orders()
            others()
