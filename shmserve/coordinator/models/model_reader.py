"""Model reader: reads one model for a load request, from the repository or with overrides."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence

from msgspec import Struct

from shmserve.coordinator.models.desired_models import Library, Version, split
from shmserve.errors import Code, ConfigError, ShmserveError
from shmserve.transport import rundir

Paths = Sequence[str]  # paths of the repository


class ModelReader(Struct, frozen=True):
    """Result of reading a model. `error_code`: empty on success. `kept`: true if the overrides
    hold files of the model."""

    name: str
    versions: tuple[Version, ...] = ()
    failures: dict[str, str] = {}
    fingerprint: str = ""
    kept: bool = False
    error_code: str = ""
    error: str = ""


def read(library: Library, paths: Paths, run_dir: str, name: str, overrides: str) -> ModelReader:
    """Read one model. Errors that a client can cause are returned, never raised."""
    try:
        return _read(library, paths, run_dir, name, overrides)
    except ConfigError as ex:
        return ModelReader(name, error_code=Code.INVALID_ARGUMENT, error=ex.message)
    except ShmserveError as ex:
        return ModelReader(name, error_code=ex.code, error=ex.message)


def remove(run_dir: str, overrides: str) -> None:
    """Remove the files of a load request."""
    if rundir.is_overrides(overrides):
        shutil.rmtree(rundir.overrides(run_dir, overrides), ignore_errors=True)


def _read(library: Library, paths: Paths, run_dir: str, name: str, overrides: str) -> ModelReader:
    config: str | None = None
    kept = False
    directory = ""
    if overrides:
        folder = rundir.overrides(run_dir, overrides)
        directory = os.path.join(folder, name)
        kept = os.path.isdir(directory)
        try:
            with open(os.path.join(folder, rundir.OVERRIDE_CONFIG), encoding="utf-8") as file:
                config = file.read()
        except OSError:
            raise ConfigError("the files of the load request are gone") from None
    if not kept:
        directory = library.locate(paths, name)
    mark = library.fingerprint(directory)  # taken before reading, so later changes are noticed
    if config is not None:
        mark += ":" + hashlib.blake2b(config.encode(), digest_size=16).hexdigest()
    versions, failures = split(library.read_folder(directory, config))
    return ModelReader(name, versions, failures, mark, kept)
