"""Readers of models of other libraries: a file per version, or MLServer's folders."""

import os
from typing import Any

from shmserve.errors import ConfigError
from shmserve.protocol.triton_config.backend_kinds import RUNTIMES, BackendKind
from shmserve.repository import mlserver_settings
from shmserve.repository.folder_reader import FolderReader, has_config, version_folder
from shmserve.repository.mlserver_settings import ModelSettings


class RuntimeReader(FolderReader):
    """Reader of a runtime's models. `begins`: first bytes of the runtime's files, where other
    runtimes have files of the same names."""

    def __init__(self, kind: BackendKind, begins: bytes = b"") -> None:
        super().__init__(kind)
        self._begins = begins

    def plain_versions(self, directory: str) -> list[int]:
        try:
            settings = self._settings(directory, directory)
        except ConfigError:  # raised again by `recognises`, as a fault of the model alone
            return [1]
        return [settings.version] if settings else []

    def recognises(self, directory: str, version: int) -> bool:
        folder = version_folder(directory, str(version))
        if mlserver_settings.read(folder, os.path.basename(directory)) is not None:
            return self._settings(directory, folder) is not None
        for file in self.kind.files:
            path = os.path.join(folder, file)
            if not os.path.isfile(path):  # a pipe would never open
                continue
            try:
                with open(path, "rb") as opened:
                    if opened.read(len(self._begins)) == self._begins:
                        return True
            except OSError:
                continue
        return False

    def configuration(self, directory: str, versions: list[int]) -> dict[str, Any]:
        for version in reversed(versions):
            folder = version_folder(directory, str(version))
            if settings := self._settings(directory, folder):
                return mlserver_settings.configuration(settings, os.path.basename(directory))
        return {}

    def model_file(self, directory: str, version: str, configured: str) -> str:
        folder = version_folder(directory, version)
        chosen = configured != self.kind.model_file or has_config(directory)
        settings = None if chosen else self._settings(directory, folder)
        if settings is None:
            return super().model_file(directory, version, configured)
        model = os.path.basename(directory)
        return mlserver_settings.file_of(settings, folder, self.kind.files, model)

    def _settings(self, directory: str, folder: str) -> ModelSettings | None:
        """Return MLServer's settings in a folder, if the settings choose the reader's runtime."""
        settings = mlserver_settings.read(folder, os.path.basename(directory))
        return settings if settings and settings.backend == self.kind.name else None


sklearn = RuntimeReader(RUNTIMES["sklearn"])
xgboost = RuntimeReader(RUNTIMES["xgboost"], b"{")  # JSON and UBJSON
lightgbm = RuntimeReader(RUNTIMES["lightgbm"], b"tree")
huggingface = RuntimeReader(RUNTIMES["huggingface"])
