# SPDX-License-Identifier: MIT OR Apache-2.0
"""Providers of machines: they start servers, and know where these are.

``RemoteMachine`` finds a provider by its name. Other packages add providers with entry points in
the group ``tensorstream.providers``. See ``Provider``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ...errors import ConfigurationError
from ._base import Provider, Request, Server
from ._modal import ModalProvider
from ._ray import RayProvider
from ._ssh import SshProvider
from ._tcp import TcpProvider
from ._this_computer import LocalProvider, MockProvider

__all__ = [
    "LocalProvider",
    "MockProvider",
    "ModalProvider",
    "Provider",
    "RayProvider",
    "Request",
    "Server",
    "SshProvider",
    "TcpProvider",
    "available",
    "provider",
]

_BUILTIN: dict[str, type[Provider]] = {
    each.name: each
    for each in (LocalProvider, MockProvider, ModalProvider, RayProvider, SshProvider, TcpProvider)
}


def provider(name: str, /, *arguments: Any, **options: Any) -> Provider:
    """Creates the provider with this name, with arguments for its class.

    Options that are ``None`` have their defaults.

    Raises:
        ConfigurationError: There is no such provider, it cannot be used on this computer, or an
            option is invalid.

    Examples:
        >>> from tensorstream.remote.providers import provider
        >>> provider("tcp", address="gpu.example:7470").name
        'tcp'
    """
    found = _class_of(name)
    reason = found.probe()
    if reason is not None:
        raise ConfigurationError(f"cannot use the provider {name!r}: {reason}")
    options = {key: value for key, value in options.items() if value is not None}
    try:
        inspect.signature(found).bind(*arguments, **options)
    except TypeError as error:
        raise ConfigurationError(f"invalid options of the provider {name!r}: {error}") from None
    return found(*arguments, **options)


def available() -> dict[str, str | None]:
    """Returns all providers by name, with the reason if this computer cannot use one.

    Examples:
        >>> from tensorstream.remote.providers import available
        >>> available()["local"] is None
        True
    """
    return {name: _probed(name) for name in sorted({*_BUILTIN, *_entry_points()})}


def _probed(name: str) -> str | None:
    try:
        return _class_of(name).probe()
    except Exception as error:  # also from the code of other packages
        return str(error)


def _entry_points() -> dict[str, EntryPoint]:
    """Returns the providers of other packages."""
    return {each.name: each for each in entry_points(group="tensorstream.providers")}


def _class_of(name: str) -> type[Provider]:
    if name in _BUILTIN:
        return _BUILTIN[name]
    others = _entry_points()
    if name not in others:
        names = sorted({*_BUILTIN, *others})
        close = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(
            f"there is no provider {name!r}: expected one of {', '.join(names)}{hint}"
        )
    try:
        found: Callable[..., Any] = others[name].load()
    except Exception as error:  # the code of another package
        raise ConfigurationError(
            f"cannot load the provider {name!r} from {others[name].value}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Provider)):
        raise ConfigurationError(
            f"the provider {name!r} ({others[name].value}) is not a class derived from "
            "tensorstream.remote.providers.Provider"
        )
    return found
