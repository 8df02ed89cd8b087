"""Checks of a request to load a model, made by a client or by a model."""

from collections.abc import Mapping

from shmserve import ids
from shmserve.config import Settings
from shmserve.errors import InvalidArgument, NotConfigured, TooLarge
from shmserve.protocol import bounds
from shmserve.protocol.control.data_messages import Parameter

NOT_EXPLICIT = (
    "explicit model load / unload is not allowed if polling is enabled: the server must be started"
    " with model_control = 'explicit'"
)
_FILE = "file:"
_LONGEST_PATH = 1024
_DEEPEST = 8
_MAX_CONFIG = 1 << 20


def check_name(name: str, settings: Settings) -> None:
    """Check that a model of this name may be loaded or unloaded by request. Raise NotConfigured if
    the setting `model_control` allows no model to be loaded by request. Raise InvalidArgument if
    the name is not a valid model name."""
    if settings.model_control != "explicit":
        raise NotConfigured(NOT_EXPLICIT)
    if not name.strip():
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    fault = ids.model_name_fault(name)
    if ".." in name:  # as Triton judges; a folder may have such a name
        fault = "model name must not contain path traversal characters: it has '..'"
    if fault:
        raise InvalidArgument(f"invalid model name '{ascii(name[:64])[1:-1]}', {fault}")


def overrides(
    name: str, parameters: Mapping[str, Parameter | bytes], settings: Settings
) -> tuple[str | None, dict[str, bytes]]:
    """Return the configuration (or None) and the files, by relative path, of a load request. Raise
    InvalidArgument for an unknown parameter, a parameter of a wrong type, a path that leads out of
    the model's folder, or files without a configuration. Raise TooLarge if more than the limits
    allow."""
    config: str | None = None
    files: dict[str, bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            if not isinstance(value, str):
                raise InvalidArgument("parameter 'config' must be a string of JSON")
            config = value
        elif key.startswith(_FILE):
            if not isinstance(value, bytes):
                raise InvalidArgument(f"parameter '{_shown(key)}' must be the file's content")
            path = _path(name, key)
            if path in files:
                raise InvalidArgument(f"parameter '{_shown(key)}': file '{path}' is given twice")
            files[path] = value
        else:
            raise InvalidArgument(
                f"unexpected parameter '{_shown(key)}': 'config' and 'file:<path>' are known"
            )
    if files and config is None:
        raise InvalidArgument(
            f"failed to load '{name}', failed to poll from model repository: files make a model"
            " directory of their own, which requires its configuration: parameter 'config' is"
            " missing"
        )
    _check_sizes(config or "", files, settings)
    return config, files


def _check_sizes(config: str, files: dict[str, bytes], settings: Settings) -> None:
    if len(config) > _MAX_CONFIG:
        raise TooLarge(f"parameter 'config' has more than {_MAX_CONFIG} characters")
    if len(files) > bounds.MAX_OVERRIDE_FILES:
        raise TooLarge(f"more than {bounds.MAX_OVERRIDE_FILES} files")
    limit = settings.max_override_bytes
    if sum(map(len, files.values())) > limit:
        raise TooLarge(f"the files have more than {limit} bytes (max_override_bytes)")


def _path(name: str, key: str) -> str:
    """Return the relative path of a file override, which cannot lead out of the model's folder. As
    in Triton, a slash before the path is ignored."""
    path = key.removeprefix(_FILE).removeprefix("/")
    parts = path.split("/")
    fine = len(path) <= _LONGEST_PATH and len(parts) <= _DEEPEST and path.isprintable()
    for part in parts:
        fine = fine and part not in ("", ".", "..") and len(part.encode()) <= 255
    if not fine or "\\" in path:
        raise InvalidArgument(
            f"failed to load '{name}': invalid file path '{_shown(key)}': the path of a file must"
            " be relative and stay inside the model's folder"
        )
    return path


def _shown(key: str) -> str:
    return ascii(key[:100])[1:-1]
