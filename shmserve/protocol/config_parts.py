"""The parts of a configuration, each checked by itself: tensors, labels, instances, versions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct

from shmserve._generated import model_config_pb2 as pb
from shmserve.errors import ConfigError
from shmserve.tensor.dtypes import BY_CONFIG_NAME
from shmserve.tensor.spec import TensorSpec

# More instances than this are a slip of the pen: each one is a process
MAX_INSTANCES = 256


class VersionPolicy(Struct, frozen=True):
    """Which version folders are served; `count` of LATEST, `versions` of SPECIFIC."""

    kind: Literal["latest", "all", "specific"] = "latest"
    count: int = 1
    versions: tuple[int, ...] = ()

    def select(self, present: Iterable[int]) -> tuple[int, ...]:
        """The versions to serve, ascending; SPECIFIC ones also if they are not present."""
        ordered = sorted(present)
        if self.kind == "specific":
            return tuple(sorted(self.versions))
        return tuple(ordered if self.kind == "all" else ordered[-self.count :])


class InstanceGroup(Struct, frozen=True):
    """`count` instances on one kind of device."""

    name: str
    count: int = 1
    kind: str = "KIND_CPU"
    device: str = "cpu"


def tensors(entries: Any, model: str, kind: str, batched: bool) -> tuple[TensorSpec, ...]:
    found: dict[str, TensorSpec] = {}
    for entry in entries:
        where = f"model '{model}': {kind} '{entry.name}'"
        if not entry.name:
            raise ConfigError(f"model '{model}': an {kind} has no name")
        if entry.name in found:
            raise ConfigError(f"{where} is given twice")
        # an open enum: a number the schema does not know has no name
        names = pb.DataType.DESCRIPTOR.values_by_number
        name = names[entry.data_type].name if entry.data_type in names else str(entry.data_type)
        if name not in BY_CONFIG_NAME:
            raise ConfigError(f"{where}: data_type is missing or invalid ({name})")
        if not entry.dims:
            raise ConfigError(f"{where}: dims is missing")
        for dim in entry.dims:
            if dim != -1 and dim < 1:
                raise ConfigError(f"{where}: dims has {dim}, which is neither -1 nor positive")
        shape = ((-1,) if batched else ()) + tuple(entry.dims)
        optional = kind == "input" and entry.optional
        found[entry.name] = TensorSpec(entry.name, BY_CONFIG_NAME[name].name, shape, optional)
    return tuple(found.values())


def label_files(message: Any, model: str) -> dict[str, str]:
    files: dict[str, str] = {}
    for output in message.output:
        if not output.label_filename:
            continue
        if not all(is_plain_file_name(part) for part in output.label_filename.split("/")):
            raise ConfigError(
                f"model '{model}': output '{output.name}': label_filename "
                f"'{output.label_filename}' is not a file inside the model's folder"
            )
        files[output.name] = output.label_filename
    return files


def is_plain_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in "/\\" or ord(c) < 32 for c in name)


def instance_groups(message: Any, model: str, backend: str) -> tuple[InstanceGroup, ...]:
    groups = []
    for index, entry in enumerate(message.instance_group):
        kinds = pb.ModelInstanceGroup.Kind.DESCRIPTOR.values_by_number
        kind = kinds[entry.kind].name if entry.kind in kinds else str(entry.kind)
        if kind == "KIND_GPU":
            raise ConfigError(
                f"model '{model}': instance_group.kind KIND_GPU needs the gpu extra, "
                "which is not available"
            )
        # KIND_MODEL leaves the device to the model, which only Python code can choose
        if kind not in ("KIND_AUTO", "KIND_CPU") and (kind, backend) != ("KIND_MODEL", "python"):
            raise ConfigError(
                f"model '{model}': instance_group.kind {kind} is not supported "
                f"by backend '{backend}'"
            )
        if entry.count < 0:
            raise ConfigError(f"model '{model}': instance_group.count {entry.count} is negative")
        name = entry.name or f"{model}_{index}"
        kept = "KIND_MODEL" if kind == "KIND_MODEL" else "KIND_CPU"
        groups.append(InstanceGroup(name, entry.count or 1, kept))
    if sum(group.count for group in groups) > MAX_INSTANCES:
        raise ConfigError(
            f"model '{model}': instance_group.count adds up to more than {MAX_INSTANCES}"
        )
    return tuple(groups) or (InstanceGroup(f"{model}_0"),)


def version_policy(message: Any, model: str) -> VersionPolicy:
    policy = message.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return VersionPolicy("all")
    if choice == "specific":
        versions = tuple(policy.specific.versions)
        if not versions or any(v < 1 for v in versions) or len(set(versions)) != len(versions):
            raise ConfigError(
                f"model '{model}': version_policy.specific.versions must be distinct "
                "positive numbers"
            )
        return VersionPolicy("specific", versions=versions)
    return VersionPolicy("latest", count=policy.latest.num_versions or 1)
