# SPDX-License-Identifier: MIT OR Apache-2.0
"""Compares operators and modules of PyTorch on the device ``ts`` with the CPU, bit for bit.

usage: opdb.py [--only NAME ...] [--modules] [--every] [--relaid] [--served] [--device cpu]
[--samples 6] [--jobs 2] [--json] [--verbose]

The entries are those of PyTorch's own test tables: op_db for operators and module_db for modules.
Each sample of an entry runs on the device and on the CPU. The outputs of both must have the same
bits. If the entry is differentiable, the gradients must have the same bits too.

- Samples are created on the device. With --modules or --every, they are created on the CPU.
- Without --every, samples have one dtype: float32 if the entry supports it, else another one.
- Samples that fail on the CPU do not count.
- If a process crashes or times out, its entry counts as a crash, and a new process continues.

--only: the entries to compare, by name. The default is all entries.
--modules: compare modules instead of operators, in training mode and in evaluation mode.
--every: compare seven dtypes, and every set of up to four inputs that require gradients.
--relaid: compare inputs whose elements lie in memory in other orders, such as channels_last, and
compare the strides of results and gradients too.
--served: use ``tensorstream serve``, whose sessions are sandboxed, instead of a local machine.
--device: the device that ``--served`` serves and that results are compared with, such as cuda.
--samples: the maximum number of samples of each operator.
--jobs: the number of processes that compare entries at the same time.
--json: print all outcomes as JSON.
--verbose: print messages in full, with tracebacks.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import math
import multiprocessing as mp
import os
import sys
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from servers import served

PASS, SKIP = "pass", "none"
#: The number of seconds that an entry may take.
LIMIT = 120
#: The dtypes that --every compares.
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "bool", "complex64")
#: The largest number of inputs that require gradients in a call, with --every.
MOST_GRADS = 4


def _table(modules: bool) -> list[Any]:
    if modules:
        from torch.testing._internal.common_modules import module_db

        return list(module_db)
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def _dtype(info: Any) -> Any:
    """Returns the dtype for the samples of an operator.

    Returns None if the operator supports none of the tested dtypes on the CPU.
    """
    import torch

    order = [
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.int64,
        torch.bool,
        torch.float16,
        torch.bfloat16,
    ]
    return next((dtype for dtype in order if dtype in info.dtypes), None)


#: The environment variable with the device that results are compared with.
_REFERENCE = "OPDB_REFERENCE"


def _reference() -> str:
    return os.environ.get(_REFERENCE, "cpu")


def _to_reference(value: Any, grad: bool = False) -> Any:
    """Copies all tensors in nested containers to the reference. Replaces devices ``ts`` with it."""
    import torch

    if isinstance(value, torch.Tensor):
        # Copies the whole storage, because some operators read outside the view.
        whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        there = whole.detach().cpu().to(_reference())
        host = there.as_strided(value.shape, value.stride(), value.storage_offset())
        return host.requires_grad_(value.requires_grad and grad)
    if isinstance(value, (list, tuple)):
        moved = [_to_reference(item, grad) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if isinstance(value, dict):
        return {name: _to_reference(item, grad) for name, item in value.items()}
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("ts")):
        return torch.device(_reference()) if isinstance(value, torch.device) else _reference()
    return value


def _leaves(value: Any) -> list[Any]:
    """Returns all tensors in nested containers."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return []


#: Operators whose results have undefined contents.
_UNDEFINED = (
    "empty",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
    "empty_strided",
)


def _compare(name: str, expected: Any, actual: Any) -> None:
    """Raises AssertionError unless two results of the operator ``name`` are the same.

    Numbers that are not in tensors may differ by less than 1e-5. Does not compare undefined values.
    """
    import torch

    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"expected a tensor, got {type(actual)}"
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, (
            f"expected {expected.dtype} {tuple(expected.shape)}, got {actual.dtype} "
            f"{tuple(actual.shape)}"
        )
        if name not in _UNDEFINED:
            actual, expected = actual.detach().cpu(), expected.detach().cpu()
            if not _same(expected, actual):
                torch.testing.assert_close(actual, expected, equal_nan=True, check_stride=False)
                raise AssertionError("the values are close, but rounded differently")
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(actual), f"expected {len(expected)} results, got {len(actual)}"
        for one, other in zip(expected, actual, strict=True):
            _compare(name, one, other)
    elif isinstance(expected, dict):
        _compare(name, list(expected.values()), list(actual.values()))
    elif isinstance(expected, float):
        assert (
            actual == expected
            or abs(actual - expected) < 1e-5
            or (math.isnan(actual) and math.isnan(expected))
        )
    elif isinstance(expected, torch.storage.UntypedStorage | torch.storage.TypedStorage):
        pass
    elif expected is not None and not isinstance(expected, torch.device):
        assert actual == expected, f"expected {expected}, got {actual}"


