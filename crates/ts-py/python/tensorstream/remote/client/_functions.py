# SPDX-License-Identifier: MIT OR Apache-2.0
"""Python functions that run on a machine as one call."""

from __future__ import annotations
import __future__

import ast
import dis
import functools
import inspect
import json
import sys
import types
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

import torch

from ... import errors
from ...errors import ConfigurationError
from .. import _registry
from .._values import decode, encode, running
from . import _server_operators as operators
from ._kernels import materialize

P = ParamSpec("P")
R = TypeVar("R")

#: The instructions that load a global, in functions and in bodies of classes.
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME")
#: How a function gets to the machine.
By = Literal["source", "name"]


class RemoteFunction(Generic[P, R]):
    """A function that runs on the machine of its arguments. See ``function``."""

    def __init__(self, local: Callable[P, R], by: By, device: str | torch.device | None) -> None:
        if by not in ("source", "name"):
            raise ConfigurationError(f'invalid by: expected "source" or "name", got {by!r}')
        if not isinstance(local, types.FunctionType):
            raise ConfigurationError(
                f"cannot run {local!r} on a machine: expected a function that is written in Python"
            )
        scope = local.__qualname__.rpartition(".")[0]
        if scope and not scope.endswith("<locals>"):
            raise ConfigurationError(
                f"cannot run {local.__qualname__} on a machine: expected a function, not a method"
            )
        self._by, self._device = by, device
        self.__name__: str = local.__name__
        functools.update_wrapper(self, local)
        #: The function itself. A machine that finds this object in a module runs that.
        self.local_function = local

    @functools.cached_property
    def _described(self) -> str:
        """The JSON object that describes the function to a machine."""
        local = self.local_function
        if self._by == "source":
            return json.dumps(_described_by_source(local))
        if local.__module__ == "__main__" or local.__qualname__ != local.__name__:
            raise ConfigurationError(
                f"cannot name {local.__qualname__}: expected a function of a module that the "
                'machine has; use by="source"'
            )
        return json.dumps({"module": local.__module__, "name": local.__name__})

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if getattr(running, "is_set", False):
            return self.local_function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        devices: list[torch.device] = []
        given = {"args": list(args), "kwargs": kwargs}
        try:
            encoded = {
                name: encode(value, tensors, functools.partial(_number_of, devices))
                for name, value in given.items()
            }
            arguments = json.dumps(encoded)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{self.__name__}: {error}") from error
        device = self._device_of(tensors, devices)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise ConfigurationError(
                f"{self.__name__} is not differentiated, because it runs as one call on a machine: "
                "call it under torch.no_grad(), or pass tensor.detach()"
            )
        anchor = operators.anchor(_registry.index_of(device))
        results, text = operators.RUN_FUNCTION(
            anchor, self._described, arguments, [materialize(tensor) for tensor in tensors]
        )
        answer = json.loads(text)
        if "error" in answer:
            raise _failure(f"{device}: {self.__name__}", answer)
        first = _registry.ADDRESSES[anchor.device.index][0]
        of_number = functools.partial(_device_of_number, first)
        return cast(R, decode(answer["result"], results, of_number))

    def _device_of(self, tensors: list[torch.Tensor], passed: list[torch.device]) -> torch.device:
        """Returns the device that a call runs on, given those that are arguments themselves."""
        devices = list(dict.fromkeys(tensor.device for tensor in tensors))
        if not devices and self._device is not None:
            devices = [torch.device(self._device)]
        if not devices:
            raise ConfigurationError(
                f"{self.__name__} has no tensors among its arguments, so its machine is unknown: "
                "pass a tensor, or use @function(device=machine.device())"
            )
        for device in devices:
            if device.type != "ts":
                raise ConfigurationError(
                    f"{self.__name__} has an argument on {device}: expected tensors of a machine; "
                    "move them there with .to(machine.device())"
                )
        every = [*devices, *passed]
        machines = {_registry.ADDRESSES[_registry.index_of(device)][0] for device in every}
        if len(machines) > 1:
            raise errors.CrossMachineError(
                f"{self.__name__} has arguments of {', '.join(map(str, every))}: expected "
                "tensors and devices of one machine"
            )
        return devices[0]


