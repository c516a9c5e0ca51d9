# SPDX-License-Identifier: MIT OR Apache-2.0
"""Translates the arguments with which other libraries load models, or refuses them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..budget import Budget
from ..config import Config, parse_budget
from ..devices import AUTOMATIC, Device, default_device, device_of
from ..errors import ConfigurationError
from ..files._hub import OPTIONS
from ._offload import checked, with_shorthands

#: Arguments for the class of the model. The others change its configuration.
_FOR_THE_CLASS = frozenset(
    (
        "adapter_kwargs",
        "adapter_name",
        "allow_all_kernels",
        "attn_implementation",
        "dtype",
        "experts_implementation",
        "fusion_config",
        "generation_config",
        "kernel_config",
        "key_mapping",
        "torch_dtype",
        "use_kernels",
    )
)

#: Arguments without an effect here: transformers ignores them too, or they say how weights are
#: copied to memory.
_WITHOUT_EFFECT = (
    "_fast_init",
    "_from_auto",
    "_from_pipeline",
    "disable_mmap",
    "from_flax",
    "from_tf",
    "low_cpu_mem_usage",
    "mirror",
    "offload_buffers",
    "offload_state_dict",
    "tqdm_class",
    "weights_only",
)

_ONE_PROCESS = "a model streams in one process; leave it out"
#: Arguments that are refused unless they have one of the values here, and what to do.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "device_mesh": ((None,), _ONE_PROCESS),
    "distributed_config": ((None,), _ONE_PROCESS),
    "gguf_file": (
        (None,),
        "a GGUF file cannot be streamed; convert it once, on a machine with enough memory: "
        "AutoModelForCausalLM.from_pretrained(DIRECTORY, gguf_file=NAME).save_pretrained(TARGET)",
    ),
    "ignore_mismatched_sizes": (
        (None, False),
        "weights of another shape would be replaced by random ones; pass a `model_class` or a "
        "configuration that fits the checkpoint",
    ),
    "load_in_4bit": ((None, False), "weights stream as they are stored; leave it out"),
    "load_in_8bit": ((None, False), "weights stream as they are stored; leave it out"),
    "quantization_config": (
        (None,),
        "weights stream as they are stored; leave it out, or give the path of a smaller model",
    ),
    "proxies": ((None,), "set the environment variables HTTP_PROXY and HTTPS_PROXY"),
    "state_dict": ((None,), "weights stream from the checkpoint; use `offload` for others"),
    "tp_plan": ((None,), _ONE_PROCESS),
    "tp_size": ((None,), _ONE_PROCESS),
    "use_safetensors": (
        (None, True),
        "pickled weights cannot be streamed; convert them to safetensors, and leave it out",
    ),
}

#: Values of ``device_map`` that let the library choose.
STRATEGIES = (AUTOMATIC, "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``from_pretrained``.

    Attributes:
        settings: The settings of the engine.
        model_config: A configuration of transformers that was given, or the path of one.
        hub: Where the model is on the Hub, and how to download it. See ``OPTIONS``.
        variant: The variant of the files with weights, such as "fp16".
        for_class: Arguments for the class of the model.
        for_config: Arguments that change the configuration.
        trust_remote_code: Whether code of the checkpoint may run.
        code_revision: The revision of this code, if it is in another repository.
        loading_info: Whether the caller wants the loading information, too.
        has_device_map: Whether a device map was given.
    """

    settings: Config
    model_config: Any
    hub: dict[str, Any]
    variant: str | None
    for_class: dict[str, Any]
    for_config: dict[str, Any]
    trust_remote_code: bool | None
    code_revision: str | None
    loading_info: bool
    has_device_map: bool

    @classmethod
    def of(
        cls,
        budget: int | str | Budget | Mapping[Any, int | str] | None,
        config: Any,
        kwargs: dict[str, Any],
        device: Device | Mapping[str, Device] | None = None,
        host_budget: int | str | None = None,
    ) -> Arguments:
        """Translates the arguments of a call.

        Raises:
            ConfigurationError: An argument is invalid, cannot be supported, or is given twice.
        """
        kwargs = dict(kwargs)
        for name, (accepted, what_to_do) in _REFUSED.items():
            value = kwargs.pop(name, None)
            if not any(value is each or value == each for each in accepted):
                raise ConfigurationError(f"from_pretrained cannot use `{name}`: {what_to_do}")
        for name in _WITHOUT_EFFECT:
            kwargs.pop(name, None)
        model_config = kwargs.pop("model_config", None)
        if config is not None and not isinstance(config, Config) and _is_model_config(config):
            if model_config is not None:
                raise ConfigurationError(
                    "`config` and `model_config` are both configurations of the model; give one"
                )
            config, model_config = None, config
        device_map = kwargs.pop("device_map", None)
        mapped = device_named_by(device_map)
        if _is_automatic(mapped) and (device or getattr(config, "device", None)) is not None:
            mapped = None  # the choice is made
        if device is None:
            device = mapped
        elif mapped is not None and _differ(mapped, device):
            raise ConfigurationError(
                f"the device is given twice: {device} as `device`, and {mapped} by `device_map`"
            )
        settings = _settings(budget, config, device, host_budget, kwargs)
        for own in settings.on_main_device().on_devices().values():
            own.accelerator()  # refuses a device that cannot be used
        return cls(
            settings=settings,
            has_device_map=device_map is not None,
            model_config=model_config,
            hub={name: kwargs.pop(name) for name in OPTIONS if name in kwargs},
            variant=kwargs.pop("variant", None),
            trust_remote_code=kwargs.pop("trust_remote_code", None),
            code_revision=kwargs.pop("code_revision", None),
            loading_info=bool(kwargs.pop("output_loading_info", False)),
            for_class={name: kwargs.pop(name) for name in list(kwargs) if name in _FOR_THE_CLASS},
            for_config=kwargs,
        )


