# SPDX-License-Identifier: MIT OR Apache-2.0
"""The provider "modal": a container on Modal hosts the server, and a tunnel leads to it.

This has not run with an account yet. Tests start machines through Modal's client and a service that
pretends to be Modal's. Its containers are processes on the computer that runs the tests.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import math
import os
import queue
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, TypeVar

from ..._scratch import Scratch
from ...budget import parse_size
from ...errors import (
    ConfigurationError,
    ProviderAuthenticationError,
    ProviderCapacityError,
    ProviderConnectionError,
    ProviderError,
)
from ...serve._weights import EVERYTHING
from ._base import Provider, Request, Server
from ._gpus import GPUS
from ._messages import brief, brief_error
from ._own_wheel import own_wheel

_log = logging.getLogger("tensorstream.remote")
_T = TypeVar("_T")

#: The port of the server in its container.
_PORT = 7470
#: The most GPUs of a container, and those of a type that has fewer.
_MOST, _FEWER = 8, {"A10G": 4}
#: What to do without credentials.
_SET_UP = "run `modal setup`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
#: The time between two looks at a container that starts, in seconds.
_LOOK = 5.0
#: The most lines of a failed build in an error.
_LINES = 20


class ModalProvider(Provider):
    """Starts a container on Modal, which hosts a server.

    The client reaches the server through a tunnel of Modal, which uses TLS, and the server requires
    a secret that only this provider and the container have. The container ends with the machine, or
    with this process. Modal's credentials are those of its client: the file ``~/.modal.toml`` or
    the environment.

    Args:
        wheel: A wheel of TensorStream for Linux, which is uploaded and installed in the image. The
            default is made of the package that is installed here.
        packages: More packages for the image, as ``pip`` takes them.
        cpu: The number of CPUs, which is also that of PyTorch threads.
        memory: The memory of the container, in bytes or such as "16GiB".
        budget: The most memory for weights that the machine loads, in bytes or such as "4GiB".
            Those that do not fit are streamed, on CPUs only. The default is unlimited.
        app: The name of the app.
        lifetime: The longest time that the container may run, in seconds, up to a day.
        start_timeout: The longest time to wait for the container, in seconds. It starts when the
            image is built, which only the first container needs.

    Raises:
        ConfigurationError: An option is invalid.
    """

    name = "modal"

    def __init__(
        self,
        *,
        wheel: str | os.PathLike[str] | None = None,
        packages: tuple[str, ...] | list[str] = (),
        cpu: float = 2.0,
        memory: int | str = "8GiB",
        budget: int | str | None = None,
        app: str = "tensorstream",
        lifetime: float = 86400.0,
        start_timeout: float = 900.0,
    ) -> None:
        if wheel is not None and not Path(wheel).is_file():
            raise ConfigurationError(f"invalid wheel {os.fspath(wheel)!r}: there is no such file")
        for name, value in (("cpu", cpu), ("lifetime", lifetime), ("start_timeout", start_timeout)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"invalid {name} {value!r}: expected a number above 0")
        if isinstance(packages, str) or not all(isinstance(each, str) for each in packages):
            raise ConfigurationError(f"invalid packages {packages!r}: expected a list of texts")
        self._wheel = None if wheel is None else Path(wheel)
        self._packages, self._cpu, self._app = list(packages), cpu, app
        self._memory = parse_size(memory, "memory")
        self._budget = None if budget is None else parse_size(budget, "budget")
        self._lifetime, self._start_timeout = int(min(lifetime, 86400)), start_timeout
        self._token = secrets.token_hex(32)

    @classmethod
    def probe(cls) -> str | None:
        """Returns ``None`` if Modal's client is installed, else what to do."""
        found = importlib.util.find_spec("modal")
        return None if found else "Modal's client is not installed: `pip install modal`"

    def device_types(self) -> Mapping[str, int]:
        """Returns Modal's types of GPUs, and how many a container can have."""
        return {"cpu": 127, "cuda": _MOST, **{name: _FEWER.get(name, _MOST) for name in GPUS}}

    def start(self, request: Request) -> Server:
        """Starts a container. Blocks until its server listens."""
        import modal

        function, app = self.build(request)
        with _translated(modal), ExitStack() as stack:
            reports: Any = stack.enter_context(_closed(modal.Queue.ephemeral()))
            stack.enter_context(_closed(app.run()))
            _log.info("%s: starting a container on Modal", request.name)
            call = function.spawn(self.options(request), reports)
            address = self._await_address(reports, call)
            return ModalServer(address, self._token, call, stack.pop_all())

    def _await_address(self, reports: Any, call: Any) -> str:
        """Returns the address that the container reports."""
        end = time.monotonic() + self._start_timeout
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                return str(reports.get(timeout=min(_LOOK, self._start_timeout)))
            ended = _ending(call, timeout=0)
            if ended is not None:
                raise ProviderError(f"cannot start a machine on Modal: {ended}")
        raise ProviderCapacityError(
            f"cannot start a machine on Modal: no container was ready after "
            f"{self._start_timeout:g} seconds"
        )

    def build(self, request: Request) -> tuple[Any, Any]:
        """Returns the function that hosts the server, and its app. Does not use the network.

        Raises:
            ConfigurationError: No wheel was given, and none can be made of the installed package.
        """
        import modal
        import torch

        version = torch.__version__.partition("+")[0]
        image = modal.Image.debian_slim(
            python_version=f"{sys.version_info.major}.{sys.version_info.minor}"
        ).pip_install(f"torch=={version}", "numpy", "safetensors", "huggingface_hub")
        wheel = self._wheel or self._own_wheel()
        inside = f"/root/{wheel.name}"
        image = image.add_local_file(wheel, inside, copy=True).run_commands(f"pip install {inside}")
        if self._packages:
            image = image.pip_install(*self._packages)
        app = modal.App(self._app)
        function = app.function(
            image=image,
            gpu=_gpu(request),
            cpu=self._cpu,
            memory=self._memory >> 20,
            timeout=self._lifetime,
            serialized=True,
            name="tensorstream-serve",
        )(serve_in_container)
        return function, app

    def _own_wheel(self) -> Path:
        """Returns a wheel of the installed package, which exists as long as the provider."""
        scratch = Scratch("tensorstream-wheel-")
        weakref.finalize(self, scratch.remove)
        self._wheel = own_wheel(scratch.path)
        return self._wheel

    def options(self, request: Request) -> dict[str, Any]:
        """Returns the options of the server."""
        return {
            "token": self._token,
            "device": request.kind,
            "devices": request.device_count,
            "threads": max(1, int(self._cpu)),
            "budget": self._budget,
        }