def _same(one: Any, other: Any) -> bool:
    """Returns whether two tensors have the same bits. The payloads of NaNs may differ."""
    import torch

    if one.is_quantized or one.layout != torch.strided:
        return torch.equal(one.to_dense() if not one.is_quantized else one, other)
    if one.is_complex():
        one, other = (
            torch.view_as_real(one.resolve_conj()),
            torch.view_as_real(other.resolve_conj()),
        )
    if one.is_floating_point():
        both = one.isnan() & other.isnan()
        one, other = one.masked_fill(both, 0), other.masked_fill(both, 0)
        # torch.equal considers 0 and -0 equal.
        return torch.equal(one.signbit(), other.signbit()) and torch.equal(one, other)
    return torch.equal(one, other)


def _samples(info: Any, device: Any, dtype: Any, grad: bool, most: int) -> list[Any]:
    samples = []
    for sample in info.sample_inputs(str(device), dtype, requires_grad=grad):
        samples.append(sample)
        if len(samples) == most:
            break
    return samples


def _forward(info: Any, device: Any, most: int) -> int:
    """Compares the outputs of up to ``most`` samples. Returns the number of compared samples."""
    import torch

    dtype = _dtype(info)
    if dtype is None:
        raise NotImplementedError("the operator supports none of the tested dtypes on the CPU")
    count = 0
    for sample in _samples(info, device, dtype, False, most):
        there = (sample.input, sample.args, sample.kwargs)
        here = _to_reference(there)
        torch.manual_seed(count)
        try:
            expected = info.op(here[0], *here[1], **here[2])
        except Exception:
            continue
        torch.manual_seed(count)
        actual = info.op(there[0], *there[1], **there[2])
        if sample.kwargs.get("device") != "cpu":
            assert all(leaf.device.type == "ts" for leaf in _leaves(actual)), (
                "the result is not on the device"
            )
        _compare(info.name, expected, actual)
        count += 1
    return count


def _backward(info: Any, device: Any, most: int) -> int:
    """Compares the gradients of up to ``most`` samples. Returns the number of compared samples."""
    import torch

    dtype = _dtype(info)
    if dtype is None or dtype not in info.supported_backward_dtypes(_reference()):
        return 0
    count = 0
    for sample in _samples(info, device, dtype, True, most):
        there = (sample.input, sample.args, sample.kwargs)
        here = _to_reference(there, True)
        gradients = []
        for values in (here, there):
            torch.manual_seed(count)
            try:
                result = info.op(values[0], *values[1], **values[2])
                if sample.output_process_fn_grad is not None:
                    result = sample.output_process_fn_grad(result)
                outputs = [leaf for leaf in _leaves(result) if leaf.requires_grad]
                inputs = [leaf for leaf in _leaves(values) if leaf.requires_grad]
                torch.manual_seed(7)
                seeds = [torch.randn(leaf.shape, dtype=leaf.dtype) for leaf in outputs]
                seeds = [seed.to(leaf.device) for seed, leaf in zip(seeds, outputs, strict=True)]
                found = (
                    torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
                    if outputs
                    else ()
                )
            except Exception:
                if values is here:
                    break
                raise
            gradients.append(found)
        if len(gradients) == 2 and gradients[0]:
            expected, actual = gradients
            for one, other in zip(expected, actual, strict=True):
                _compare(info.name, one, other)
            count += 1
    return count


#: Operators whose index arguments must be on the CPU, even if the input is on another device.
_INDICES_ON_HOST = ("tensor_split",)