def _differ(one: Any, other: Any) -> bool:
    """Returns whether two arguments give other devices."""
    mapped = isinstance(one, Mapping) or isinstance(other, Mapping)
    if mapped or _is_automatic(one) or _is_automatic(other):
        return bool(one != other)
    return device_of(one) != device_of(other)


def _is_automatic(device: Any) -> bool:
    return isinstance(device, str) and device == AUTOMATIC


def _is_model_config(config: Any) -> bool:
    """Returns whether an object is a configuration of a model, or the path of one."""
    return hasattr(config, "model_type") or isinstance(config, str | os.PathLike)


@dataclass(frozen=True)
class Memory:
    """The device and the memory for weights that ``max_memory`` gives."""

    device: Device | Mapping[str, Device] | None
    budget: int | str | dict[str, int | str]
    host: int | str | None = None


_NOTHING = (0, "0", "0GB", "0GiB", "0MB", "0MiB")


def memory_of(max_memory: Any, device: Device | Mapping[str, Device] | None) -> Memory | None:
    """Returns what ``max_memory`` means for a model on this device, as accelerate understands it.

    The memory of the device is the budget, and that of the CPU the host budget. A model on several
    devices needs memory of each. "auto" chooses among the devices with memory; without any, the
    model is on the CPU.

    Raises:
        ConfigurationError: The sizes do not fit the device.
    """
    if max_memory is None:
        return None
    automatic = _is_automatic(device)
    if isinstance(device, Mapping) and not isinstance(max_memory, dict):
        raise ConfigurationError(
            f"invalid max_memory: {max_memory!r}: expected a size for each device of the map"
        )
    if isinstance(device, Mapping) or (automatic and isinstance(max_memory, dict)):
        sizes = {
            str(device_of(key)): size
            for key, size in max_memory.items()
            if key not in ("cpu", "disk") and size not in _NOTHING
        }
        if automatic and not sizes:
            return Memory(None, _cpu_memory(max_memory) or 0)
        return Memory(device, sizes, _host(max_memory))
    if (
        device is None
        or automatic
        or device_of(device).type == "cpu"
        or not isinstance(max_memory, dict)
    ):
        most = _cpu_memory(max_memory)
        return None if most is None else Memory(device, most)
    wanted = device_of(device)
    own: Any = 0
    for key, size in max_memory.items():
        if key in ("cpu", "disk") or size in _NOTHING:
            continue
        if key != wanted.index and key != str(wanted):
            raise ConfigurationError(
                f"invalid max_memory: {max_memory!r}: the model streams to {wanted} alone"
            )
        own = size
    if own in _NOTHING:
        raise ConfigurationError(
            f"invalid max_memory: {max_memory!r}: expected a size for {wanted}, to which the model "
            "streams"
        )
    parse_budget(own)
    return Memory(device, own, _host(max_memory))


def _host(max_memory: dict[Any, Any]) -> int | str | None:
    """Returns the memory of the host for weights on a device."""
    size: int | str | None = max_memory.get("cpu")
    return None if size in _NOTHING else size


