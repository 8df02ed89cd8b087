"""All repository paths together: which models there are, and which names are taken twice."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from msgspec import Struct

from shmserve import ids
from shmserve.errors import ConfigError, NotFound
from shmserve.repository import catalog
from shmserve.repository.model_folder import ModelFolder, looks_like_model, read_folder
from shmserve.repository.text_files import IGNORED, is_folder, printable

_log = logging.getLogger(__name__)

_TOLD = 8  # folders that are no models


class ScanResult(Struct, frozen=True):
    """What the repository holds: every folder that may be a model is in exactly one of the two.

    `failures`: folder name -> reason fit for clients.
    """

    models: dict[str, ModelFolder]
    failures: dict[str, str]


def scan(paths: Sequence[str]) -> ScanResult:
    """Look at every model of the repository; raises as `folders`. The log has what is none."""
    models: dict[str, ModelFolder] = {}
    failures: dict[str, str] = {}
    found = folders(paths)
    candidates = _candidates(found)
    if other := [printable(name) for name in sorted(found.keys() - candidates.keys())]:
        more = f" and {len(other) - _TOLD} more" if len(other) > _TOLD else ""
        what = "skipped folders without a version and config.pbtxt: %s%s"
        _log.info(what, ", ".join(other[:_TOLD]), more)
    failures.update(absent(paths))
    for name, directories in sorted(candidates.items()):
        try:
            models[name] = read_folder(_only(name, directories))
        except ConfigError as ex:
            failures[printable(name)] = ex.message
    return ScanResult(models, failures)


def find(paths: Sequence[str], name: str, override: str | None = None) -> ModelFolder:
    """Look at one model, as the load request does; `override` is its configuration as JSON.

    Raises:
        NotFound: there is no such folder.
        ConfigError: it cannot be served.
    """
    return read_folder(locate(paths, name), override)


def locate(paths: Sequence[str], name: str) -> str:
    """The folder of one model.

    Raises:
        NotFound: there is no such folder.
        ConfigError: there are several.
    """
    directories = folders(paths).get(name) if ids.is_model_name(name) else None
    if not directories:
        if why := absent(paths).get(name):
            raise ConfigError(why)
        raise NotFound(f"model '{name}' is not in the repository")
    return _only(name, directories)


def _only(name: str, directories: list[str]) -> str:
    if len(directories) > 1:
        raise ConfigError("model appears in two or more repositories")
    return directories[0]


def names(paths: Sequence[str]) -> list[str]:
    """Names of the folders that can be models, sorted; raises as `folders`."""
    return sorted(filter(ids.is_model_name, {*candidates(paths), *absent(paths)}))


def absent(paths: Sequence[str]) -> dict[str, str]:
    """Models that remote repositories have and the cache has not, each with why."""
    found: dict[str, str] = {}
    for path in filter(catalog.is_catalog, paths):
        found.update(catalog.absent(path))
    return found


def pending(paths: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a remote repository was never listed, or one of the wanted models ("*": all) is
    known of and was never fetched."""
    if any(catalog.read(path) is None for path in paths if catalog.is_catalog(path)):
        return True
    missing = absent(paths)
    return bool(missing) if "*" in wanted else any(name in missing for name in wanted)


def candidates(paths: Sequence[str]) -> dict[str, list[str]]:
    """As `folders`, without those that nobody can have meant as a model."""
    return _candidates(folders(paths))


def _candidates(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {
        name: directories
        for name, directories in found.items()
        if name not in IGNORED and any(map(looks_like_model, directories))
    }


def folders(paths: Sequence[str]) -> dict[str, list[str]]:
    """Folder name -> where it is, in the order of the paths; hidden ones are left out.

    Raises:
        ConfigError: a path of the repository itself is not a readable folder.
    """
    directories: dict[str, list[str]] = {}
    seen: set[str] = set()
    for path in paths:
        if catalog.is_catalog(path):
            for name, directory in catalog.folders(path).items():
                directories.setdefault(name, []).append(directory)
            continue
        real = os.path.realpath(path)
        if real in seen:  # the same folder named twice is no duplicate of its models
            continue
        seen.add(real)
        try:
            with os.scandir(real) as entries:
                names = [e.name for e in entries if not e.name.startswith(".") and is_folder(e)]
        except OSError as ex:
            # for the operator, who wrote this path: raised when the service starts
            raise ConfigError(
                f"model_repository: '{path}' is not a readable folder ({ex.strerror})"
            ) from None
        for name in names:
            directories.setdefault(name, []).append(os.path.join(real, name))
    return directories
