"""Loading a model instance: its device first, then its code, then its warm-up."""

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
    """A loaded and warmed-up backend, and the completed spec.

    Raises:
        Exception: what went wrong; nothing is left behind then.
    """
    backend = backends.create(instance.spec)
    context = _context(instance, devices, models, backend.chooses_device)
    backend, spec = ragged.load(backend, context)
    try:
        if backend.device == CPU:  # if it was to be on a GPU, it cannot use that
            devices.stay_on_cpu()
            context = msgspec.structs.replace(context, device=CPU)
        else:
            devices.open()
        warm_up(backend, spec, context)
        failed = devices.settle()  # what fails on a device shows when it is waited for
        if failed is not None:
            raise failed
    except BaseException:
        backend.close()
        raise
    return backend, spec


def _context(
    instance: Instance, devices: Devices, models: OtherModels, backend_chooses: bool
) -> Context:
    """What the backend is told. Unless it chooses the device itself, that is opened before a
    model's own code runs, so that it is the one that CuPy and torch use without being told."""
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