def _moved(value: Any, to: Any, name: str = "") -> Any:
    """Copies arguments to a device. Copies a tensor that occurs twice only once."""
    import torch
    from torch.utils._pytree import tree_map

    known: dict[int, Any] = {}

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if name in _INDICES_ON_HOST and item is not value[0]:
                return item
            if id(item) not in known:
                known[id(item)] = item.detach().clone().to(to).requires_grad_(item.requires_grad)
            return known[id(item)]
        if isinstance(item, torch.device) or item == "cpu":
            return to
        return item

    return tree_map(move, value)


def _gradients(run: Any, values: Any) -> tuple[Any, Any]:
    """Returns the result of a call, and the gradients of its inputs.

    The gradients of the outputs are random numbers with a fixed seed.
    """
    import torch

    torch.manual_seed(3)
    result = run(*values)
    outputs = [leaf for leaf in _leaves(result) if leaf.requires_grad]
    inputs = [leaf for leaf in _leaves(values) if leaf.requires_grad]
    if not outputs or not inputs:
        return result, ()
    torch.manual_seed(7)
    seeds = [torch.randn(leaf.shape, dtype=leaf.dtype).to(leaf.device) for leaf in outputs]
    return result, torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)


def _both(name: str, run: Any, here: Any, device: Any) -> int:
    """Runs a call on the CPU and on the device, and compares results and gradients.

    Returns 0 if the call fails on the CPU, else 1.
    """
    there = _moved(here, device, name)
    try:
        expected = _gradients(run, here)
    except Exception:
        return 0
    _compare(name, expected, _gradients(run, there))
    return 1


def _every(info: Any, device: Any, most: int) -> int:
    """Compares every dtype in `DTYPES`, with every set of up to `MOST_GRADS` differentiable inputs.

    Returns the number of compared calls.
    """
    import torch
    from torch.utils._pytree import tree_map

    count, failed = 0, []
    for dtype_name in DTYPES:
        dtype = getattr(torch, dtype_name)
        if dtype not in info.dtypes:
            continue
        differentiable = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
        for sample in _samples(info, "cpu", dtype, False, most):
            values = (sample.input, tuple(sample.args), dict(sample.kwargs))
            leaves = list(
                {
                    id(leaf): leaf
                    for leaf in _leaves(values)
                    if leaf.dtype.is_floating_point or leaf.is_complex()
                }
            )
            sets: Any = [()]
            if differentiable:
                most_of = min(len(leaves), MOST_GRADS)
                sets = itertools.chain.from_iterable(
                    itertools.combinations(leaves, n) for n in range(most_of + 1)
                )
            for chosen in sets:

                def with_grads(item: Any, chosen: Any = chosen) -> Any:
                    return (
                        item.detach().clone().requires_grad_(id(item) in chosen)
                        if isinstance(item, torch.Tensor)
                        else item
                    )

                here = tree_map(with_grads, values)
                try:
                    count += _both(info.name, lambda i, a, k: info.op(i, *a, **k), here, device)
                except Exception as error:
                    which = [leaves.index(one) for one in chosen]
                    failed.append(
                        f"{dtype_name}, gradients of inputs {which}: {type(error).__name__}: "
                        f"{str(error).splitlines()[0]}"
                    )
    if failed:
        raise AssertionError(
            f"{len(failed)} of {count + len(failed)} calls failed: "
            + "\n".join(dict.fromkeys(failed))
        )
    return count


#: The orders of elements in memory of --relaid.
LAYOUTS = ("channels_last", "transposed", "reversed", "sliced", "expanded")


def _relaid(tensor: Any, layout: str) -> Any:
    """Returns a tensor with the same shape whose elements lie in memory in another order.

    An expanded tensor has the elements of the first row in all rows. Returns tensors to which the
    layout does not apply as they are.
    """
    import torch

    if tensor.dim() < 2 or tensor.layout != torch.strided or not tensor.numel():
        return tensor
    if layout == "channels_last":
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        format_of = formats.get(tensor.dim(), torch.contiguous_format)
        return tensor.contiguous(memory_format=format_of)
    if layout == "transposed":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "reversed":
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    if layout == "sliced":
        return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]
    return tensor[:1].expand(tensor.shape)


def _with_strides(value: Any, to: Any, name: str) -> Any:
    """Copies arguments to a device, with the same strides and offsets."""
    import torch
    from torch.utils._pytree import tree_map

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if name in _INDICES_ON_HOST and item is not value[0]:
                return item
            whole = torch.empty(0, dtype=item.dtype).set_(item.untyped_storage()).detach()
            view = whole.to(to).as_strided(item.shape, item.stride(), item.storage_offset())
            return view.requires_grad_(item.requires_grad)
        return to if isinstance(item, torch.device) or item == "cpu" else item

    return tree_map(move, value)


