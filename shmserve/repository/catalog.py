"""Catalog of a remote repository: its models and the places of their snapshots in the cache.

The fetcher writes a catalog and all other processes read it. A catalog is replaced as a whole. Its
snapshots are complete and never change (`shmserve.fetcher.cache` describes the layout).

    <repository_cache_dir>/repositories/<…>.catalog     catalog
    <repository_cache_dir>/snapshots/<digest>/<model>/  a model at some moment
"""

import os
from collections.abc import Iterator

from msgspec import Struct

from shmserve.errors import UnreadableMessage
from shmserve.protocol.decoding import json_decoder

SUFFIX = ".catalog"
SNAPSHOTS = "snapshots"
NOT_FETCHED = "it has not been fetched"


class CatalogEntry(Struct, frozen=True):
    """Entry of a model. `snapshot`: digest of the latest complete snapshot; "": no snapshot.
    `problem`: reason why the repository's present state is not in the cache; "": it is."""

    snapshot: str = ""
    problem: str = ""


class Catalog(Struct, frozen=True):
    """All models of a repository. `url`: address for people to read. `problem`: reason why the
    repository could not be listed."""

    url: str
    models: dict[str, CatalogEntry] = {}
    problem: str = ""


_decode = json_decoder(Catalog)


def is_catalog(path: str) -> bool:
    """Return True if a path of the repository is a catalog."""
    return path.endswith(SUFFIX)


def read(path: str) -> Catalog | None:
    """Return the catalog, or None if the repository was never listed or the list is lost."""
    try:
        with open(path, "rb") as file:
            catalog: Catalog = _decode(file.read())
    except (OSError, UnreadableMessage):
        return None
    return catalog


def folder(path: str, snapshot: str, name: str) -> str:
    """Return the folder of a model's snapshot, for the catalog at `path`."""
    return os.path.join(os.path.dirname(os.path.dirname(path)), SNAPSHOTS, snapshot, name)


def snapshot_of(directory: str, cache_dir: str) -> str:
    """Return the snapshot of a model's folder, or "" for a folder outside the cache."""
    parent, name = os.path.split(os.path.dirname(directory))
    return name if parent == os.path.join(cache_dir, SNAPSHOTS) else ""


def folders(path: str) -> dict[str, str]:
    """Return the folder of each model that has a folder in the cache."""
    return {name: directory for name, directory, _ in _entries(path) if directory}


def absent(path: str) -> dict[str, str]:
    """Return, for each model without a folder, the reason in words for clients."""
    return {name: reason for name, directory, reason in _entries(path) if not directory}


def _entries(path: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, folder (or "") and the reason for a missing folder.

    A folder may be missing because the cache evicts unused snapshots.
    """
    catalog = read(path)
    for name, entry in (catalog.models if catalog is not None else {}).items():
        directory = folder(path, entry.snapshot, name) if entry.snapshot else ""
        existing = directory if directory and os.path.isdir(directory) else ""
        yield name, existing, entry.problem or NOT_FETCHED
