"""Placement of a model's instances on this host's devices, as the configuration asks."""

from __future__ import annotations

from importlib import util

from shmserve.observe import gpus
from shmserve.protocol.triton_config import instance_groups
from shmserve.protocol.triton_config.backend_kinds import BackendKind
from shmserve.protocol.triton_config.instance_groups import InstanceGroup
from shmserve.protocol.triton_config.model_config import ModelConfig


def groups_of(config: ModelConfig, kind: BackendKind) -> tuple[InstanceGroup, ...]:
    """Return a configuration's groups on this host's devices.

    Raises:
        ConfigError: a device is missing, or software that the backend needs for the device.
    """
    visible = len(gpus.visible_devices())
    cupy = util.find_spec("cupy") is not None  # only executors import CuPy
    return instance_groups.placed(config.instance_groups, config.name, kind, visible, cupy)
