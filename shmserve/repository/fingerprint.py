"""Fingerprints of model folders: detect changes from file names, sizes and times, not contents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

from shmserve.repository.scan import absent, candidates
from shmserve.repository.text_files import IGNORED, printable

_MAX_FILES = 10_000  # files that are looked at in one model
_DEPTH = 6


def fingerprint(directory: str) -> str:
    """Return names, sizes, times and inodes of a model's files as a short text."""
    digest = hashlib.blake2b(digest_size=16)
    for count, line in enumerate(_lines(directory, "", _DEPTH)):
        if count >= _MAX_FILES:
            break
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def survey(paths: Sequence[str]) -> dict[str, str]:
    """Return the fingerprint of every model of the repository. Raises as `scan.folders`.

    A model in several folders has the fingerprints of all folders, joined.
    """
    marks = {
        printable(name): "+".join(fingerprint(directory) for directory in directories)
        for name, directories in candidates(paths).items()
    }
    return absent(paths) | marks


def _lines(directory: str, prefix: str, depth: int) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except OSError as ex:
        yield f"{prefix} {ex.errno}\0"
        return
    for entry in ordered:
        if entry.name.startswith(".") or entry.name in IGNORED:
            continue
        name = prefix + entry.name
        try:
            info = entry.stat()
            is_folder = entry.is_dir()
        except OSError as ex:
            yield f"{name} {ex.errno}\0"
            continue
        if is_folder:
            yield f"{name}/\0"
            if depth:
                yield from _lines(entry.path, f"{name}/", depth - 1)
        else:
            yield f"{name} {info.st_size} {info.st_mtime_ns} {info.st_ino}\0"
