# SPDX-License-Identifier: MIT OR Apache-2.0
"""PyTorch's own table of operators (op_db) on the device ``ts``, against the CPU.

usage: opdb.py [--only NAME ...] [--samples 6] [--jobs 2] [--json] [--verbose]

For each entry its samples of one dtype (float32 if it has that, else the first that it has) are made on the device,
run there and on the CPU, and what they give is compared: forward, and backward for what is differentiable. A process
that crashes is counted, and another goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing as mp
import sys
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PASS, SKIP = "pass", "none"
#: Seconds that an entry may take.
LIMIT = 120


def _table() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def _dtype(info: Any) -> Any:
    import torch

    order = [torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool, torch.float16, torch.bfloat16]
    return next((dtype for dtype in order if dtype in info.dtypes), None)


def _to_host(value: Any, grad: bool = False) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        # As it lies in its storage: what is outside a view counts for some.
        whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
        host = whole.detach().cpu().as_strided(value.shape, value.stride(), value.storage_offset())
        return host.requires_grad_(value.requires_grad and grad)
    if isinstance(value, (list, tuple)):
        moved = [_to_host(item, grad) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if isinstance(value, dict):
        return {name: _to_host(item, grad) for name, item in value.items()}
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("ts")):
        return torch.device("cpu") if isinstance(value, torch.device) else "cpu"
    return value


def _leaves(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return []


#: What these give is not said by what they are given.
_UNDEFINED = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_permuted", "empty_strided")


def _compare(name: str, expected: Any, given: Any) -> None:
    import torch

    if isinstance(expected, torch.Tensor):
        assert isinstance(given, torch.Tensor), f"{type(given)}, where a tensor was expected"
        assert given.shape == expected.shape and given.dtype == expected.dtype, (
            f"{given.dtype} {tuple(given.shape)}, where {expected.dtype} {tuple(expected.shape)} was expected"
        )
        if name not in _UNDEFINED:
            torch.testing.assert_close(given.detach().cpu(), expected.detach(), equal_nan=True, check_stride=False)
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(given), f"{len(given)} results, where {len(expected)} were expected"
        for one, other in zip(expected, given, strict=True):
            _compare(name, one, other)
    elif isinstance(expected, dict):
        _compare(name, list(expected.values()), list(given.values()))
    elif isinstance(expected, float):
        assert given == expected or abs(given - expected) < 1e-5 or (math.isnan(given) and math.isnan(expected))
    elif isinstance(expected, torch.storage.UntypedStorage | torch.storage.TypedStorage):
        pass
    elif expected is not None and not isinstance(expected, torch.device):
        assert given == expected, f"{given}, where {expected} was expected"


def _samples(info: Any, device: Any, dtype: Any, grad: bool, most: int) -> list[Any]:
    samples = []
    for sample in info.sample_inputs(str(device), dtype, requires_grad=grad):
        samples.append(sample)
        if len(samples) == most:
            break
    return samples


def _forward(info: Any, device: Any, most: int) -> int:
    import torch

    dtype = _dtype(info)
    if dtype is None:
        raise NotImplementedError("it has no dtype on a CPU")
    count = 0
    for sample in _samples(info, device, dtype, False, most):
        there = (sample.input, sample.args, sample.kwargs)
        here = _to_host(there)
        torch.manual_seed(count)
        try:
            expected = info.op(here[0], *here[1], **here[2])
        except Exception:
            continue
        torch.manual_seed(count)
        given = info.op(there[0], *there[1], **there[2])
        if sample.kwargs.get("device") != "cpu":
            assert all(leaf.device.type == "ts" for leaf in _leaves(given)), "the result is not on the device"
        _compare(info.name, expected, given)
        count += 1
    return count


def _backward(info: Any, device: Any, most: int) -> int:
    import torch

    dtype = _dtype(info)
    if dtype is None or dtype not in info.supported_backward_dtypes(torch.device("cpu").type):
        return 0
    count = 0
    for sample in _samples(info, device, dtype, True, most):
        there = (sample.input, sample.args, sample.kwargs)
        here = _to_host(there, True)
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
                found = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True) if outputs else ()
            except Exception:
                if values is here:
                    break
                raise
            gradients.append(found)
        if len(gradients) == 2 and gradients[0]:
            expected, given = gradients
            for one, other in zip(expected, given, strict=True):
                _compare(info.name, one, other)
            count += 1
    return count


def _attempt(run: Any, *arguments: Any) -> tuple[str, str]:
    try:
        count = run(*arguments)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()
        return "fail", "\n".join(text[:4]) + "\n@@" + "".join(traceback.format_tb(error.__traceback__)[-3:])
    return (PASS if count else SKIP), ""


def _worker(pipe: Any, most: int) -> None:
    """Tries entries whose numbers come, until none does."""
    warnings.simplefilter("ignore")
    import torch
    from tensorstream.remote import RemoteMachine

    torch.set_num_threads(1)
    table = _table()
    with RemoteMachine("local", threads=1) as machine:
        device = machine.device()
        while (number := pipe.recv()) is not None:
            info = table[number]
            forward = _attempt(_forward, info, device, most)
            backward = _attempt(_backward, info, device, most) if info.supports_autograd else (SKIP, "")
            try:
                machine.synchronize()
            except RuntimeError as error:
                forward = "fail", f"later: {error}"
            pipe.send((forward, backward))


class _Worker:
    """A process that tries entries, and another when that has crashed."""

    def __init__(self, most: int) -> None:
        self._context, self._most = mp.get_context("spawn"), most
        self._process: Any = None

    def attempt(self, number: int) -> tuple[Any, Any]:
        if self._process is None:
            self._pipe, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_worker, args=(theirs, self._most))
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(number)
            if self._pipe.poll(LIMIT):
                return self._pipe.recv()
            why = f"nothing came in {LIMIT} s"
        except (EOFError, OSError):
            why = "the process ended"
        self._process.kill()
        self._process.join()
        why, self._process = f"{why}: exit code {self._process.exitcode}", None
        return ("crash", why), (SKIP, "")

    def end(self) -> None:
        if self._process is not None:
            self._pipe.send(None)
            self._process.join(20)


def _sweep(most: int, jobs: int, wanted: list[int]) -> dict[int, tuple[Any, Any]]:
    left, done = iter(wanted), {}

    def work() -> None:
        worker = _Worker(most)
        for number in left:
            done[number] = worker.attempt(number)
        worker.end()

    with ThreadPoolExecutor(jobs) as pool:
        for job in [pool.submit(work) for _ in range(jobs)]:
            job.result()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--samples", type=int, default=6, help="of each entry")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    table = _table()
    names = [info.formatted_name for info in table]
    wanted = [
        at
        for at, info in enumerate(table)
        if not options.only or info.name in options.only or names[at] in options.only
    ]
    done = _sweep(options.samples, options.jobs, wanted)
    forward = [at for at in wanted if done[at][0][0] == PASS]
    crashed = [at for at in wanted if done[at][0][0] == "crash"]
    tried = [at for at in wanted if done[at][1][0] != SKIP]
    backward = [at for at in tried if done[at][1][0] == PASS]
    if options.json:
        print(json.dumps({names[at]: copy.copy(done[at]) for at in wanted}))
        return 0
    for at in wanted:
        for which, (how, why) in zip(("forward", "backward"), done[at], strict=True):
            if how != PASS and (which, how) != ("backward", SKIP):
                short, _, trace = why.partition("\n@@")
                first = short if options.verbose else short.partition("\n")[0]
                print(f"{names[at]} ({which}): {how}: {first}")
                if options.verbose:
                    print(trace)
    rate = 100 * len(backward) / max(len(tried), 1)
    print(
        f"forward: {len(forward)} of {len(wanted)}; backward: {len(backward)} of {len(tried)} ({rate:.1f}%); "
        f"crashes: {len(crashed)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
