"""Which devices the instances of a model are on: what it asks for, and what this host has."""

from __future__ import annotations

from importlib import util

from shmserve.observe import gpus
from shmserve.protocol.triton_config import instance_groups
from shmserve.protocol.triton_config.backend_kinds import BackendKind
from shmserve.protocol.triton_config.instance_groups import InstanceGroup
from shmserve.protocol.triton_config.model_config import ModelConfig


def groups_of(config: ModelConfig, kind: BackendKind) -> tuple[InstanceGroup, ...]:
    """A configuration's groups on this host's devices.

    Raises:
        ConfigError: a device is not there, or what the backend needs for it.
    """
    visible = len(gpus.visible_devices())
    cupy = util.find_spec("cupy") is not None  # found, not imported: that is for executors
    return instance_groups.placed(config.instance_groups, config.name, kind, visible, cupy)
