"""Loading of a model instance: device, code and warm-up, in this order."""

from __future__ import annotations

import logging

import msgspec

from shmserve.errors import ConfigError
from shmserve.executor import backends
from shmserve.executor.backend import CPU, Backend, Context
from shmserve.executor.calling import NO_MODELS, OtherModels
from shmserve.executor.devices import Devices
from shmserve.executor.process.warmup import warm_up
from shmserve.executor.wrappers import ragged
from shmserve.protocol.control.link_messages import Instance
from shmserve.tensor.spec import ModelSpec

log = logging.getLogger(__name__)


def load(
    instance: Instance, devices: Devices, models: OtherModels = NO_MODELS
) -> tuple[Backend, ModelSpec]:
    """Load and warm up the model of an instance. Return the backend and the completed spec.

    Raises:
        Exception: the cause of the failure; nothing is left behind.
    """
    backend = backends.create(instance.spec)
    context = _context(instance, devices, models, backend.chooses_device)
    backend, spec = ragged.load(backend, context)
    try:
        if backend.device == CPU:  # also the case if the backend could not use the instance's GPU
            devices.stay_on_cpu()
            context = msgspec.structs.replace(context, device=CPU)
        else:
            devices.open()
        warm_up(backend, spec, context)
        failed = devices.settle()  # errors on a device show only in a wait for the device
        if failed is not None:
            raise failed
    except BaseException:
        backend.close()
        raise
    return backend, spec


def _context(
    instance: Instance, devices: Devices, models: OtherModels, backend_chooses: bool
) -> Context:
    """Return the backend's context. Unless the backend chooses the device itself, open the device
    before the model's code runs: CuPy and torch then use that device by default."""
    spec = instance.spec
    device = CPU if devices.ordinal is None else f"cuda:{devices.ordinal}"
    context = Context(spec, instance.directory, instance.name, device, instance.auto, models)
    if devices.ordinal is None or backend_chooses:
        return context
    try:
        devices.open().choose()
    except ConfigError as ex:
        if not instance.auto:
            raise
        log.info("runs on the CPU: %s", ex.message)
        devices.stay_on_cpu()
        return msgspec.structs.replace(context, device=CPU)
    return context
