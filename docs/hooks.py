# SPDX-License-Identifier: MIT OR Apache-2.0
"""Pages of the site that live elsewhere in the repository, or are generated."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

#: Pages of the site, by the file of the repository that each shows.
ELSEWHERE = {
    "ARCHITECTURE.md": "contributing/architecture.md",
    "CHANGELOG.md": "contributing/changelog.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "FORMAT.md": "reference/format.md",
    "PROTOCOL.md": "reference/protocol.md",
    "SECURITY.md": "remote/security.md",
    "benches/RESULTS.md": "contributing/benchmarks/index.md",
    **{
        f"benches/results/{path.name}": f"contributing/benchmarks/{path.name}"
        for path in sorted((ROOT / "benches" / "results").glob("*.md"))
    },
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_linked(text, source, page)))
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to files of the repository to their pages."""
    path = page.file.src_uri
    if page.file.generated_by:
        return markdown
    return _linked(markdown, posixpath.join("docs", path), path)


def _linked(text: str, source: str, page: str) -> str:
    """Rewrites the relative links of a file of the repository for a page of the site."""

    def rewrite(link: re.Match[str]) -> str:
        label, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path.startswith("docs/") or path in ELSEWHERE:
            goal = ELSEWHERE.get(path) or path.removeprefix("docs/")
            return f"[{label}]({posixpath.relpath(goal, posixpath.dirname(page))}{anchor})"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{source} links to {target}, which does not exist")
        # The site has no page for it.
        return f"`{path}`" if label.strip("`") in (path, target) else f"{label} (`{path}`)"

    return re.sub(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)", rewrite, text)


def command_line() -> str:
    """The page of the command line: the help of each command."""
    program = [str(Path(sys.executable).with_name("tensorstream"))]
    commands = re.findall(r"^  ([a-z-]+) ", _help(program), re.MULTILINE)
    parts = ["# Command line\n\nThe help of each command.\n", f"```text\n{_help(program)}```\n"]
    for command in (name for name in commands if name != "help"):
        parts.append(f"## {command}\n\n```text\n{_help([*program, command])}```\n")
    return "\n".join(parts)


def _help(command: list[str]) -> str:
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()) + "\n"