def _settings(
    budget: int | str | Budget | Mapping[Any, int | str] | None,
    config: Any,
    device: Device | Mapping[str, Device] | None,
    host_budget: int | str | None,
    kwargs: dict[str, Any],
) -> Config:
    """Returns the settings of the engine. Removes the arguments for it from ``kwargs``."""
    if budget is not None and config is not None:
        raise ConfigurationError("cannot combine `budget` and `config`: set the budget in `config`")
    settings = checked(config)
    max_memory = kwargs.pop("max_memory", None)
    if max_memory is not None and device is None:
        device, settings = settings.device, replace(settings, device=None)
    memory = memory_of(max_memory, device)
    if memory is not None:
        if budget is not None or settings.budget is not None or settings.vram_budget_gb is not None:
            raise ConfigurationError(
                "the budget is given twice, also as `max_memory`; give only one"
            )
        budget, device = memory.budget, memory.device
        host_budget = host_budget if memory.host is None else memory.host
    settings = with_shorthands(settings, budget, device, host_budget)
    folder = kwargs.pop("offload_folder", None)
    if folder is not None and settings.storage_path is None:
        settings = replace(settings, storage_path=folder)
    return settings


def device_named_by(device_map: Any) -> Device | Mapping[str, Device] | None:
    """Returns the device that a device map names, or ``None`` for the CPU.

    Weights that the map leaves on the CPU or the disk stream to the device, too. With several
    devices, the result is the map itself. A strategy of accelerate is "auto" if this machine has an
    accelerator.

    Raises:
        ConfigurationError: The map has something else than devices.
    """
    devices = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    found: dict[torch.device, Any] = {}
    automatic = False
    for device in devices:
        if isinstance(device, str) and device in STRATEGIES:
            automatic = True
        elif device is not None and str(device) not in ("cpu", "disk"):
            try:
                found[device_of(device)] = device
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"invalid device_map: {device_map!r}: {error}, or 'auto'"
                ) from error
    if len(found) > 1:
        if automatic:
            raise ConfigurationError(
                f"invalid device_map: {device_map!r}: 'auto' cannot be the device of one module; "
                "name a device for each"
            )
        return {name: "disk" if device is None else device for name, device in device_map.items()}
    if automatic and not found and default_device() is not None:
        return AUTOMATIC
    return next(iter(found.values()), None)


def _cpu_memory(max_memory: Any) -> int | str | None:
    """Returns the memory for weights of ``max_memory``, as accelerate understands it."""
    if max_memory is None:
        return None
    if isinstance(max_memory, dict) and "cpu" in max_memory:
        others = {key: size for key, size in max_memory.items() if key not in ("cpu", "disk")}
        if all(size in _NOTHING for size in others.values()):
            most: int | str = max_memory["cpu"]
            parse_budget(most)
            return most
    raise ConfigurationError(
        f"invalid max_memory: {max_memory!r}: weights stream from storage into CPU memory; expected"
        ' a size for it, such as {"cpu": "6GB"}, or a `budget`'
    )


def dtype_of(given: Any) -> torch.dtype | None:
    """Returns a dtype for weights that is given by itself, or by name, such as "bfloat16".

    ``None`` and "auto" give ``None``.

    Raises:
        ConfigurationError: It is not a floating-point dtype.
    """
    if given is None or given == "auto":
        return None
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(
            f"invalid dtype {given!r}: expected one for weights, such as torch.bfloat16"
        )
    return found


def check_execution_device(device: int | str | torch.device | None) -> None:
    """Refuses a device that is not the CPU, for weights that are not in files.

    Raises:
        ConfigurationError: The device is not the CPU.
    """
    if device is not None and str(device) not in ("cpu", "cpu:0"):
        raise ConfigurationError(
            f"cannot execute on {device}: weights stream to a device from files; give a directory "
            "for them, or use tensorstream.offload(model, checkpoint=..., device=...)"
        )


def device_of_machine(*devices: Any) -> torch.device | None:
    """Returns the first of these devices that is on a remote machine, or ``None``.

    Raises:
        ConfigurationError: A device map has such a device, and others.
    """
    for given in devices:
        device = given
        if isinstance(given, Mapping):
            device = next((each for each in given.values() if device_of_machine(each)), None)
            if device is not None and len(set(given.values())) > 1:
                raise ConfigurationError(
                    f"invalid device_map: {dict(given)!r}: a model is on one remote device"
                )
        if isinstance(device, str) and device.partition(":")[0] == "ts":
            return torch.device(device)
        if isinstance(device, torch.device) and device.type == "ts":
            return device
    return None
