"""Readers of model folders: one a backend, found by `extensions.FOLDER_READERS`.

They run wherever folders are read: in the coordinator (in a thread of its own, when a model is
loaded), in ``shmserve check``, and in executors. They only look: a model's code is not run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from shmserve import extensions
from shmserve.protocol.triton_config import backend_kinds
from shmserve.protocol.triton_config.backend_kinds import (
    ENSEMBLE,
    MODEL_FILE_IN_FOLDER,
    BackendKind,
)
from shmserve.protocol.triton_config.instance_groups import InstanceGroup
from shmserve.protocol.triton_config.model_config import ModelConfig
from shmserve.tensor.spec import ModelSpec


class FolderReader:
    """Models that are one file a version, named as `kind` says. Others override what differs.

    Its name as an extension is that of the backend, `kind.name`. Methods may be called by any
    thread, one at a time or not; `directory` is the model's folder, absolute. They raise nothing
    but ConfigError, whose text clients see: it names fields and files, never a path.
    """

    def __init__(self, kind: BackendKind) -> None:
        self.kind = kind

    def plain_versions(self, directory: str) -> list[int]:
        """The versions of a model in a folder that has no version folders."""
        return []

    def recognises(self, directory: str, version: int) -> bool:
        """Whether a version looks like one of this backend, where no config.pbtxt says so."""
        return os.path.exists(os.path.join(directory, str(version), self.kind.model_file))

    def missing(self, directory: str, version: int, config: ModelConfig) -> str:
        """Why a version cannot be served, for clients; "": nothing is missing."""
        file = config.model_file
        path = os.path.join(directory, str(version), file)
        if os.path.isdir(path):  # a model with its parts: the file of the same name inside
            path = os.path.join(path, MODEL_FILE_IN_FOLDER)
        if not os.path.isfile(path):
            return f"version {version} has no file '{file}'"
        if not os.access(path, os.R_OK):
            return f"version {version}: file '{file}' cannot be read"
        return ""

    def completed(
        self, directory: str, spec: ModelSpec, groups: tuple[InstanceGroup, ...]
    ) -> tuple[ModelSpec, tuple[InstanceGroup, ...]]:
        """A version of this backend, and where its instances are, with what its files say.

        Raises:
            ConfigError: it cannot be served.
        """
        return spec, groups

    def with_parameters(self, spec: ModelSpec) -> ModelSpec:
        """A version of any backend with a parameter that has the reader's name, or begins with
        it and "_": with what those parameters mean for inputs and outputs.

        Raises:
            ConfigError: a parameter has a value that cannot be meant.
        """
        return spec


class EnsembleReader(FolderReader):
    """Ensembles: their versions are empty folders."""

    def recognises(self, directory: str, version: int) -> bool:
        return False

    def missing(self, directory: str, version: int, config: ModelConfig) -> str:
        return ""


ensemble = EnsembleReader(ENSEMBLE)
python, onnxruntime, pytorch = (
    FolderReader(kind) for kind in backend_kinds.BUILT_IN.values() if kind is not ENSEMBLE
)


def readers() -> dict[str, FolderReader]:
    """All readers, by backend; raises as `extensions.load`."""
    return extensions.load_all(extensions.FOLDER_READERS)


def kinds() -> Mapping[str, BackendKind]:
    """What configurations of every backend may say; raises as `readers`."""
    return {name: reader.kind for name, reader in readers().items()}
