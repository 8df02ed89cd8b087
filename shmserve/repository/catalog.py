"""What is known of a remote repository: its models, and where in the cache each lies.

The fetcher writes a catalog and everybody reads it: it is replaced as a whole, and what it names
is complete and never changes (`shmserve.fetcher.cache` has the layout).

    <repository_cache_dir>/repositories/<…>.catalog     here
    <repository_cache_dir>/snapshots/<digest>/<model>/  a model as it was once
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from msgspec import Struct

from shmserve.errors import UnreadableMessage
from shmserve.protocol.decoding import json_decoder

SUFFIX = ".catalog"
SNAPSHOTS = "snapshots"
NOT_FETCHED = "it has not been fetched"


class CatalogEntry(Struct, frozen=True):
    """One model. `snapshot`: the digest of the latest that is complete; "": there is none.
    `problem`: why what the repository has now is not there; "": it is."""

    snapshot: str = ""
    problem: str = ""


class Catalog(Struct, frozen=True):
    """All models of a repository. `url`: for people; `problem`: why it could not be listed."""

    url: str
    models: dict[str, CatalogEntry] = {}
    problem: str = ""


_decode = json_decoder(Catalog)


def is_catalog(path: str) -> bool:
    """Whether a path of the repository is that of a catalog."""
    return path.endswith(SUFFIX)


def read(path: str) -> Catalog | None:
    """The catalog; None: the repository has never been listed, or its list is lost."""
    try:
        with open(path, "rb") as file:
            catalog: Catalog = _decode(file.read())
    except (OSError, UnreadableMessage):
        return None
    return catalog


def folder(path: str, snapshot: str, name: str) -> str:
    """Where a model of the catalog at `path` lies."""
    return os.path.join(os.path.dirname(os.path.dirname(path)), SNAPSHOTS, snapshot, name)


def snapshot_of(directory: str, cache_dir: str) -> str:
    """The snapshot that a model's folder is of; "": it is no folder of the cache."""
    parent, name = os.path.split(os.path.dirname(directory))
    return name if parent == os.path.join(cache_dir, SNAPSHOTS) else ""


def folders(path: str) -> dict[str, str]:
    """Model -> its folder, of those that have one."""
    return {name: directory for name, directory, _ in _entries(path) if directory}


def absent(path: str) -> dict[str, str]:
    """Model -> why there is none, in words for clients."""
    return {name: why for name, directory, why in _entries(path) if not directory}


def _entries(path: str) -> Iterator[tuple[str, str, str]]:
    """Name, folder or "", why there is none. What nobody has used may have been evicted."""
    catalog = read(path)
    for name, entry in (catalog.models if catalog is not None else {}).items():
        directory = folder(path, entry.snapshot, name) if entry.snapshot else ""
        there = directory if directory and os.path.isdir(directory) else ""
        yield name, there, entry.problem or NOT_FETCHED
