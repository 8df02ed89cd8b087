"""What runs a model: one module a framework, all behind `shmserve.executor.backend.Backend`."""

from __future__ import annotations

from shmserve.errors import ConfigError
from shmserve.executor.backend import Backend
from shmserve.protocol.model_config import GRPS, ONNXRUNTIME, PYTHON
from shmserve.tensor.spec import ModelSpec


def create(spec: ModelSpec) -> Backend:
    """A new, unloaded backend for a model.

    Raises:
        ConfigError: there is no such backend.
    """
    # imported here: a process should not pay for the frameworks of other models
    if spec.backend == PYTHON:
        from shmserve.executor.backends.python import PythonBackend

        return PythonBackend()
    if spec.backend == ONNXRUNTIME:
        from shmserve.executor.backends.onnxruntime import OnnxRuntimeBackend

        return OnnxRuntimeBackend()
    if spec.backend == GRPS:
        from shmserve.executor.backends.grps.backend import GrpsBackend

        return GrpsBackend()
    raise ConfigError(f"model '{spec.name}': backend '{spec.backend}' is not supported")
