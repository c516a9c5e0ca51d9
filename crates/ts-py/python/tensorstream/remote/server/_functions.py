# SPDX-License-Identifier: MIT OR Apache-2.0
"""Python functions that run on a machine, if it allows them."""

from __future__ import annotations

import collections
import importlib
import json
import linecache
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch

from ...errors import ConfigurationError, RemoteOutOfMemoryError, RemoteTensorError
from .._values import decode, encode

#: Stands for all functions, also those whose source a client sends.
ANY = "any"
#: The most functions of a session whose source stays compiled.
_MAX_COMPILED = 256
#: The most tensors that a function can return, and the longest text of its other results.
_MAX_RESULTS, _MAX_TEXT = 1 << 10, 1 << 20


#: What PyTorch and Python import only when they need it.
_LAZY = ("torch.nested._internal.nested_tensor", "encodings.idna")
#: The dispatch keys that are included and excluded by default.
_DISPATCH = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


class Functions:
    """The functions that clients can call.

    Args:
        allowed: Modules whose functions can be called by name. "any" stands for all modules, and
            also allows functions whose source the client sends.
    """

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        self._any = ANY in allowed
        self._modules = tuple(name for name in allowed if name != ANY)
        #: Functions by their source.
        self._compiled: collections.OrderedDict[str, Callable[..., Any]] = collections.OrderedDict()

    def __bool__(self) -> bool:
        return self._any or bool(self._modules)

    def preload(self) -> None:
        """Imports the modules, because a sandboxed process can open no files. Blocks.

        Raises:
            ConfigurationError: A module cannot be imported.
        """
        for name in (*_LAZY, *self._modules) if self else ():
            try:
                importlib.import_module(name)
            except Exception as error:
                raise ConfigurationError(
                    f"--allow-functions: cannot import {name}: {type(error).__name__}: {error}"
                ) from error

    def run(
        self,
        function: str,
        arguments: str,
        tensors: list[torch.Tensor],
        device: Callable[[int], torch.device],
    ) -> tuple[list[torch.Tensor], str]:
        """Runs a function. Blocks.

        Args:
            function: A JSON object: "module" and "name"; or "source", "name" and "globals".
            arguments: A JSON object: "args" and "kwargs", as ``encode`` returns them.
            tensors: The tensors among the arguments.
            device: Returns the device of the machine with a number.

        Returns:
            The tensors among the results, and a JSON object: "result", or "error", "message" and
            "trace".
        """
        try:
            call = self._function(json.loads(function), device)
            given = json.loads(arguments)
            args = decode(given["args"], tensors, device)
            kwargs = decode(given["kwargs"], tensors, device)
        except (ValueError, TypeError, KeyError, RecursionError, ConfigurationError) as error:
            return [], json.dumps({"error": "ConfigurationError", "message": str(error)})
        try:
            # Operators of sessions run without autograd, which the function may use.
            with torch._C._ForceDispatchKeyGuard(*_DISPATCH), torch.enable_grad():
                result = call(*args, **kwargs)
            results: list[torch.Tensor] = []
            text = json.dumps({"result": encode(result, results, _number_of)})
            if len(results) > _MAX_RESULTS or len(text) > _MAX_TEXT:
                raise TypeError(
                    f"too many results: expected at most {_MAX_RESULTS} tensors, and {_MAX_TEXT} "
                    f"bytes of other results, got {len(results)} and {len(text)}"
                )
        except Exception as error:
            return [], json.dumps(_failure(error))
        return [tensor.detach() for tensor in results], text

    def _function(
        self, function: dict[str, Any], device: Callable[[int], torch.device]
    ) -> Callable[..., Any]:
        """Returns the function that a client names or sends.

        Raises:
            ConfigurationError: The machine does not allow it, or cannot import it.
        """
        match function:
            case {"module": str(module), "name": str(name)}:
                is_allowed = any(f"{module}.".startswith(f"{each}.") for each in self._modules)
                if not (self._any or is_allowed):
                    raise ConfigurationError(
                        f"the machine does not allow functions of {module}, but of "
                        f"{', '.join(self._modules)}; start the server with `--allow-functions "
                        f"{module}` to allow them"
                    )
                found = _imported(module, name)
                found = getattr(found, "local_function", found)  # of ``RemoteFunction``
                # Other objects of an allowed module could lead to any code.
                if not isinstance(found, types.FunctionType) or name.startswith("_"):
                    raise ConfigurationError(f"{module}.{name} is not a public function")
                if found.__module__ != module and not self._any:
                    raise ConfigurationError(
                        f"{module}.{name} is a function of {found.__module__}; name that module"
                    )
                return found
            case {"source": str(source), "name": str(name), "globals": dict(used)}:
                if not self._any:
                    raise ConfigurationError(
                        "the machine runs only functions that it has; start the server with "
                        '`--allow-functions any`, or use @remote(by="name") with a function of '
                        f"{', '.join(self._modules)}"
                    )
                return self._compile(source, name, used, device)
            case _:
                raise ValueError("invalid function")

    def _compile(
        self, source: str, name: str, used: dict[str, Any], device: Callable[[int], torch.device]
    ) -> Callable[..., Any]:
        key = json.dumps([source, name, used])
        if key not in self._compiled:
            file = f"<source of {name}>"
            namespace: dict[str, Any] = {"__name__": "__remote__"}
            for variable, value in used.items():
                match value:
                    case {"import": str(module), "name": str(attribute)}:
                        namespace[variable] = _imported(module, attribute)
                    case {"import": str(module)}:
                        namespace[variable] = _imported(module)
                    case {"value": other}:
                        namespace[variable] = decode(other, [], device)
            exec(compile(source, file, "exec"), namespace)
            # Tracebacks show the lines.
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            self._compiled[key] = namespace[name]
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]


def _imported(module: str, attribute: str = "") -> Any:
    """Returns a module, or what it has under a name with dots.

    Raises:
        ConfigurationError: It cannot be imported.
    """
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
    except (ImportError, AttributeError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"the machine cannot import {module}{'.' if attribute else ''}{attribute}: {error}; "
            f"start the server with `--allow-functions any,{module}` if it has the module"
        ) from error
    return found


def _number_of(device: torch.device) -> int:
    return (device.index or 0) if device.type != "cpu" else 0


def _failure(error: Exception) -> dict[str, str]:
    """Returns the JSON object of an exception of a function."""
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    kind = RemoteOutOfMemoryError if is_memory else RemoteTensorError
    # The first frame is that of ``run``.
    trace = "".join(traceback.format_exception(error.with_traceback(_inner(error))))
    message = f"{type(error).__name__}: {error}"
    return {"error": kind.__name__, "message": message[:4000], "trace": trace[-8000:]}


def _inner(error: Exception) -> types.TracebackType | None:
    return error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
