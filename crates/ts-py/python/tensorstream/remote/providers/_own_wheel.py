# SPDX-License-Identifier: MIT OR Apache-2.0
"""Packs the installed package into a wheel, to install it on another computer."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
import zipfile
from pathlib import Path

from ...errors import ConfigurationError

#: The files of the metadata that an installer adds or replaces.
_OF_INSTALLATION = {"INSTALLER", "RECORD", "REQUESTED", "direct_url.json"}


def _entry(name: str) -> zipfile.ZipInfo:
    """Returns an entry that is the same in each wheel of the same files."""
    return zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))


def own_wheel(directory: Path) -> Path:
    """Writes a wheel of the package that this process uses to a directory, and returns it.

    Raises:
        ConfigurationError: The package was not installed from a wheel for Linux on x86-64.
    """
    try:
        installed = importlib.metadata.distribution("tensorstream")
        tag = (installed.read_text("WHEEL") or "").partition("\nTag: ")[2].partition("\n")[0]
    except importlib.metadata.PackageNotFoundError:
        tag = ""
    if re.search(r"-(many)?linux_.*x86_64$|-manylinux\d+_x86_64$", tag) is None:
        raise ConfigurationError(
            "there is no wheel of TensorStream for Linux on x86-64 to upload: "
            f"this package was installed {f'for {tag}' if tag else 'without a wheel'}; "
            "give the path of one as `wheel`"
        )
    info = f"tensorstream-{installed.version}.dist-info"
    package = Path(__file__).resolve().parents[2]
    contents = {
        f"tensorstream/{path.relative_to(package).as_posix()}": path
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    for entry in installed.files or ():
        if info in entry.parts[:1] and entry.name not in _OF_INSTALLATION:
            contents[entry.as_posix()] = Path(str(installed.locate_file(entry)))
    wheel = directory / f"tensorstream-{installed.version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        record = ""
        for name, path in contents.items():
            data = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(data)}\n"
            archive.writestr(_entry(name), data, zipfile.ZIP_DEFLATED, 1)
        archive.writestr(_entry(f"{info}/RECORD"), f"{record}{info}/RECORD,,\n")
    return wheel
