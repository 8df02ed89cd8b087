"""Where models are: the entries of `model_repository`, and what they are on this host."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

from shmserve import config, ids
from shmserve.config import Settings


def fetches(settings: Settings) -> bool:
    """Whether models come from a store."""
    return any(map(is_remote, settings.model_repository))


def is_remote(repository: str) -> bool:
    """Whether a path of `model_repository` is a store's address."""
    return "://" in repository


def single_of(repository: str) -> tuple[str, str] | None:
    """Name and folder of an entry of `model_repository` that is one model, `NAME=FOLDER`."""
    name, sign, path = repository.partition("=")
    return (name, path) if sign and ids.is_model_name(name) else None


def single_dir(settings: Settings) -> str:
    """Where such models are laid out as in a repository."""
    return os.path.join(config.run_dir(settings), "single")


def cache_dir(settings: Settings, environ: Mapping[str, str] | None = None) -> str:
    """Where fetched models are kept: the setting, systemd's, or the user's."""
    environ = os.environ if environ is None else environ
    if settings.repository_cache_dir:
        return os.path.abspath(settings.repository_cache_dir)
    if environ.get("CACHE_DIRECTORY"):
        return environ["CACHE_DIRECTORY"].split(":")[0]
    if environ.get("XDG_CACHE_HOME"):
        return os.path.join(environ["XDG_CACHE_HOME"], "shmserve")
    return os.path.join(os.path.expanduser("~"), ".cache", "shmserve")


def repository_paths(settings: Settings) -> tuple[str, ...]:
    """`model_repository` as this host has it: folders, and for stores the catalog in the cache."""
    return tuple(_local(settings, entry) for entry in settings.model_repository)


def _local(settings: Settings, repository: str) -> str:
    if single_of(repository):
        return single_dir(settings)
    if not is_remote(repository):
        return repository
    name = hashlib.sha256(repository.rstrip("/").encode()).hexdigest()[:24]
    return os.path.join(cache_dir(settings), "repositories", f"{name}.catalog")