def _strides(value: Any) -> Any:
    """Returns the strides of all tensors that matter: those of dimensions with several elements."""
    return [
        tuple(step for n, step in zip(leaf.shape, leaf.stride(), strict=True) if n > 1)
        for leaf in _leaves(value)
        if leaf.numel()
    ]


def _layouts(info: Any, device: Any, most: int) -> int:
    """Compares results, gradients and their strides for each of `LAYOUTS`.

    Returns the number of compared calls.
    """
    import torch
    from torch.utils._pytree import tree_map

    dtype, count, failed = _dtype(info), 0, []
    if dtype is None:
        raise NotImplementedError("the operator supports none of the tested dtypes on the CPU")
    grad = info.supports_autograd and dtype in info.supported_backward_dtypes("cpu")
    for sample, layout in itertools.product(_samples(info, "cpu", dtype, False, most), LAYOUTS):

        def change(item: Any, layout: str = layout) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            differentiable = grad and (item.dtype.is_floating_point or item.is_complex())
            return _relaid(item.detach(), layout).requires_grad_(differentiable)

        here = tree_map(change, (sample.input, tuple(sample.args), dict(sample.kwargs)))
        there = _with_strides(here, device, info.name)

        def run(values: Any) -> Any:
            return _gradients(lambda i, a, k: info.op(i, *a, **k), values)

        try:
            expected = run(here)
        except Exception:
            continue
        try:
            actual = run(there)
            _compare(info.name, expected, actual)
            assert _strides(actual) == _strides(expected), (
                f"expected strides {_strides(expected)}, got {_strides(actual)}"
            )
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            failed.append(f"{layout}: {type(error).__name__}: {lines[0]}")
        count += 1
    if failed:
        raise AssertionError(
            f"{len(failed)} of {count} calls failed: " + "\n".join(dict.fromkeys(failed))
        )
    return count


def _module(info: Any, device: Any, training: bool) -> int:
    """Compares results, gradients and buffers of a module. Returns the number of compared calls."""
    import torch

    dtype = torch.float32 if torch.float32 in info.dtypes else info.dtypes[0]
    count = 0
    for sample in info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=True, training=training
    ):
        if sample.forward_input is None:
            continue
        torch.manual_seed(1)
        made, forward = sample.constructor_input, sample.forward_input
        try:
            here = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
        except Exception:
            continue
        there = copy.deepcopy(here).to(device)

        def step(module: Any, values: Any) -> Any:
            torch.manual_seed(3)
            result = module(*values[0], **values[1])
            outputs = [leaf for leaf in _leaves(result) if leaf.requires_grad]
            inputs = [
                leaf for leaf in (*_leaves(values), *module.parameters()) if leaf.requires_grad
            ]
            if not outputs:
                return result, ()
            torch.manual_seed(7)
            seeds = [torch.randn(leaf.shape, dtype=leaf.dtype).to(leaf.device) for leaf in outputs]
            found = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
            return result, found, list(module.buffers())

        values = (tuple(forward.args), dict(forward.kwargs))
        moved = _moved(values, device)
        try:
            expected = step(here, values)
        except Exception:
            continue
        _compare(info.name, expected, step(there, moved))
        count += 1
    return count


def _training(info: Any, device: Any, most: int) -> int:
    return _module(info, device, True)


def _evaluation(info: Any, device: Any, most: int) -> int:
    return _module(info, device, False)


def _attempt(run: Any, *arguments: Any) -> tuple[str, str]:
    """Runs a comparison. Returns its outcome and, if it failed, the error and its traceback."""
    try:
        count = run(*arguments)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()
        return "fail", "\n".join(text[:4]) + "\n@@" + "".join(
            traceback.format_tb(error.__traceback__)[-3:]
        )
    return (PASS if count else SKIP), ""


#: The comparisons of an entry, by mode and by name.
_PARTS = {
    "operators": {"forward": _forward, "backward": _backward},
    "every": {"every dtype": _every},
    "relaid": {"other layouts": _layouts},
    "modules": {"training": _training, "evaluation": _evaluation},
}


