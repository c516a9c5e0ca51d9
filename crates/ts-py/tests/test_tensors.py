# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tests the exchange of ``Tensor`` with NumPy, PyTorch and JAX without copies."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstream as ts
import torch


def address(array: Any) -> int:
    if isinstance(array, torch.Tensor):
        return array.data_ptr()
    if isinstance(array, np.ndarray):
        return int(array.ctypes.data)
    return int(array.unsafe_buffer_pointer())


NUMPY = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
NUMPY += ["float16", "float32", "float64", "complex64"]


@pytest.mark.critical
@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_exchange_does_not_copy(dtype: str) -> None:
    given = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for array in (
        given,
        given[:, ::2],
        given.T,
        given[1:, 2],
        given[..., :0],
        np.array(7).astype(dtype),
    ):
        tensor = ts.Tensor.from_dlpack(array, name="w")
        assert (tensor.shape, tensor.dtype, tensor.name) == (array.shape, ts.DType.of(dtype), "w")
        back = tensor.to_numpy()
        np.testing.assert_array_equal(back, array)
        assert back.dtype == array.dtype
        if array.size:
            assert address(back) == address(array)
            assert np.from_dlpack(tensor).ctypes.data == address(array)
        again = ts.Tensor.from_dlpack(tensor.to_dlpack())
        np.testing.assert_array_equal(again.to_numpy(), array)
    backwards = ts.Tensor.from_dlpack(given[::-1, :, ::-1])
    assert backwards.strides == (-12, 4, -1)
    np.testing.assert_array_equal(np.asarray(memoryview(backwards)), given[::-1, :, ::-1])


