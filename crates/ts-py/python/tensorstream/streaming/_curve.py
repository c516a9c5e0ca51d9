# SPDX-License-Identifier: MIT OR Apache-2.0
"""Predictions for other budgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import invalid, parse_budget
from ._report import html_table, mib, text_table

_HEADER = ("budget MiB", "s a pass", "reads MiB", "limited by")


@dataclass(frozen=True)
class CurvePoint:
    """The prediction for one budget.

    Attributes:
        budget_bytes: The memory for weights, in bytes.
        predicted_pass_s: The predicted time of each forward pass after the first, in seconds.
        streamed_bytes_per_pass: The bytes that each of these passes reads.
        bottleneck: The resource that limits the speed: "storage", "decoding" or "compute".

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a.weight": torch.zeros(1000), "b.weight": torch.zeros(500)}, "a.ts")
        >>> curve = ts.plan("a.ts", budget="1MiB").curve()
        >>> curve[-1].streamed_bytes_per_pass
        0
    """

    budget_bytes: int
    predicted_pass_s: float
    streamed_bytes_per_pass: int
    bottleneck: str


class Curve(Sequence[CurvePoint]):
    """Predictions for several budgets, from the smallest to the largest.

    ``str()`` returns a table, and notebooks show one.

    Examples:
        >>> import tensorstream as ts, torch
        >>> ts.save_file({"a.weight": torch.zeros(1000), "b.weight": torch.zeros(500)}, "a.ts")
        >>> curve = ts.plan("a.ts", budget="1MiB").curve(["64KiB", "1MiB"])
        >>> [point.budget_bytes for point in curve]
        [65536, 1048576]
    """

    def __init__(self, points: Iterable[dict[str, Any]]) -> None:
        """Makes points of dictionaries with their attributes."""
        all_points = (CurvePoint(**point) for point in points)
        self._points = tuple(sorted(all_points, key=lambda point: point.budget_bytes))

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: Any) -> Any:
        return self._points[index]

    def __iter__(self) -> Iterator[CurvePoint]:
        return iter(self._points)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Curve) and self._points == other._points

    def __hash__(self) -> int:
        return hash(self._points)

    def __repr__(self) -> str:
        return f"Curve({len(self)} points)"

    def __str__(self) -> str:
        return text_table(_HEADER, self._rows())

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows())

    def _rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                mib(point.budget_bytes),
                f"{point.predicted_pass_s:.4f}",
                mib(point.streamed_bytes_per_pass),
                point.bottleneck,
            )
            for point in self._points
        ]


def budgets_in_bytes(budgets: Iterable[int | str]) -> list[int]:
    """Returns these budgets in bytes.

    Raises:
        ConfigurationError: A budget is not a size.
    """
    sizes = []
    for budget in budgets:
        size = parse_budget(budget)
        if not isinstance(size, int):
            raise invalid("budget", budget, "a size, such as 600MiB, because a curve has no shares")
        sizes.append(size)
    return sizes