@overload
def function(local: Callable[P, R]) -> RemoteFunction[P, R]: ...
@overload
def function(
    *, by: By = "source", device: str | torch.device | None = None
) -> Callable[[Callable[P, R]], RemoteFunction[P, R]]: ...
def function(
    local: Callable[P, R] | None = None,
    *,
    by: By = "source",
    device: str | torch.device | None = None,
) -> Any:
    """Makes a function run on the machine of its arguments, as one call that waits for it.

    ``tensorstream.remote`` is also this decorator. A call takes one round trip, whatever the
    function does: loops and values that it reads do not wait. The machine must allow it:
    ``tensorstream serve --allow-functions``. Machines of the kinds mock, local, ssh, ray and modal
    do.

    Args:
        local: The function.
        by: "source" sends its source, with that of the functions of the same module that it calls.
            Variables of the module that it uses must be modules, functions or classes that can be
            imported on the machine, or numbers, strings, None, dtypes, or lists, tuples and dicts
            of them, which are copied when it is called first, as defaults of parameters are. "name"
            calls the function of the same module and name that the machine has.
        device: The device whose machine runs calls without tensors.

    Returns:
        The function. ``local_function`` is the local one. Its arguments and results are tensors of
        one machine, numbers, strings, None, dtypes and devices, and lists, tuples and dicts of
        them, but no subclasses of these types. Devices are those of the machine. It can write to
        the elements of its arguments, except conjugated views, of which it gets copies, and
        weights that stream, whose later results would be wrong. It is not differentiated.

    Raises:
        ConfigurationError: By calls, if the arguments, the function, or what it uses cannot be
            sent, or if the machine does not allow it.
        RemoteTensorError: By calls, if the function raises. The message has its exception, and a
            note has its traceback.
        ConnectionLost: By calls, if the machine cannot be reached.

    Examples:
        >>> import torch
        >>> from tensorstream.remote import RemoteMachine, function
        >>> @function
        ... def collatz(start: torch.Tensor) -> int:
        ...     value, steps = int(start), 0
        ...     while value != 1:
        ...         value, steps = (value // 2 if value % 2 == 0 else 3 * value + 1), steps + 1
        ...     return steps
        >>> with RemoteMachine.mock() as machine:
        ...     collatz(torch.tensor(27, device=machine.device()))
        111
    """
    if local is None:
        return lambda given: RemoteFunction(given, by, device)
    return RemoteFunction(local, by, device)


def _device_of_number(first: int, number: int) -> torch.device:
    return torch.device("ts", first + number) if number >= 0 else torch.device("cpu")


def _failure(what: str, answer: dict[str, Any]) -> Exception:
    """Returns the error that a machine has answered."""
    named: Any = getattr(errors, str(answer["error"]), errors.RemoteTensorError)
    error: Exception = named(f"{what}: {answer['message']}")
    if trace := answer.get("trace"):
        error.add_note(f"On the machine:\n{trace}")
    return error


def _described_by_source(local: types.FunctionType) -> dict[str, Any]:
    """Returns the source of a function and of the functions of its module that it calls.

    Raises:
        ConfigurationError: It uses something that cannot be sent.
    """
    used: dict[str, Any] = {}
    sources: dict[str, str] = {}
    owners: dict[str, types.FunctionType] = {}
    defaults: dict[str, Any] = {}
    pending = [local]

    def described(owner: types.FunctionType, name: str, value: Any, inner: list[str]) -> Any:
        value = value.local_function if isinstance(value, RemoteFunction) else value
        is_own = isinstance(value, types.FunctionType) and value.__module__ == local.__module__
        if is_own and value.__globals__.get(value.__name__) in (value, _wrapper_of(value)):
            pending.append(value)
            return {"own": value.__name__}
        return _described_value(owner.__name__, name, value, inner)

    while pending:
        current = pending.pop()
        if owners.setdefault(current.__name__, current) is not current:
            raise ConfigurationError(
                f"cannot send {local.__name__}: it uses two functions with the name "
                f"{current.__name__}; rename one of them"
            )
        if current.__name__ in sources:
            continue
        tree = _tree_of(current)
        sources[current.__name__] = ast.unparse(tree)
        for name in sorted(_globals_of(tree)):
            if name in current.__globals__ and name not in used:
                value = current.__globals__[name]
                found = described(current, name, value, _modules_inside(tree, name, value))
                if found != {"own": name}:
                    used[name] = found
        defaults[current.__name__] = (
            [described(current, "a default", each, []) for each in current.__defaults__ or ()],
            {
                name: described(current, name, each, [])
                for name, each in (current.__kwdefaults__ or {}).items()
            },
        )
    # Annotations are not evaluated.
    source = "\n\n".join(["from __future__ import annotations", *sources.values()])
    return {"source": source, "name": local.__name__, "globals": used, "defaults": defaults}


def _wrapper_of(local: types.FunctionType) -> Any:
    """Returns what a module has under the name of a function, if that wraps the function."""
    found = local.__globals__.get(local.__name__)
    is_wrapper = isinstance(found, RemoteFunction) and found.local_function is local
    return found if is_wrapper else local