def _gpu(request: Request) -> str | None:
    """Returns the GPUs of a machine, as Modal names them."""
    if request.kind == "cpu":
        return None
    if request.device_type == "cuda":
        return f"any:{request.device_count}"
    # Without the mark, Modal may provide an H200 for an H100.
    mark = "!" if request.device_type == "H100" else ""
    return f"{request.device_type}{mark}:{request.device_count}"


def serve_in_container(options: dict[str, Any], reports: Any, port: int = _PORT) -> str:
    """Hosts a server until its first session has ended. Blocks. Runs in the container.

    Args:
        options: Those of ``tensorstream serve`` that the provider sets.
        reports: Its method ``put`` takes the address of the server.
        port: The port of the server in the container.

    Returns:
        Why the server has ended.
    """
    import modal

    from tensorstream.serve._broker import broker_of

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    broker, _ = broker_of({
        # Only the tunnel, whose end is in the container, can reach the server.
        "listen": f"127.0.0.1:{port}", "insecure": False,
        "cert": None, "key": None, "ca": None, "peers": [], "peer_ca": None, "send_to": ["any"],
        "weights": list(EVERYTHING), "functions": ["any"],
        "sandbox": True, "max_sessions": 256, "client_sessions": 256, "idle_timeout": None,
        "session_memory": None, "drain": 0, "once": True,
        **options,
    })  # fmt: skip
    with modal.forward(port) as tunnel:
        host, public = tunnel.tls_socket
        reports.put(f"{host}:{public}")
        broker.run()
    return "its session has ended"


