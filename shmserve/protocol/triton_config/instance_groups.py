"""Instance groups: read from a configuration, placed on devices, and split into instances."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from shmserve._generated import model_config_pb2 as pb
from shmserve.core.device_names import device_name
from shmserve.errors import ConfigError
from shmserve.protocol.triton_config.backend_kinds import AUTO, CPU, GPU, MODEL, BackendKind
from shmserve.tensor.config_document import ConfigDocument

# A larger number is a typing error: each instance is a process.
MAX_INSTANCES = 256


class InstanceGroup(Struct, frozen=True):
    """`count` instances on each GPU of `gpus`, or on the CPU if `gpus` is empty. `gpus`: numbers of
    visible devices (`core.device_names`). A group of KIND_GPU or KIND_AUTO may have no `gpus` until
    `placed`. `host_policy`: a name in the setting `host_policies`."""

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
        """The kind of a placed group: KIND_MODEL, or the kind of device that the group is on."""
        if self.kind == MODEL:
            return MODEL
        return GPU if self.gpus else CPU


class InstancePlace(NamedTuple):
    """Place of an instance: number `number` of `group`, on `device` ("cpu" or "cuda:K"). `auto`:
    the instance may run on the CPU if the device cannot be used."""

    group: InstanceGroup
    number: int
    device: str
    auto: bool


def instance_groups(message: Any, model: str, backend: BackendKind) -> tuple[InstanceGroup, ...]:
    """Return the groups of a ModelConfig message, or a single group of KIND_AUTO by default. Raise
    ConfigError for a wrong field; the text names the field."""
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
    """Return the groups with the devices of their instances. `devices`: number of visible CUDA
    devices. `cupy`: CuPy is installed."""
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
    """Return the place of each instance of placed groups, in the order of instance numbers."""
    return [
        InstancePlace(group, number, device, group.kind == AUTO and bool(group.gpus))
        for group in groups
        for number in range(group.count)
        for device in [device_name(gpu) for gpu in group.gpus] or ["cpu"]
    ]


def shown(config: ConfigDocument, groups: Sequence[InstanceGroup]) -> ConfigDocument:
    """Return a configuration that shows the groups as placed."""
    entries = tuple(
        msgspec.structs.replace(entry, kind=group.shown_kind, gpus=group.gpus)
        for entry, group in zip(config.groups, groups, strict=True)
    )
    return msgspec.structs.replace(config, instance_group=entries)


def read(config: ConfigDocument) -> tuple[InstanceGroup, ...]:
    """Return the groups of a configuration document."""
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
    """Return the number and the numbering of devices in words."""
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
