"""Readers of model folders, one per backend, found by `extensions.FOLDER_READERS`.

Readers run in the coordinator (in a separate thread, when a model is loaded), in ``shmserve
check``, and in executors. A reader never runs a model's code.
"""

import glob
import os
from collections.abc import Mapping
from typing import Any

from shmserve import extensions
from shmserve.errors import ConfigError
from shmserve.protocol.triton_config import document
from shmserve.protocol.triton_config.backend_kinds import (
    BUILT_IN,
    ENSEMBLE,
    EXPORTED,
    MODEL_FILE_IN_FOLDER,
    ONNXRUNTIME,
    PYTHON,
    PYTORCH,
    BackendKind,
)
from shmserve.protocol.triton_config.instance_groups import InstanceGroup
from shmserve.protocol.triton_config.model_config import ModelConfig
from shmserve.repository import mlserver_settings
from shmserve.tensor.spec import ModelSpec

CONFIG_FILE = "config.pbtxt"


def version_folder(directory: str, version: str) -> str:
    """Return the folder of a version's files: without version folders, the model's own."""
    folder = os.path.join(directory, version)
    return folder if os.path.isdir(folder) and not is_mlservers(directory) else directory


def has_config(directory: str) -> bool:
    """Return True if a model's folder has a config.pbtxt, readable or not."""
    return os.path.lexists(os.path.join(directory, CONFIG_FILE))


def is_mlservers(directory: str) -> bool:
    """Return True if a model's folder is MLServer's: one version, whatever folders it has."""
    if has_config(directory):
        return False
    try:
        settings = mlserver_settings.read(directory, os.path.basename(directory))
    except ConfigError:  # raised again where the settings are used
        return True
    return bool(settings and settings.backend)


def _remedy(directory: str, version: int, file: str) -> str:
    """Return what to do about a file that is missing beside MLServer's settings, but lies in a
    folder such as 1; else ""."""
    if version_folder(directory, str(version)) != directory:
        return ""
    found = min(glob.glob(f"[1-9]*/{glob.escape(file)}", root_dir=directory), default="")
    what = f": name {found} in parameters.uri of {mlserver_settings.FILE}, or remove this file"
    return found and f"{what}, beside which '{found.partition('/')[0]}' is no version"


class FolderReader:
    """Reader for models with one file per version, named as in `kind`. Base of other readers.

    The reader's name as an extension is the backend's name, `kind.name`. Any thread may call the
    methods, also at the same time. `directory` is the absolute path of the model's folder. Methods
    raise only ConfigError. Clients see the text, so the text names fields and files, never a path.
    """

    def __init__(self, kind: BackendKind) -> None:
        self.kind = kind

    def plain_versions(self, directory: str) -> list[int]:
        """Return the versions of a model whose folder has no version folders."""
        return []

    def recognises(self, directory: str, version: int) -> bool:
        """Return True if a version's files look like this backend's. Called if config.pbtxt names
        no backend."""
        folder = os.path.join(directory, str(version))
        found = any(os.path.exists(os.path.join(folder, file)) for file in self.kind.files)
        return found and not is_mlservers(directory)

    def config_optional(self, directory: str, versions: list[int]) -> bool:
        """Return True if the versions of a model are served without a config.pbtxt, too."""
        return self.kind.config_optional

    def configuration(self, directory: str, versions: list[int]) -> dict[str, Any]:
        """Return the JSON form of a configuration from other files than config.pbtxt, or an empty
        dict. Raise ConfigError if such a file is wrong."""
        return {}

    def model_file(self, directory: str, version: str, configured: str) -> str:
        """Return the name of a version's model file. `configured`: the name in the configuration,
        or the first of the backend's names, which stands for all of the names."""
        folder = version_folder(directory, version)
        names = self.kind.files if configured == self.kind.model_file else ()
        present = (file for file in names if os.path.exists(os.path.join(folder, file)))
        return next(present, configured)

    def missing(self, directory: str, version: int, config: ModelConfig) -> str:
        """Return the reason, for clients, why a version cannot be served, or ""."""
        folder = version_folder(directory, str(version))
        if self.kind.name in BUILT_IN and is_mlservers(directory):
            return (
                f"version {version}: backend '{self.kind.name}' needs a version folder, and beside"
                f" {mlserver_settings.FILE} none counts: name another backend, or remove this file"
            )
        file = self.model_file(directory, str(version), config.model_file)
        path = os.path.join(folder, file)
        if os.path.isdir(path):  # a model in several files, of which this is the main file
            path = os.path.join(path, MODEL_FILE_IN_FOLDER)
        if not os.path.isfile(path):
            return f"version {version} has no file '{file}'{_remedy(directory, version, file)}"
        if not os.access(path, os.R_OK):
            return f"version {version}: file '{file}' cannot be read"
        return ""

    def completed(
        self, directory: str, spec: ModelSpec, groups: tuple[InstanceGroup, ...]
    ) -> tuple[ModelSpec, tuple[InstanceGroup, ...]]:
        """Return a version of this backend and its groups, completed from the model's files. Raise
        ConfigError if the version cannot be served."""
        return spec, groups

    def with_parameters(self, spec: ModelSpec) -> ModelSpec:
        """Return a version of any backend, with this reader's parameters applied to its tensors.

        Called if a parameter's name is the reader's name, or begins with this name and "_". Raise
        ConfigError if a parameter has a senseless value.
        """
        return spec


class EnsembleReader(FolderReader):
    """Reader for ensembles, whose versions are empty folders."""

    def recognises(self, directory: str, version: int) -> bool:
        return False

    def missing(self, directory: str, version: int, config: ModelConfig) -> str:
        return ""


class PytorchReader(FolderReader):
    """Reader for TorchScript models, which need a configuration, and for exported programs, which
    describe all tensors."""

    def config_optional(self, directory: str, versions: list[int]) -> bool:
        return any(
            os.path.exists(os.path.join(directory, str(version), file))
            for version in versions
            for file in self.kind.other_files
        )

    def completed(
        self, directory: str, spec: ModelSpec, groups: tuple[InstanceGroup, ...]
    ) -> tuple[ModelSpec, tuple[InstanceGroup, ...]]:
        if not spec.config.model_file.endswith(EXPORTED):
            document.require_complete(spec)
        return spec, groups


ensemble = EnsembleReader(ENSEMBLE)
python = FolderReader(BUILT_IN[PYTHON])
onnxruntime = FolderReader(BUILT_IN[ONNXRUNTIME])
pytorch = PytorchReader(BUILT_IN[PYTORCH])


def readers() -> dict[str, FolderReader]:
    """Return all readers by backend. Raises as `extensions.load`."""
    return extensions.load_all(extensions.FOLDER_READERS)


def kinds() -> Mapping[str, BackendKind]:
    """Return the description of every backend, by name. Raises as `readers`."""
    return {name: reader.kind for name, reader in readers().items()}