TORCH = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
]
TORCH += [torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_torch_exchange_does_not_copy(dtype: torch.dtype) -> None:
    given = torch.arange(24).reshape(4, 6).to(dtype)
    for view in (given, given.t(), given[1::2, 2:], given[:0]):
        tensor = ts.Tensor.from_dlpack(view)
        assert (tensor.shape, tensor.strides[:1]) == (
            tuple(view.shape),
            tuple(view.stride())[:1],
        ) or not view.numel()
        back = tensor.to_torch()
        assert back.dtype == dtype
        assert torch.equal(
            back.view(torch.uint8) if dtype.itemsize == 1 else back, _comparable(view)
        )
        if view.numel():
            assert back.data_ptr() == view.data_ptr()


def _comparable(view: torch.Tensor) -> torch.Tensor:
    return view.view(torch.uint8) if view.dtype.itemsize == 1 else view


def test_jax_exchange_does_not_copy() -> None:
    given = jnp.arange(24, dtype=jnp.float32).reshape(4, 6)
    tensor = ts.Tensor.from_dlpack(given)
    assert tensor.to_numpy().ctypes.data == address(given)
    back = jnp.from_dlpack(tensor)
    np.testing.assert_array_equal(np.asarray(back), np.asarray(given))
    own = ts.Tensor.zeros([64, 64], "float32")
    theirs = jnp.from_dlpack(own)
    assert address(theirs) == own.to_numpy().ctypes.data
    assert float(theirs.sum()) == 0


def test_memory_lives_until_the_last_holder_is_dropped() -> None:
    """Drops the holders in six different orders."""
    for order in range(6):
        array = np.arange(1000, dtype=np.int64)
        gone = weakref.ref(array)
        tensor = ts.Tensor.from_dlpack(array)
        holders = [
            array,
            tensor,
            tensor.to_torch(),
            tensor.to_numpy(),
            tensor.to_dlpack(),
            memoryview(tensor),
        ]
        del array, tensor
        holders = holders[order:] + holders[:order]
        while holders:
            last = holders.pop()
            if isinstance(last, torch.Tensor | np.ndarray):
                assert int(last.sum()) == 499500
            del last
            gc.collect(0)
        assert gone() is None


def test_deleters_run_on_any_thread() -> None:
    for _ in range(50):
        made = [ts.Tensor.zeros([1000], "float32").to_torch() for _ in range(4)]
        threads = [
            threading.Thread(target=lambda part: part.clear(), args=([tensor],)) for tensor in made
        ]
        del made
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_writes_are_shared_and_read_only_is_preserved() -> None:
    tensor = ts.Tensor.zeros([2, 3], ts.DType.float32())
    tensor.to_torch()[1, 2] = 7
    assert tensor.to_numpy()[1, 2] == 7
    tensor.to_numpy()[0, 0] = 5
    assert memoryview(tensor)[0, 0] == 5
    assert torch.from_dlpack(tensor.to_dlpack()).sum() == 12

    fixed = np.arange(3.0)
    fixed.flags.writeable = False
    tensor = ts.Tensor.from_dlpack(fixed)
    assert tensor.read_only
    assert memoryview(tensor).readonly
    assert not np.from_dlpack(tensor).flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        tensor.to_dlpack()
    copy = ts.Tensor.from_dlpack(tensor.__dlpack__(max_version=(1, 0), copy=True))
    assert not copy.read_only
    assert copy.to_numpy().ctypes.data != fixed.ctypes.data


def test_dlpack_requests_are_honoured_or_refused() -> None:
    tensor = ts.Tensor.zeros([4], "float32")
    assert tensor.__dlpack_device__() == (1, 0)
    assert "versioned" in repr(tensor.__dlpack__(max_version=(1, 0)))
    assert "versioned" not in repr(tensor.__dlpack__(max_version=(0, 8)))
    for refused in ({"stream": 1}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError):
            tensor.__dlpack__(**refused)
    capsule = tensor.to_dlpack()
    torch.from_dlpack(capsule)
    with pytest.raises(TypeError, match="not been consumed"):
        ts.Tensor.from_dlpack(capsule)
    for nothing in (3, "text", b"bytes", None):
        with pytest.raises(TypeError):
            ts.Tensor.from_dlpack(nothing)
    float8 = ts.Tensor.from_dlpack(torch.zeros(3).to(torch.float8_e4m3fn))
    half = ts.Tensor.from_dlpack(torch.zeros(3, dtype=torch.bfloat16))
    for unsupported in (float8, half):
        with pytest.raises(TypeError, match="to_torch"):
            unsupported.to_numpy()
    with pytest.raises(BufferError, match="format"):
        memoryview(half)
    across = ts.Tensor.from_dlpack(np.zeros((4, 4))[:, 1])
    assert bytes(memoryview(across)) == bytes(32)
    any_contiguous = ctypes.create_string_buffer(256)
    ask = ctypes.pythonapi.PyObject_GetBuffer
    ask.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
    with pytest.raises(BufferError, match="contiguous"):
        ask(across, any_contiguous, 0x98)  # PyBUF_ANY_CONTIGUOUS
    with pytest.raises(BufferError, match="contiguous"):
        across.tobytes()


def _says_if_on_the_host(status: ts.GpuStatus) -> contextlib.AbstractContextManager[object]:
    if status.is_available:
        return contextlib.nullcontext()
    return pytest.warns(ts.NotBuiltWarning, match="using host memory instead of GPU 0: cannot")


def test_a_fallback_to_the_host_is_logged_once_and_can_be_an_error() -> None:
    program = """
        import logging, warnings
        logging.basicConfig(format="logged %(name)s %(levelname)s", stream=__import__("sys").stdout)
        import tensorstream as ts
        absent = ts.GpuStatus.detect().device_count
        for _ in range(3):
            assert ts.TensorBuffer.try_allocate_gpu(8, absent).to_host() == bytes(8)
        warnings.simplefilter("error")
        try:
            ts.TensorMeta([2], "float32").allocate_buffer(absent)
        except ts.NotBuiltWarning:
            print("raised")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["logged tensorstream WARNING", "raised"]
    assert "using host memory instead of GPU" in done.stderr


def test_buffers_metadata_and_gpu_status() -> None:
    status = ts.GpuStatus.detect()
    assert status.is_available == (status.device_count > 0) == (status.kind == "Available")
    assert status.cuda_compiled == (status.kind != "NotCompiled")
    assert status.message() == str(status)
    meta = ts.TensorMeta([2, 3], ts.DType.float32())
    with _says_if_on_the_host(status):
        buffer = meta.allocate_buffer()
    assert (len(buffer), buffer.size, buffer.is_cpu or status.is_available) == (24, 24, True)
    buffer.copy_from(bytes(range(24)))
    assert buffer.to_host() == buffer.to_bytes() == buffer.to_cpu().to_bytes() == bytes(range(24))
    assert buffer.is_gpu != buffer.is_cpu
    assert ts.TensorBuffer.from_bytes(b"abc").to_bytes() == b"abc"
    with _says_if_on_the_host(status):
        assert ts.TensorBuffer.try_allocate_gpu(size=8, device_id=0).size == 8
    with pytest.raises(ts.ConfigurationError):
        buffer.copy_from(b"short")
    assert ts.TensorBuffer.cpu_zeros(5).to_host() == bytes(5)
    assert ts.PoolConfig.low_memory().pool_bytes < ts.PoolConfig.default().pool_bytes
    assert ts.PoolConfig(pool_bytes=1 << 20) != ts.PoolConfig()
    with pytest.raises(ValueError, match="min_block_bytes"):
        ts.PoolConfig(min_block_bytes=0)
    with pytest.raises(ts.ConfigurationError, match="cuda:N"):
        ts.Tensor.zeros([1], "float32", device="tpu")
    # A GPU that does not exist is not a lack of memory: a program that tries again with less
    # memory would never end.
    assert not issubclass(ts.DeviceUnavailableError, MemoryError)
    absent = status.device_count
    for call in (
        lambda: buffer.to_gpu(absent),
        lambda: ts.TensorBuffer.allocate_gpu(8, absent),
        lambda: ts.Tensor.zeros([1], "float32", device=f"cuda:{absent}"),
    ):
        with pytest.raises(ts.DeviceUnavailableError, match=r"GPU|CUDA"):
            call()
    with pytest.raises(ts.OutOfMemoryError):
        ts.TensorBuffer.cpu_zeros(1 << 60)
    with pytest.raises((ts.ConfigurationError, ts.ProtocolError)):
        ts.Tensor.zeros([1 << 62, 8], "float32")
    with pytest.raises(TypeError, match="invalid dtype"):
        ts.Tensor.zeros([1], "quaternion")
    assert (
        ts.DType.of(torch.float32)
        == ts.DType.of(np.float32)
        == ts.DType.of(np.dtype("float32"))
        == ts.DType.of("F32")
    )
    tensor = ts.Tensor.zeros([2, 3], ts.DType.float32(), name="w")
    assert repr(tensor) == 'Tensor("w", [2, 3], float32, cpu)'
    assert tensor.cuda_array_interface is None
    assert not hasattr(tensor, "__cuda_array_interface__")
