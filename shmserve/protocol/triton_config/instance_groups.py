"""Instance groups: as a configuration has them, on the devices that there are, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from shmserve._generated import model_config_pb2 as pb
from shmserve.core.devices import device_name
from shmserve.errors import ConfigError

# More instances than this are a slip of the pen: each one is a process
MAX_INSTANCES = 256

AUTO, GPU, CPU, MODEL = "KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"
# KIND_MODEL leaves the device to the model, which ONNX models cannot choose
_KINDS = {
    "python": (AUTO, CPU, GPU, MODEL),
    "pytorch": (AUTO, CPU, GPU, MODEL),
    "onnxruntime": (AUTO, CPU, GPU),
    "grps": (AUTO, CPU),  # the project itself tells its device
}
_NEED_CUPY = ("python", "pytorch")


class InstanceGroup(Struct, frozen=True):
    """`count` instances on each of `gpus`; on the CPU where there are none.

    `gpus` are numbers of visible devices (`core.devices`). A group of KIND_GPU or KIND_AUTO may
    leave them out until it is `placed`.
    """

    name: str
    count: int = 1
    kind: str = AUTO
    gpus: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """How many instances it has."""
        return self.count * max(1, len(self.gpus))

    @property
    def shown_kind(self) -> str:
        """Its kind once it is placed: where its instances are, unless the model chooses."""
        if self.kind == MODEL:
            return MODEL
        return GPU if self.gpus else CPU


class Place(NamedTuple):
    """Where one instance runs: the `number`th of `group` on `device` ("cpu", "cuda:K").

    `auto`: on the CPU if the device cannot be used.
    """

    group: InstanceGroup
    number: int
    device: str
    auto: bool


def instance_groups(message: Any, model: str, backend: str) -> tuple[InstanceGroup, ...]:
    """The groups of a ModelConfig message; one of KIND_AUTO if it has none.

    Raises:
        ConfigError: it names the field.
    """
    groups = []
    for index, entry in enumerate(message.instance_group):
        kinds = pb.ModelInstanceGroup.Kind.DESCRIPTOR.values_by_number
        kind = kinds[entry.kind].name if entry.kind in kinds else str(entry.kind)
        if kind not in _KINDS[backend]:
            hint = " (inference.yml tells the device)" if backend == "grps" else ""
            raise ConfigError(
                f"model '{model}': instance_group.kind {kind} is not supported "
                f"by backend '{backend}'{hint}"
            )
        if entry.gpus and (kind in (CPU, MODEL) or backend == "grps"):
            raise ConfigError(f"model '{model}': instance_group.gpus does not go with kind {kind}")
        if entry.count < 0:
            raise ConfigError(f"model '{model}': instance_group.count {entry.count} is negative")
        name = entry.name or f"{model}_{index}"
        groups.append(InstanceGroup(name, entry.count or 1, kind, tuple(entry.gpus)))
    _check_size(groups, model)
    return tuple(groups) or (InstanceGroup(f"{model}_0"),)


def placed(
    groups: Sequence[InstanceGroup], model: str, backend: str, devices: int, cupy: bool
) -> tuple[InstanceGroup, ...]:
    """The groups with the devices that their instances are on.

    Args:
        groups: what the configuration says.
        model: the model's name.
        backend: the model's backend.
        devices: how many CUDA devices are visible.
        cupy: whether CuPy is installed.

    Raises:
        ConfigError: a group must have a device that is not there.
    """
    found = []
    for group in groups:
        gpus = group.gpus
        if group.kind == GPU:
            _check_devices(gpus, model, devices)
            if backend in _NEED_CUPY and not cupy:
                raise ConfigError(
                    f"model '{model}': instance_group.kind {GPU} needs CuPy: "
                    "pip install 'shmserve[gpu]'"
                )
            gpus = gpus or tuple(range(devices))
        elif group.kind == AUTO and backend != "grps":
            usable = cupy and all(gpu in range(devices) for gpu in gpus)
            gpus = (gpus or tuple(range(devices))) if usable else ()
        found.append(msgspec.structs.replace(group, gpus=gpus))
    _check_size(found, model)
    return tuple(found)


def places(groups: Sequence[InstanceGroup]) -> list[Place]:
    """One place for each instance of placed groups, by the instance's index."""
    return [
        Place(group, number, device, group.kind == AUTO and bool(group.gpus))
        for group in groups
        for number in range(group.count)
        for device in [device_name(gpu) for gpu in group.gpus] or ["cpu"]
    ]


def told(config_json: str, groups: Sequence[InstanceGroup]) -> str:
    """A configuration's JSON form with its groups as they were placed."""
    config: dict[str, Any] = msgspec.json.decode(config_json)
    for entry, group in zip(config["instance_group"], groups, strict=True):
        entry["kind"], entry["gpus"] = group.shown_kind, list(group.gpus)
    return msgspec.json.encode(config).decode()


def read(config: dict[str, Any]) -> tuple[InstanceGroup, ...]:
    """The groups in the JSON form of a configuration."""
    return tuple(
        InstanceGroup(entry["name"], entry["count"], entry["kind"], tuple(entry.get("gpus", ())))
        for entry in config.get("instance_group", ())
    )


def _check_devices(gpus: tuple[int, ...], model: str, devices: int) -> None:
    if not devices:
        raise ConfigError(
            f"model '{model}': instance_group.kind {GPU} needs a CUDA device, and none is "
            "visible to the server"
        )
    for gpu in gpus:
        if gpu not in range(devices):
            raise ConfigError(
                f"model '{model}': instance_group.gpus has {gpu}, but {there_are(devices)}"
            )


def there_are(devices: int) -> str:
    """In words, with the numbers they have."""
    if devices == 1:
        return "there is 1 device (0)"
    return f"there are {devices} devices (0 to {devices - 1})"


def _check_size(groups: Sequence[InstanceGroup], model: str) -> None:
    if sum(group.size for group in groups) > MAX_INSTANCES:
        raise ConfigError(
            f"model '{model}': instance_group.count adds up to more than {MAX_INSTANCES}"
        )
