# SPDX-License-Identifier: MIT OR Apache-2.0
"""Serves a language model that streams its weights, to clients of the OpenAI API.

The server is that of transformers. Only its class that loads models is replaced, by a subclass.
This is the only file that knows the parts of transformers' server. They have no stable interface,
so ``_require`` compares their signatures first.
"""

from __future__ import annotations

import argparse
import inspect
import signal
import sys
from typing import Any

from ..config import Config
from ..errors import ConfigurationError, TensorStreamError
from ._diversion import replaced
from ._transformers import from_pretrained

#: The versions of transformers whose server was tested.
VERSIONS = "transformers>=5.24,<5.25"
#: The parameters of transformers' functions that this file calls or replaces.
_PARAMETERS = {
    "Serve": {"force_model", "host", "port", "device", "dtype", "trust_remote_code"},
    "ModelManager": {"device", "dtype", "trust_remote_code", "force_model"},
    "ModelManager._load_model": {"model_id_and_revision", "gguf_file"},
    "split_revision": set(),
}


def server(model: str, config: Config, **arguments: Any) -> Any:
    """Loads a model, and returns transformers' ``Serve``, whose server runs in another thread.

    Args:
        model: A directory, or a name on the Hugging Face Hub, also as ``name@revision``.
        config: The settings of the streamed model.
        arguments: Arguments of ``Serve``, such as ``host`` and ``port``.

    Returns:
        The server. Its method ``kill_server`` ends it.
    """
    return _serve(model, config, non_blocking=True, **arguments)


def _serve(model: str, config: Config, **arguments: Any) -> Any:
    serve_class, module = _require()

    def load(
        self: Any, model_id_and_revision: str, *_: Any, gguf_file: str | None = None, **__: Any
    ) -> Any:
        if gguf_file is not None:
            raise ConfigurationError(f"{gguf_file}: GGUF files cannot be streamed")
        name, revision = module.split_revision(model_id_and_revision)
        options = {
            "revision": revision,
            "dtype": None if self.dtype == "auto" else self.dtype,
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code or None,
        }
        given = {key: value for key, value in options.items() if value is not None}
        return from_pretrained(name, config=config, **given)

    def make(original: Any) -> Any:
        return type("StreamedModels", (original,), {"_load_model": load})

    with replaced(module, "ModelManager", make):
        return serve_class(model, device=str(config.torch_device()), **arguments)


def _require() -> tuple[Any, Any]:
    """Returns transformers' ``Serve``, and the module with its ``ModelManager``.

    Raises:
        ConfigurationError: They are not there, or are not those that this file knows.
    """
    try:
        from transformers.cli.serve import Serve
        from transformers.cli.serving import model_manager
        from transformers.utils.import_utils import is_serve_available
    except ImportError as error:
        raise ConfigurationError(
            f"serving needs the server of {VERSIONS}: pip install 'tensorstream[serving]'"
        ) from error
    if not is_serve_available():
        raise ConfigurationError("serving needs more packages: pip install 'tensorstream[serving]'")
    manager = getattr(model_manager, "ModelManager", None)
    found = {
        "Serve": getattr(Serve, "__init__", None),
        "ModelManager": manager,
        "ModelManager._load_model": getattr(manager, "_load_model", None),
        "split_revision": getattr(model_manager, "split_revision", None),
    }
    for name, wanted in _PARAMETERS.items():
        own = found[name]
        missing = wanted - set(inspect.signature(own).parameters) if own is not None else {name}
        if missing:
            import transformers

            raise ConfigurationError(
                f"transformers {transformers.__version__} has another server: `{name}` has no "
                f"`{min(missing)}`; pip install '{VERSIONS}'"
            )
    return Serve, model_manager


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tensorstream serve-openai",
        description="Serves a language model that streams its weights, to clients of the OpenAI "
        "API, by the server of transformers. Requests are answered one after the other.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory, or a name on the Hugging Face Hub")
    add("--budget", metavar="SIZE", help='memory for weights, such as "6GB" (default: "auto")')
    add("--host", default="localhost", help="the address to listen on (default: %(default)s)")
    add("--port", type=int, default=8000, help="the port to listen on (default: %(default)s)")
    add("--dtype", help="cast weights, which writes them to storage once")
    add("--trust-remote-code", action="store_true", help="run code of the checkpoint")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs ``tensorstream serve-openai``. Blocks until a signal.

    Args:
        arguments: The arguments. None means those of the process.

    Returns:
        The exit status: 0 after a signal; 2 after an error, which is printed.

    Raises:
        SystemExit: The arguments are invalid.
    """
    options = _parser().parse_args(arguments)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    # uvicorn ends cleanly after a signal, and then raises it again.
    before = signal.signal(signal.SIGTERM, stop)
    try:
        config = Config(budget=options.budget)
        _serve(
            options.model,
            config,
            host=options.host,
            port=options.port,
            dtype=options.dtype or "auto",
            trust_remote_code=options.trust_remote_code,
        )
    except KeyboardInterrupt:
        return 0
    except SystemExit:  # uvicorn has logged why
        error: Any = f"cannot listen on {options.host}:{options.port}"
    # transformers raises ValueError for a dtype that does not exist, and ImportError for a
    # processor that needs another library.
    except (TensorStreamError, OSError, ImportError, ValueError) as raised:
        error = raised
    else:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"tensorstream serve-openai: {error}", file=sys.stderr)
    return 2
