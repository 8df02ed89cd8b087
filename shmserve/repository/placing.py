"""Which devices the instances of a model are on: what it asks for, and what this host has."""

from __future__ import annotations

from importlib import util

import msgspec

from shmserve.errors import ConfigError
from shmserve.grps.repository.project_files import Project
from shmserve.observe import gpus
from shmserve.protocol.triton_config import instance_groups
from shmserve.protocol.triton_config.instance_groups import AUTO, CPU, GPU, InstanceGroup
from shmserve.protocol.triton_config.model_config import ModelConfig


def groups_of(config: ModelConfig) -> tuple[InstanceGroup, ...]:
    """A configuration's groups on this host's devices.

    Raises:
        ConfigError: a device is not there, or what the backend needs for it.
    """
    visible = len(gpus.visible_devices())
    cupy = util.find_spec("cupy") is not None  # found, not imported: that is for executors
    return instance_groups.placed(
        config.instance_groups, config.name, config.backend, visible, cupy
    )


def groups_of_project(
    groups: tuple[InstanceGroup, ...], project: Project, model: str
) -> tuple[InstanceGroup, ...]:
    """The groups of a GRPS project, whose files tell its device: the first that is named there.

    Devices of its `torch` models must be there; for the project's own code the CPU will do.

    Raises:
        ConfigError: a device is not there, or a group is for the CPU only.
    """
    named = [(one, gpu) for one in project.models if (gpu := one.gpu) is not None]
    needed = [(one, gpu) for one, gpu in named if one.inferer_type == "torch"]
    visible = gpus.visible_devices() if named else ()
    where = f"model '{model}': inference.yml: device"
    for one, gpu in needed:
        if gpu >= len(visible):
            there = instance_groups.there_are(len(visible)) if visible else "there is none"
            raise ConfigError(f"{where} '{one.device}' needs a CUDA device, but {there}")
        if any(group.kind == CPU for group in groups):
            raise ConfigError(f"{where} '{one.device}' does not go with instance_group.kind {CPU}")
    if len({gpu for _, gpu in needed}) > 1 and visible[0].startswith("MIG-"):
        raise ConfigError(f"{where}s are several MIG devices, of which a process sees only one")
    first = next((gpu for _, gpu in needed or named), len(visible))
    if first >= len(visible):
        return groups
    kind = GPU if needed else AUTO
    return tuple(
        msgspec.structs.replace(group, kind=kind, gpus=(first,)) if group.kind == AUTO else group
        for group in groups
    )
