"""What runs a model: one module a framework, all behind `shmserve.executor.backend.Backend`."""

from __future__ import annotations

import importlib
from typing import Any

from shmserve import extensions
from shmserve.errors import ConfigError
from shmserve.executor.backend import Backend, Context
from shmserve.executor.backends import reshape
from shmserve.tensor.spec import ModelSpec


def create(spec: ModelSpec) -> Backend:
    """A new, unloaded backend for a model.

    Raises:
        ConfigError: there is no such backend.
    """
    if spec.backend not in extensions.names(extensions.BACKENDS):
        raise ConfigError(f"model '{spec.name}': backend '{spec.backend}' is not supported")
    backend: Backend = extensions.load(extensions.BACKENDS, spec.backend)()
    return backend


def load(backend: Backend, context: Context) -> tuple[Backend, ModelSpec]:
    """The backend, loaded, as one that speaks the client's shapes, and the completed spec.

    Raises:
        ShmserveError: as `Backend.load`; nothing is left behind then.
    """
    try:
        spec = backend.load(context)
    except BaseException:
        backend.close()
        raise
    return reshape.wrapped(backend, spec), spec


def import_extra(module: str, backend: str, extra: str) -> Any:
    """The framework of a backend, which is one of our extras.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"backend '{backend}' needs the extra '{extra}': pip install 'shmserve[{extra}]'"
        ) from None
