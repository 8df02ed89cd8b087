"""Extras `otlp` and `remote`: checks the installed packages and the cache folder."""

import os
import stat
from collections.abc import Iterable
from importlib import metadata

from shmserve import model_places
from shmserve.config import Settings
from shmserve.errors import ConfigError

_EXPORTERS = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
_STORES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}


def require(settings: Settings) -> None:
    """Check that the packages are installed that exporting and all remote repositories need, and
    prepare the cache. Raise ConfigError if a package is missing (the message names the setting or
    the address, and the package to install), or as `prepare_cache`."""
    if settings.exports:
        spans = settings.trace_mode == "opentelemetry"
        name = "trace_mode: opentelemetry" if spans else "otlp_metrics_interval_s:"
        if package := _missing(_EXPORTERS):
            raise ConfigError(f"{name} needs {package}: pip install 'shmserve[otlp]'")
    for address in filter(model_places.is_remote, settings.model_repository):
        if package := _missing(("fsspec", _STORES[address.partition("://")[0]])):
            raise ConfigError(
                f"model_repository: {address} needs {package}: pip install 'shmserve[remote]'"
            )
    if model_places.fetches(settings):
        prepare_cache(model_places.cache_dir(settings))


def _missing(packages: Iterable[str]) -> str:
    """Return the first package that is not installed; empty: all are installed."""
    for package in packages:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            return package
    return ""


def prepare_cache(path: str) -> None:
    """Make the cache folder, or check that only this user can write to an existing folder:
    executors run files from the cache. Raise ConfigError if the folder cannot be made, or other
    users can write to it."""
    try:
        os.makedirs(path, 0o700, exist_ok=True)
        info = os.stat(path)
    except OSError as ex:
        raise ConfigError(f"repository_cache_dir: {path} cannot be made: {ex.strerror}") from None
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o022:
        raise ConfigError(
            f"repository_cache_dir: {path} can be written by others than the server's user"
        )
