"""Backends: run models, one module per framework, behind `shmserve.executor.backend.Backend`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from shmserve import extensions
from shmserve.errors import ConfigError
from shmserve.executor.backend import Backend, Context
from shmserve.executor.backends import reshape
from shmserve.tensor.spec import ModelSpec

_FRAMEWORKS = {"onnxruntime": ("onnxruntime", "onnx"), "pytorch": ("torch", "torch")}


def create(spec: ModelSpec) -> Backend:
    """Return a new, unloaded backend for a model. Raise ConfigError if the backend that the model
    names does not exist."""
    if spec.backend not in extensions.names(extensions.BACKENDS):
        raise ConfigError(f"model '{spec.name}': backend '{spec.backend}' is not supported")
    backend: Backend = extensions.load(extensions.BACKENDS, spec.backend)()
    return backend


def load(backend: Backend, context: Context) -> tuple[Backend, ModelSpec]:
    """Load a backend. Return the backend for requests in the client's shapes, and the completed
    spec. Raise ShmserveError as `Backend.load`; the backend has been closed by then."""
    try:
        spec = backend.load(context)
    except BaseException:
        backend.close()
        raise
    return reshape.wrapped(backend, spec), spec


def import_extra(module: str, backend: str, extra: str) -> Any:
    """Import the framework of a backend, which an extra of this package installs. Raise ConfigError
    if the extra is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(_needs(backend, extra)) from None


def check_extra(backend: str) -> None:
    """Check that the framework of a backend is installed, without importing it. Raise ConfigError
    if the framework is not installed."""
    module, extra = _FRAMEWORKS.get(backend, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError(_needs(backend, extra))


def _needs(backend: str, extra: str) -> str:
    return f"backend '{backend}' needs the extra '{extra}': pip install 'shmserve[{extra}]'"