def _worker(pipe: Any, most: int, what: str, address: str | None) -> None:
    """Receives numbers of entries from ``pipe``, and sends the outcomes, until None arrives."""
    warnings.simplefilter("ignore")
    import torch
    from tensorstream.remote import RemoteMachine

    torch.set_num_threads(1)
    table = _table(what == "modules")
    with RemoteMachine("tcp", address) if address else RemoteMachine("local", threads=1) as machine:
        device = machine.device()
        while (number := pipe.recv()) is not None:
            info = table[number]
            done = {}
            for part, run in _PARTS[what].items():
                differentiable = part != "backward" or info.supports_autograd
                done[part] = _attempt(run, info, device, most) if differentiable else (SKIP, "")
                try:
                    machine.synchronize()
                except RuntimeError as error:
                    done[part] = "fail", f"asynchronous error: {error}"
            pipe.send(done)


class _Worker:
    """A process that compares entries. If it crashes, the next entry starts a new process."""

    def __init__(self, most: int, what: str, address: str | None) -> None:
        self._context, self._arguments = mp.get_context("spawn"), (most, what, address)
        self._what = what
        self._process: Any = None

    def attempt(self, number: int) -> dict[str, tuple[str, str]]:
        if self._process is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_worker, args=(theirs, *self._arguments))
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(number)
            if self._pipe.poll(LIMIT):
                done: dict[str, tuple[str, str]] = self._pipe.recv()
                return done
            why = f"timed out after {LIMIT} s"
        except (EOFError, OSError):
            why = "the process exited"
        self._process.kill()
        self._process.join()
        why, self._process = f"{why}: exit code {self._process.exitcode}", None
        return dict.fromkeys(_PARTS[self._what], ("crash", why))

    def end(self) -> None:
        if self._process is not None:
            self._pipe.send(None)
            self._process.join(20)


def _sweep(
    most: int, jobs: int, wanted: list[int], what: str, address: str | None
) -> dict[int, dict[str, tuple[str, str]]]:
    left, done = iter(wanted), {}

    def work() -> None:
        worker = _Worker(most, what, address)
        for number in left:
            done[number] = worker.attempt(number)
        worker.end()

    with ThreadPoolExecutor(jobs) as pool:
        for job in [pool.submit(work) for _ in range(jobs)]:
            job.result()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument(
        "--samples", type=int, default=6, help="maximum number of samples of each operator"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--modules", action="store_true")
    parser.add_argument(
        "--every",
        action="store_true",
        help="compare seven dtypes, and every set of up to four inputs that require gradients",
    )
    parser.add_argument(
        "--relaid", action="store_true", help="compare inputs with other layouts, and strides"
    )
    parser.add_argument(
        "--served", action="store_true", help="use `tensorstream serve`, not a local machine"
    )
    parser.add_argument("--device", default="cpu", help="the device to serve and to compare with")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    chosen = [name for name in ("modules", "every", "relaid") if getattr(options, name)]
    what = chosen[0] if chosen else "operators"
    table = _table(options.modules)
    names = [info.formatted_name for info in table]
    wanted = [
        at
        for at, info in enumerate(table)
        if not options.only or info.name in options.only or names[at] in options.only
    ]
    if len(chosen) > 1:
        parser.error("--modules, --every and --relaid exclude each other")
    if options.device != "cpu" and (not options.served or chosen):
        parser.error("--device needs --served, without --modules, --every and --relaid")
    os.environ[_REFERENCE] = options.device
    server = served("--device", options.device) if options.served else contextlib.nullcontext()
    with server as address:
        done = _sweep(options.samples, options.jobs, wanted, what, address)
    if options.json:
        print(json.dumps({names[at]: done[at] for at in wanted}))
        return 0
    for at in wanted:
        for part, (how, why) in done[at].items():
            if how not in (PASS, SKIP):
                short, _, trace = why.partition("\n@@")
                print(
                    f"{names[at]} ({part}): {how}: "
                    f"{short if options.verbose else short.partition(chr(10))[0]}"
                )
                if options.verbose:
                    print(trace)
    for part in _PARTS[what]:
        tried = [done[at][part][0] for at in wanted if done[at][part][0] != SKIP]
        print(f"{part}: {tried.count(PASS)} of {len(tried)} equal; crashes: {tried.count('crash')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
