"""Extra `remote`: checks the installed packages and the cache folder."""

from __future__ import annotations

import os
import stat
from importlib import metadata

from shmserve import model_places
from shmserve.config import Settings
from shmserve.errors import ConfigError

PACKAGES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}


def require(settings: Settings) -> None:
    """Check that the packages for all remote repositories are installed, and prepare the cache.

    Raises:
        ConfigError: a package is missing (the message names the address, and the package to
            install), or as `prepare_cache`.
    """
    for address in filter(model_places.is_remote, settings.model_repository):
        for package in ("fsspec", PACKAGES[address.partition("://")[0]]):
            try:
                metadata.version(package)
            except metadata.PackageNotFoundError:
                raise ConfigError(
                    f"model_repository: {address} needs {package}: pip install 'shmserve[remote]'"
                ) from None
    if model_places.fetches(settings):
        prepare_cache(model_places.cache_dir(settings))


def prepare_cache(path: str) -> None:
    """Make the cache folder, or check that only this user can write to an existing folder:
    executors run files from the cache.

    Raises:
        ConfigError: the folder cannot be made, or other users can write to it.
    """
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        info = os.stat(path)
    except OSError as ex:
        raise ConfigError(f"repository_cache_dir: {path} cannot be made: {ex.strerror}") from None
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o022:
        raise ConfigError(
            f"repository_cache_dir: {path} can be written by others than the server's user"
        )
