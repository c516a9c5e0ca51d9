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
from .._values import decode, encode, running

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
        home: torch.device,
    ) -> tuple[list[torch.Tensor], str]:
        """Runs a function. Blocks.

        Args:
            function: A JSON object: "module" and "name"; or "source", "name" and "globals".
            arguments: A JSON object: "args" and "kwargs", as ``encode`` returns them.
            tensors: The tensors among the arguments.
            device: Returns the device of the machine with a number.
            home: The device of the results.

        Returns:
            The tensors among the results, and a JSON object: "result", or "error", "message" and
            "trace".
        """
        try:
            call = self._function(json.loads(function), device)
            given = json.loads(arguments)
            args = decode(given["args"], tensors, device)
            kwargs = decode(given["kwargs"], tensors, device)
        except BaseException as error:  # also SystemExit of a module
            is_typed = isinstance(error, ConfigurationError)
            what = str(error) if is_typed else _message(error)
            return [], json.dumps({"error": ConfigurationError.__name__, "message": what})
        running.is_set = True
        try:
            # Operators of sessions run without autograd, which the function may use.
            with torch._C._ForceDispatchKeyGuard(*_DISPATCH), torch.enable_grad():
                result = call(*args, **kwargs)
            results: list[torch.Tensor] = []
            text = json.dumps({"result": encode(result, results, _number_of)})
            _check(results, text, home)
            results = [tensor.detach().resolve_conj().resolve_neg() for tensor in results]
        except BaseException as error:  # also SystemExit, which ends the function only
            return [], json.dumps(_failure(error))
        finally:
            running.is_set = False
        return results, text

    def _function(
        self, function: dict[str, Any], device: Callable[[int], torch.device]
    ) -> Callable[..., Any]:
        """Returns the function that a client names or sends.

        Raises:
            ConfigurationError: The machine does not allow it, or cannot import it.
        """
        match function:
            case {"module": str(module), "name": str(name)}:
                if not (self._any or any(_is_public(module, each) for each in self._modules)):
                    raise ConfigurationError(
                        f"the machine does not allow functions of {module}, but of "
                        f"{', '.join(self._modules)}; start the server with `--allow-functions "
                        f"{module}` to allow them"
                    )
                is_name = name.isidentifier() and not name.startswith("_")
                found = _imported(module, name) if is_name else None
                found = getattr(found, "local_function", found)  # of ``RemoteFunction``
                # Other objects of an allowed module could lead to any code.
                if not isinstance(found, types.FunctionType):
                    raise ConfigurationError(f"{module}.{name} is not a public function")
                if found.__module__ != module and not self._any:
                    raise ConfigurationError(
                        f"{module}.{name} is a function of {found.__module__}; name that module"
                    )
                return found
            case {
                "source": str(source), "name": str(name), "globals": dict(used),
                "defaults": dict(defaults),
            }:  # fmt: skip
                if not self._any:
                    raise ConfigurationError(
                        "the machine runs only functions that it has; start the server with "
                        '`--allow-functions any`, or use @remote(by="name") with a function of '
                        f"{', '.join(self._modules)}"
                    )
                return self._compile(source, name, used, defaults, device)
            case _:
                raise ValueError("invalid function")

    def _compile(
        self,
        source: str,
        name: str,
        used: dict[str, Any],
        defaults: dict[str, Any],
        device: Callable[[int], torch.device],
    ) -> Callable[..., Any]:
        key = json.dumps([source, name, used, defaults])
        if key not in self._compiled:
            file = f"<source of {name}>"
            namespace: dict[str, Any] = {"__name__": "__remote__"}
            exec(compile(source, file, "exec", dont_inherit=True), namespace)
            # Another name of one of the functions can only be described once they exist.
            for variable, value in used.items():
                namespace[variable] = _value(value, namespace, device)
            for owner, (by_position, by_name) in defaults.items():
                function = namespace[owner]
                values = tuple(_value(each, namespace, device) for each in by_position)
                function.__defaults__ = values or None
                function.__kwdefaults__ = {
                    parameter: _value(each, namespace, device)
                    for parameter, each in by_name.items()
                }
            # Tracebacks show the lines.
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
            self._compiled[key] = namespace[name]
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]


def _is_public(module: str, allowed: str) -> bool:
    """Returns whether a module is the allowed one, or public and inside it."""
    inner = module.removeprefix(allowed)
    return inner != module and (not inner or inner.startswith(".")) and "._" not in inner


def _value(described: Any, namespace: dict[str, Any], device: Callable[[int], torch.device]) -> Any:
    """Returns the value of a variable that the client has described."""
    match described:
        case {"own": str(name)}:
            return namespace[name]
        case {"import": str(module), "name": str(attribute)}:
            return _imported(module, attribute)
        case {"import": str(module), "with": list(inner)}:
            for each in inner:
                _imported(each)
            return _imported(module)
        case {"value": other}:
            return decode(other, [], device)
        case _:
            raise ValueError("invalid variable")


def _check(results: list[torch.Tensor], text: str, device: torch.device) -> None:
    """Checks that the client can get the results.

    Raises:
        TypeError: It cannot.
    """
    if len(results) > _MAX_RESULTS or len(text) > _MAX_TEXT:
        raise TypeError(
            f"too many results: expected at most {_MAX_RESULTS} tensors, and {_MAX_TEXT} bytes of "
            f"other results, got {len(results)} and {len(text)}"
        )
    for tensor in results:
        if tensor.device.type != device.type or tensor.device.index not in (None, device.index):
            raise TypeError(
                f"cannot return a tensor on {tensor.device}: expected {device}; move it there"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise TypeError("cannot return a sparse, quantized or nested tensor")


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


def _failure(error: BaseException) -> dict[str, str]:
    """Returns the JSON object of an exception of a function."""
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    kind = RemoteOutOfMemoryError if is_memory else RemoteTensorError
    # The first frame is that of ``run``.
    trace = "".join(traceback.format_exception(error.with_traceback(_inner(error))))
    return {"error": kind.__name__, "message": _message(error), "trace": trace[-8000:]}


def _message(error: BaseException) -> str:
    """Returns the class and the text of an exception, even if that cannot be computed."""
    return "".join(traceback.format_exception_only(error)).strip()[:4000]


def _inner(error: BaseException) -> types.TracebackType | None:
    return error.__traceback__ and (error.__traceback__.tb_next or error.__traceback__)