def _tree_of(local: types.FunctionType) -> ast.FunctionDef:
    """Returns the definition of a function, without decorators, annotations and defaults.

    Raises:
        ConfigurationError: Its source is unknown, or it needs more than its source.
    """
    name = local.__name__
    if local.__closure__:
        variables = ", ".join(local.__code__.co_freevars)
        raise ConfigurationError(
            f"cannot send {name}: it uses variables of an enclosing function or of a decorator "
            f"({variables}); pass them as arguments, and leave the decorator out"
        )
    try:
        text = inspect.getsource(local)
        # The lines of an inner function are indented, and those of its strings may not be.
        (tree,) = ast.parse(f"if True:\n{text}" if text[:1].isspace() else text).body
        tree = tree.body[0] if isinstance(tree, ast.If) else tree
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        raise ConfigurationError(
            f"cannot send {name}: its source is unknown ({error}); define it in a file with def, "
            'or use by="name"'
        ) from error
    if not isinstance(tree, ast.FunctionDef):
        raise ConfigurationError(f"cannot send {name}: expected a function that def defines")
    if tree.name != name or not _is_current(local):
        raise ConfigurationError(
            f"cannot send {name}: its file has changed since it was imported; import it again"
        )
    tree.decorator_list, tree.returns = [], None
    tree.args.defaults, tree.args.kw_defaults = [], [None] * len(tree.args.kwonlyargs)
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return tree


def _is_current(local: types.FunctionType) -> bool:
    """Returns whether the file of a function still has it, or may have it."""
    code = local.__code__
    if _has_rewritten_assertions(code):
        return True
    flags = code.co_flags & __future__.annotations.compiler_flag
    try:
        text = "".join(inspect.findsource(local)[0])
        pending = [compile(text, "", "exec", flags=flags, dont_inherit=True)]
    except (OSError, SyntaxError, ValueError):
        return True
    while pending:
        inside = [each for each in pending.pop().co_consts if isinstance(each, types.CodeType)]
        if code in inside:
            return True
        pending += inside
    return False


def _has_rewritten_assertions(code: types.CodeType) -> bool:
    """Returns whether pytest has changed the assertions in a function."""
    inside = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    is_rewritten = any(name.startswith("@py_") for name in code.co_varnames)
    return is_rewritten or any(map(_has_rewritten_assertions, inside))


def _globals_of(tree: ast.FunctionDef) -> set[str]:
    """Returns the names of globals that a function uses, also in functions inside it."""
    module = ast.fix_missing_locations(ast.Module([tree], []))
    flags = __future__.annotations.compiler_flag
    code = compile(module, "", "exec", flags=flags, dont_inherit=True)
    pending = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    names: set[str] = set()
    while pending:
        current = pending.pop()
        instructions = dis.get_instructions(current)
        names |= {each.argval for each in instructions if each.opname in _LOADS}
        pending += [each for each in current.co_consts if isinstance(each, types.CodeType)]
    return names


def _modules_inside(tree: ast.AST, name: str, value: Any) -> list[str]:
    """Returns the modules inside a module that a function uses through the module's variable."""
    found = set()
    for node in ast.walk(tree) if isinstance(value, types.ModuleType) else ():
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        path = value.__name__
        for part in reversed(parts) if isinstance(inner, ast.Name) and inner.id == name else ():
            path = f"{path}.{part}"
            if path in sys.modules:
                found.add(path)
    return sorted(found)


def _described_value(function: str, name: str, value: Any, inner: list[str]) -> dict[str, Any]:
    """Returns how a machine gets a variable or a default that a function uses."""
    if isinstance(value, types.ModuleType):
        return {"import": value.__name__, "with": inner}
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and isinstance(qualified, str) and module != "__main__":
        found: Any = sys.modules.get(module)
        for part in qualified.split("."):
            found = getattr(found, part, None)
        if getattr(found, "local_function", found) is value:
            return {"import": module, "name": qualified}
    tensors: list[torch.Tensor] = []
    try:
        encoded = encode(value, tensors, functools.partial(_number_of, []))
        if tensors:
            raise TypeError("cannot pass tensors in variables")
        return {"value": encoded}
    except TypeError as error:
        raise ConfigurationError(
            f"cannot send {function}: it uses {name}, a {type(value).__name__}; pass it as an "
            "argument, or import it inside the function"
        ) from error


def _number_of(seen: list[torch.device], device: torch.device) -> int:
    """Returns the number of a device on its machine, and appends it to ``seen``. The host is -1."""
    if device.type == "ts" and device.index in _registry.ADDRESSES:
        seen.append(device)
        return device.index - _registry.ADDRESSES[device.index][0]
    if device.type == "cpu":
        return -1
    raise TypeError(f"cannot pass the device {device}: expected that of a machine, or cpu")
