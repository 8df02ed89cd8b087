"""What runs a model: one module a framework, all behind `shmserve.executor.backend.Backend`."""

from __future__ import annotations

import importlib

from shmserve.errors import ConfigError
from shmserve.executor.backend import Backend, Context
from shmserve.executor.backends import reshape
from shmserve.protocol.triton_config.model_config import GRPS, ONNXRUNTIME, PYTHON, PYTORCH
from shmserve.tensor.spec import ModelSpec

# Imported when needed: a process should not pay for the frameworks of other models
_KINDS = {
    PYTHON: ("python", "PythonBackend"),
    ONNXRUNTIME: ("onnxruntime", "OnnxRuntimeBackend"),
    PYTORCH: ("pytorch", "PytorchBackend"),
    GRPS: ("grps.backend", "GrpsBackend"),
}


def create(spec: ModelSpec) -> Backend:
    """A new, unloaded backend for a model.

    Raises:
        ConfigError: there is no such backend.
    """
    if spec.backend not in _KINDS:
        raise ConfigError(f"model '{spec.name}': backend '{spec.backend}' is not supported")
    module, kind = _KINDS[spec.backend]
    backend: Backend = getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
    return backend


def load(context: Context) -> tuple[Backend, ModelSpec]:
    """A loaded backend that speaks the client's shapes, and the completed spec.

    Raises:
        ShmserveError: as `Backend.load`; nothing is left behind then.
    """
    backend = create(context.spec)
    try:
        spec = backend.load(context)
    except BaseException:
        backend.close()
        raise
    return reshape.wrapped(backend, spec), spec
