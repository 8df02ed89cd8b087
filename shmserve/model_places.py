"""Model places: the entries of `model_repository`, and the local path of each."""

import hashlib
import os
from collections.abc import Iterator, Mapping

from shmserve import config, ids
from shmserve.config import Settings

SOURCE = ".source"  # link to the file, in the folder of a laid-out model of one file


def fetches(settings: Settings) -> bool:
    """Return whether a repository is in a remote store."""
    return any(map(is_remote, settings.model_repository))


def is_remote(repository: str) -> bool:
    """Return whether a path of `model_repository` is the address of a remote store."""
    return "://" in repository


def single_of(repository: str) -> tuple[str, str] | None:
    """Return name and path of an entry `NAME=FOLDER` or `NAME=FILE.py`; None for other entries."""
    name, sign, path = repository.partition("=")
    return (name, path) if sign and ids.is_model_name(name) else None


def is_one_file(path: str) -> bool:
    """Return whether a path is a model of one Python file."""
    return path.endswith(".py") and os.path.isfile(path)


def source_of(directory: str) -> str:
    """Return the path of the file that is laid out as a model's folder; "" for other folders."""
    try:
        return os.readlink(os.path.join(directory, SOURCE))
    except OSError:
        return ""


def missing_folders(settings: Settings) -> Iterator[str]:
    """Yield an error for each local entry of `model_repository` that is no folder, and no model of
    one file."""
    for entry in settings.model_repository:
        single = single_of(entry)
        path = single[1] if single else entry
        is_there = os.path.isdir(path) or (single and is_one_file(path))
        if not is_remote(path) and not is_there:
            yield f"model_repository: {path!r} is not a directory"


def single_dir(settings: Settings) -> str:
    """Return the folder where models of `NAME=FOLDER` entries are laid out as in a repository."""
    return single_dir_in(config.run_dir(settings))


def single_dir_in(run_dir: str) -> str:
    """Return the same folder, in the run directory of this generation."""
    return os.path.join(run_dir, "single")


def cache_dir(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder of fetched models: the setting, systemd's, or the user's."""
    given = settings.repository_cache_dir
    found = config.folder(environ, given, "CACHE_DIRECTORY", "XDG_CACHE_HOME")
    return found or os.path.join(os.path.expanduser("~"), ".cache", "shmserve")


def repository_paths(settings: Settings) -> tuple[str, ...]:
    """Return local paths for `model_repository`: folders, and catalogs of remote stores."""
    return tuple(_local(settings, entry) for entry in settings.model_repository)


def _local(settings: Settings, repository: str) -> str:
    if single_of(repository):
        return single_dir(settings)
    if not is_remote(repository):
        return repository
    name = hashlib.sha256(repository.rstrip("/").encode()).hexdigest()[:24]
    return os.path.join(cache_dir(settings), "repositories", f"{name}.catalog")
