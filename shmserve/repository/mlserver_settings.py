"""MLServer's description of a model, `model-settings.json`, read as a configuration.

The file lies in the model's folder, which then needs no version folder, or in each version's
folder. `implementation` chooses the backend, and `parameters.uri` the model's file. Metadata of
outputs is not read, because the model itself describes its outputs. docs/from_mlserver.md has
every field.
"""

import os
import re
from typing import Annotated, Any

from msgspec import Meta, Struct

from shmserve.errors import ConfigError, UnreadableMessage
from shmserve.protocol.decoding import json_decoder
from shmserve.repository import text_files
from shmserve.tensor.dtypes import DATATYPES

FILE = "model-settings.json"
_MOST_BYTES = 1 << 20
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_BACKENDS = {  # package of the implementation -> backend
    "mlserver_sklearn": "sklearn",
    "mlserver_xgboost": "xgboost",
    "mlserver_lightgbm": "lightgbm",
    "mlserver_huggingface": "huggingface",
}


class MlserverTensor(Struct):
    """An input in the settings' metadata."""

    name: str
    datatype: str = ""
    shape: tuple[int, ...] = ()


class _Parameters(Struct):
    uri: str | None = None
    version: str | None = None
    extra: dict[str, Any] | None = None


class ModelSettings(Struct):
    """Fields with a meaning here."""

    implementation: str = ""
    name: str = ""
    inputs: tuple[MlserverTensor, ...] | None = None
    max_batch_size: int = 0
    max_batch_time: Annotated[float, Meta(ge=0, le=1e9)] = 0.0  # in seconds
    parameters: _Parameters | None = None

    @property
    def backend(self) -> str:
        """Backend of the implementation; "": not served here."""
        return _BACKENDS.get(self.implementation.partition(".")[0], "")

    @property
    def version(self) -> int:
        """Version of the model; 1 if the file's version is no positive number."""
        text = (self.parameters and self.parameters.version) or ""
        return int(text) if _VERSION.fullmatch(text) else 1

    @property
    def uri(self) -> str:
        """Path of the model's file or folder, relative to the settings' folder."""
        return (self.parameters and self.parameters.uri) or "."

    @property
    def extra(self) -> dict[str, Any]:
        """Parameters of the backend."""
        return (self.parameters and self.parameters.extra) or {}


_decode = json_decoder(ModelSettings)


def read(folder: str, model: str) -> ModelSettings | None:
    """Return the settings in a folder, or None without the file. Raise ConfigError for an
    unreadable file and for wrong fields; the text names `model`."""
    path = os.path.join(folder, FILE)
    if not os.path.lexists(path):
        return None
    what = f"model '{model}': {FILE}"
    try:
        settings: ModelSettings = _decode(text_files.read_text(path, _MOST_BYTES, what).encode())
    except UnreadableMessage as ex:
        raise ConfigError(f"{what}: {ex}") from None
    return settings


def file_of(settings: ModelSettings, folder: str, files: tuple[str, ...], model: str) -> str:
    """Return the model's file, relative to the settings' folder. `files`: names to look for if
    the settings name a folder. Raise ConfigError for a file outside of the folder."""
    for root in (folder, os.path.realpath(folder)):  # an absolute uri has the real path
        path = os.path.normpath(os.path.join(root, settings.uri))
        if "\0" in path or "://" in settings.uri or os.path.commonpath([root, path]) != root:
            continue
        if os.path.isdir(path):
            named = (os.path.join(path, file) for file in files)
            path = next(filter(os.path.exists, named), os.path.join(path, files[0]))
        return os.path.relpath(path, root)
    raise ConfigError(
        f"model '{model}': {FILE}: parameters.uri '{text_files.printable(settings.uri)}' is not"
        f" inside the folder of {FILE}: move the model there"
    )


def configuration(settings: ModelSettings, model: str) -> dict[str, Any]:
    """Return the settings in the JSON form of config.pbtxt, without the model's file. Raise
    ConfigError for settings without an equivalent."""
    where = f"model '{model}': {FILE}"
    if settings.name not in ("", model):
        name = text_files.printable(settings.name)
        raise ConfigError(
            f"{where}: name '{name}' must be the folder's name: rename the folder, or write"
            f" '{name}=FOLDER' in model_repository"
        )
    batched = settings.max_batch_size > 1
    config: dict[str, Any] = {
        "backend": settings.backend,
        "input": [_entry(tensor, batched, where) for tensor in settings.inputs or ()],
        "parameters": {
            name: {"string_value": value}
            for name, value in settings.extra.items()
            if isinstance(value, str)
        },
    }
    if batched:
        delay_us = int(settings.max_batch_time * 1e6)
        config["max_batch_size"] = settings.max_batch_size
        config["dynamic_batching"] = {"max_queue_delay_microseconds": delay_us}
    return config


def _entry(tensor: MlserverTensor, batched: bool, where: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": tensor.name}
    if tensor.datatype:
        if tensor.datatype not in DATATYPES:
            datatype, name = map(text_files.printable, (tensor.datatype, tensor.name))
            raise ConfigError(f"{where}: datatype '{datatype}' of input '{name}' is unknown")
        entry["data_type"] = DATATYPES[tensor.datatype].config_name
    if tensor.shape:
        entry["dims"] = tensor.shape[1:] if batched else (-1, *tensor.shape[1:])
    return entry
