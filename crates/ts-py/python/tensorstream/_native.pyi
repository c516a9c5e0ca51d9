# SPDX-License-Identifier: MIT OR Apache-2.0
from os import PathLike
from typing import Any, TypeAlias, final

__all__ = [
    "Checkpoint",
    "Engine",
    "Lease",
    "Pass",
    "__version__",
    "available_memory",
    "backends",
    "parse_bytes",
    "plan",
]

__version__: str

_Part: TypeAlias = tuple[int, int, int]
_TensorSpec: TypeAlias = tuple[str, str, list[int], list[_Part], int | None]

def parse_bytes(text: str) -> int: ...
def available_memory() -> int | None: ...
def backends() -> list[str]: ...
def plan(checkpoint: Checkpoint, *, budget: int, max_passes: int = 1) -> dict[str, Any]: ...

@final
class Checkpoint:
    def __new__(cls, path: str | PathLike[str]) -> Checkpoint: ...
    def names(self) -> list[str]: ...
    def entry(self, name: str) -> tuple[str, list[int], list[_Part]]: ...
    def files(self) -> list[tuple[str, int, dict[str, str]]]: ...

@final
class Engine:
    def __new__(
        cls,
        checkpoint: Checkpoint,
        units: list[tuple[str, list[_TensorSpec]]],
        *,
        budget: int,
        max_passes: int = 1,
        backend: str | None = None,
        in_flight: int | None = None,
    ) -> Engine: ...
    def begin_pass(self) -> Pass: ...
    def replan(self) -> bool: ...
    def acquire(self, unit: int, in_pass: Pass | None = None) -> Lease: ...
    def stats(self) -> dict[str, Any]: ...

@final
class Pass:
    def end(self) -> bool: ...

@final
class Lease:
    @property
    def resident(self) -> bool: ...
    def tensors(self) -> list[object]: ...
    def release(self) -> None: ...
    def discard(self) -> None: ...
