"""Instance groups: as a configuration has them, on the devices that there are, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from shmserve._generated import model_config_pb2 as pb
from shmserve.core.device_names import device_name
from shmserve.errors import ConfigError
from shmserve.protocol.triton_config.backend_kinds import AUTO, CPU, GPU, MODEL, BackendKind
from shmserve.tensor.config_document import ConfigDocument

# More instances than this are a slip of the pen: each one is a process
MAX_INSTANCES = 256


class InstanceGroup(Struct, frozen=True):
    """`count` instances on each of `gpus`; on the CPU where there are none.

    `gpus` are numbers of visible devices (`core.device_names`). A group of KIND_GPU or KIND_AUTO
    may leave them out until it is `placed`. `host_policy`: a name of the setting `host_policies`.
    """

    name: str
    count: int = 1
    kind: str = AUTO
    gpus: tuple[int, ...] = ()
    host_policy: str = ""

    @property
    def size(self) -> int:
        return self.count * max(1, len(self.gpus))

    @property
    def shown_kind(self) -> str:
        """Its kind once it is placed: where its instances are, unless the model chooses."""
        if self.kind == MODEL:
            return MODEL
        return GPU if self.gpus else CPU


class InstancePlace(NamedTuple):
    """Where one instance runs: the `number`th of `group` on `device` ("cpu", "cuda:K").

    `auto`: on the CPU if the device cannot be used.
    """

    group: InstanceGroup
    number: int
    device: str
    auto: bool


def instance_groups(message: Any, model: str, backend: BackendKind) -> tuple[InstanceGroup, ...]:
    """The groups of a ModelConfig message; one of KIND_AUTO if it has none.

    Raises:
        ConfigError: it names the field.
    """
    groups = []
    for index, entry in enumerate(message.instance_group):
        kinds = pb.ModelInstanceGroup.Kind.DESCRIPTOR.values_by_number
        kind = kinds[entry.kind].name if entry.kind in kinds else str(entry.kind)
        if kind not in backend.instance_kinds:
            hint = f" ({backend.device_hint})" if backend.device_hint else ""
            raise ConfigError(
                f"model '{model}': instance_group.kind {kind} is not supported "
                f"by backend '{backend.name}'{hint}"
            )
        if entry.gpus and (kind in (CPU, MODEL) or backend.device_hint):
            raise ConfigError(f"model '{model}': instance_group.gpus does not go with kind {kind}")
        if entry.count < 0:
            raise ConfigError(f"model '{model}': instance_group.count {entry.count} is negative")
        _check_resources(entry.rate_limiter.resources, model)
        name = entry.name or f"{model}_{index}"
        groups.append(
            InstanceGroup(name, entry.count or 1, kind, tuple(entry.gpus), entry.host_policy)
        )
    _check_size(groups, model)
    return tuple(groups) or (InstanceGroup(f"{model}_0"),)


def placed(
    groups: Sequence[InstanceGroup], model: str, backend: BackendKind, devices: int, cupy: bool
) -> tuple[InstanceGroup, ...]:
    """The groups with the devices that their instances are on.

    `devices`: how many CUDA devices are visible; `cupy`: whether CuPy is installed.

    Raises:
        ConfigError: a group must have a device that is not there.
    """
    placed_groups = []
    for group in groups:
        gpus = group.gpus
        if group.kind == GPU:
            _check_devices(gpus, model, devices)
            if backend.needs_cupy and not cupy:
                raise ConfigError(
                    f"model '{model}': instance_group.kind {GPU} needs CuPy: "
                    "pip install 'shmserve[gpu]'"
                )
            gpus = gpus or tuple(range(devices))
        elif group.kind == AUTO and not backend.device_hint:
            usable = cupy and all(gpu in range(devices) for gpu in gpus)
            gpus = (gpus or tuple(range(devices))) if usable else ()
        placed_groups.append(msgspec.structs.replace(group, gpus=gpus))
    _check_size(placed_groups, model)
    return tuple(placed_groups)


def places(groups: Sequence[InstanceGroup]) -> list[InstancePlace]:
    """One place for each instance of placed groups, by the instance's index."""
    return [
        InstancePlace(group, number, device, group.kind == AUTO and bool(group.gpus))
        for group in groups
        for number in range(group.count)
        for device in [device_name(gpu) for gpu in group.gpus] or ["cpu"]
    ]


def shown(config: ConfigDocument, groups: Sequence[InstanceGroup]) -> ConfigDocument:
    """A configuration with its groups as they were placed."""
    entries = tuple(
        msgspec.structs.replace(entry, kind=group.shown_kind, gpus=group.gpus)
        for entry, group in zip(config.groups, groups, strict=True)
    )
    return msgspec.structs.replace(config, instance_group=entries)


def read(config: ConfigDocument) -> tuple[InstanceGroup, ...]:
    """The groups of a configuration that clients are shown."""
    return tuple(
        InstanceGroup(g.name, g.count, g.kind, g.gpus, g.host_policy) for g in config.groups
    )


def _check_devices(gpus: tuple[int, ...], model: str, devices: int) -> None:
    if not devices:
        raise ConfigError(
            f"model '{model}': instance_group.kind {GPU} needs a CUDA device, and none is "
            "visible to the server"
        )
    for gpu in gpus:
        if gpu not in range(devices):
            text = f"instance_group.gpus has {gpu}, but {there_are(devices)}"
            raise ConfigError(f"model '{model}': {text}")


def there_are(devices: int) -> str:
    """In words, with the numbers they have."""
    if devices == 1:
        return "there is 1 device (0)"
    return f"there are {devices} devices (0 to {devices - 1})"


def _check_resources(resources: Sequence[Any], model: str) -> None:
    names = [resource.name.lower() for resource in resources]
    for name in names:
        if not name or names.count(name) > 1:
            raise ConfigError(
                f"model '{model}': instance_group.rate_limiter.resources has '{name}' "
                + ("twice" if name else "for a name")
            )


def _check_size(groups: Sequence[InstanceGroup], model: str) -> None:
    if sum(group.size for group in groups) > MAX_INSTANCES:
        raise ConfigError(
            f"model '{model}': instance_group.count adds up to more than {MAX_INSTANCES}"
        )
