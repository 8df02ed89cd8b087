"""Extensions of the server: the groups, and what belongs to each: our own, then installed ones.

An extension is an object that is named, as ``module:attribute``, in one of these groups:

    BACKENDS         executor.backend.Backend: the class, which runs models
    FOLDER_READERS   repository.folder_reader.FolderReader: an object that reads model folders
    HTTP_ROUTES      frontends.http.route_table.HttpExtension: adds HTTP routes
    GRPC_SERVICES    frontends.grpc.services.GrpcExtension: adds gRPC services
    SETTINGS         config.ExtensionSettings: a class of settings
    NATIVE_REQUESTS  executor.backends.native.request_forms.FormChooser: what model.py is given

The named type documents the object. docs/extending.md has an example of a distribution with
extensions.

The server's own extensions are listed here and not as entry points of its distribution: the server
also runs from a source tree whose metadata is missing or older than the code. Nothing is imported
before it is needed, and each process loads only its own groups.
"""

import functools
import importlib
import logging
import re
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

from shmserve.errors import ConfigError

log = logging.getLogger(__name__)

BACKENDS = "shmserve.backends"
FOLDER_READERS = "shmserve.folder_readers"
HTTP_ROUTES = "shmserve.http_routes"
GRPC_SERVICES = "shmserve.grpc_services"
NATIVE_REQUESTS = "shmserve.native_requests"
SETTINGS = "shmserve.settings"

_READERS = "shmserve.repository.folder_reader"
_RUNTIMES = "shmserve.repository.runtime_readers"
_ESTIMATORS = "shmserve.executor.backends.estimators"
_OURS = {
    BACKENDS: {
        "python": "shmserve.executor.backends.python.python_backend:PythonBackend",
        "onnxruntime": "shmserve.executor.backends.onnx.backend:OnnxRuntimeBackend",
        "pytorch": "shmserve.executor.backends.torch.torchscript:PytorchBackend",
        "sklearn": f"{_ESTIMATORS}.sklearn_models:SklearnBackend",
        "xgboost": f"{_ESTIMATORS}.boosters:XgboostBackend",
        "lightgbm": f"{_ESTIMATORS}.boosters:LightgbmBackend",
        "huggingface": f"{_ESTIMATORS}.pipelines:HuggingfaceBackend",
        "grps": "shmserve.grps.executor.project_backend:GrpsBackend",
    },
    FOLDER_READERS: {
        "python": f"{_READERS}:python",
        "onnxruntime": f"{_READERS}:onnxruntime",
        "pytorch": f"{_READERS}:pytorch",
        "ensemble": f"{_READERS}:ensemble",
        "sklearn": f"{_RUNTIMES}:sklearn",
        "xgboost": f"{_RUNTIMES}:xgboost",
        "lightgbm": f"{_RUNTIMES}:lightgbm",
        "huggingface": f"{_RUNTIMES}:huggingface",
        "grps": "shmserve.grps.repository.project_reader:reader",
    },
    HTTP_ROUTES: {"grps": "shmserve.grps.frontend.http.grps_routes:add_routes"},
    GRPC_SERVICES: {"grps": "shmserve.grps.frontend.rpcs:add_service"},
    NATIVE_REQUESTS: {"grps": "shmserve.grps.executor.message_requests:form_of"},
    SETTINGS: {"grps": "shmserve.grps.settings:GrpsSettings"},
}
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@functools.cache
def _installed() -> Any:  # of another type before Python 3.12
    return metadata.entry_points()


def check() -> None:
    """Check the names of all groups before anything is started. Raises as `names`."""
    for group in _OURS:
        names(group)


def load_own(group: str) -> None:
    """Import the server's own extensions of a group, without installed ones."""
    for place in _OURS[group].values():
        importlib.import_module(place.partition(":")[0])


@functools.cache
def names(group: str) -> dict[str, str]:
    """Return the extensions of a group, our own first: name -> ``module:attribute``.

    Raises:
        ConfigError: two extensions have the same name, or a name cannot be used.
    """
    known = dict(_OURS[group])
    for entry in sorted(_installed().select(group=group)):
        if not _NAME.fullmatch(entry.name):
            raise ConfigError(f"extension '{entry.name}' of {group}: not a name such as my_name")
        if known.setdefault(entry.name, entry.value) != entry.value:
            raise ConfigError(f"extension '{entry.name}' of {group} is there twice")
    return known


@functools.cache
def load(group: str, name: str) -> Any:
    """Return the object of an extension.

    Raises:
        ConfigError: the name is unknown, the object cannot be imported, or as `names`.
    """
    target = names(group).get(name)
    if target is None:
        raise ConfigError(f"there is no extension '{name}' of {group}")
    module, _, attribute = target.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as ex:
        # Logged only: the text has paths of the server, and the error may reach clients
        log.error("extension %s of %s cannot be imported", name, group, exc_info=ex)
        raise ConfigError(f"extension '{name}' of {group} cannot be imported (see the log)") from ex


def concerned(group: str, parameters: Iterable[str]) -> Iterator[Any]:
    """Yield the extensions of a group for a model with these configuration parameters. An
    extension matches if a parameter is its name, or begins with its name and "_". Raises as
    `load`."""
    for name in names(group):
        if any(key == name or key.startswith(f"{name}_") for key in parameters):
            yield load(group, name)


def load_all(group: str) -> dict[str, Any]:
    """Return all extensions of a group by name, our own first; raises as `load`."""
    return {name: load(group, name) for name in names(group)}