class ModalServer(Server):
    """The server of a container.

    Args:
        address: The address of its tunnel.
        token: The secret that it requires.
        call: The call of the function that hosts it.
        resources: Is closed when the server has ended.
    """

    def __init__(self, address: str, token: str, call: Any, resources: ExitStack) -> None:
        self.address, self.token = address, token
        self.ca = _authorities()
        self._call, self._resources = call, resources
        self._failure: str | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._wait, name="tensorstream-modal", daemon=True).start()

    def _wait(self) -> None:
        while self._failure is None and not self._stopped.is_set():
            try:
                self._failure = _ending(self._call)
            except Exception as error:
                # The server may run on.
                _log.debug("cannot ask Modal about a container: %s", error)
                self._stopped.wait(_LOOK)

    def failure(self) -> str | None:
        """Returns how the container has ended."""
        return self._failure

    def stop(self) -> None:
        """Ends the container. Blocks."""
        self._stopped.set()
        with contextlib.suppress(Exception):  # it may have ended, and ends with its app
            self._call.cancel(terminate_containers=True)
        self._resources.close()


@functools.cache
def _authorities() -> str:
    """Returns the file of certificates that Modal's client trusts."""
    import certifi

    return certifi.where()


@contextlib.contextmanager
def _closed(context: AbstractContextManager[_T]) -> Iterator[_T]:
    """Enters a context of Modal's client, and leaves it without an exception.

    Modal's own contexts swallow ``KeyboardInterrupt``. If Modal cannot be reached, they raise
    another error in place of the first one.
    """
    entered = context.__enter__()
    try:
        yield entered
    finally:
        try:
            context.__exit__(None, None, None)
        except Exception as error:
            _log.warning(
                "cannot end what runs on Modal: %s; Modal ends it without heartbeats of this "
                "process", brief_error(error),
            )  # fmt: skip


def _ending(call: Any, timeout: float | None = None) -> str | None:
    """Waits for the end of a container. Returns how it has ended, or ``None`` if it has not.

    Raises:
        modal.exception.Error: Modal cannot be asked.
    """
    from modal import exception as kinds

    try:
        return f"the container has ended: {call.get(timeout=timeout)}"
    except (kinds.ConnectionError, kinds.ServiceError, kinds.InternalError, kinds.AuthError):
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and not error.args:
            return None  # a TimeoutError of the container has a message
        return f"the container has failed: {brief_error(error)}"


@contextlib.contextmanager
def _translated(modal: Any) -> Iterator[None]:
    """Raises the errors of Modal's client as those of providers."""
    kinds = modal.exception
    failed = "cannot start a machine on Modal"
    try:
        yield
    except ProviderError:
        raise
    except kinds.AuthError as error:
        raise ProviderAuthenticationError(f"{failed}: {_cause(error)}; {_SET_UP}") from error
    except (kinds.ConnectionError, kinds.ServiceError) as error:
        raise ProviderConnectionError(
            f"cannot reach Modal: {_cause(error)}; try again later"
        ) from error
    except kinds.ResourceExhaustedError as error:
        raise ProviderCapacityError(f"{failed}: {_cause(error)}") from error
    except kinds.ImageBuildError as error:
        raise ProviderError(
            f"{failed}: {_cause(error)}; the build printed last: "
            f"{_build_output(modal, error.image_id)}"
        ) from error
    except Exception as error:
        raise ProviderError(f"{failed}: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    """Returns the message of an error of Modal's client, without a full stop."""
    return brief_error(error).rstrip(".")


def _build_output(modal: Any, image: str) -> str:
    """Returns the last output of the build of an image."""
    try:
        entries = modal.Image.from_id(image).logs.tail(_LINES)
        return brief(" ".join(entry.message for entry in entries)) or "nothing"
    except Exception as error:
        return f"(it cannot be read: {_cause(error)})"
