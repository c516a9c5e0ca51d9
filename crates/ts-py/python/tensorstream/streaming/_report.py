# SPDX-License-Identifier: MIT OR Apache-2.0
"""Tables for terminals and notebooks."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def mib(count: float) -> str:
    """Formats a number of bytes as MiB."""
    return f"{count / 2**20:.1f}"


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table with aligned columns. All but the last are aligned at the right."""
    all_rows = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*all_rows, strict=True)]
    lines = (
        "   ".join(
            [*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]
        )
        for row in all_rows
    )
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns an HTML table. The contents of cells are escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', header)}</thead><tbody>{body}</tbody></table>"


def html_folded(summary: str, body: str) -> str:
    """Returns HTML that a click on the summary unfolds."""
    return f"<details><summary>{html.escape(summary)}</summary>{body}</details>"


def html_text(text: str) -> str:
    """Returns preformatted text as HTML."""
    return f"<pre>{html.escape(text)}</pre>"
