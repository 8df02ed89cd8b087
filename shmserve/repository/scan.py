"""All repository paths together: the models, names that occur twice, and fingerprints of folders,
which detect changes from file names, sizes and times, not contents."""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from msgspec import Struct

from shmserve import ids
from shmserve.errors import ConfigError, NotFound
from shmserve.repository import catalog, no_models
from shmserve.repository.model_folder import ModelFolder, looks_like_model, read_folder
from shmserve.repository.text_files import IGNORED, is_folder, printable

_log = logging.getLogger(__name__)

_MAX_FILES = 10_000  # files that are looked at in one model
_DEPTH = 6
_MOST_SKIPPED = 8  # named or explained folders without a model


class ScanResult(Struct, frozen=True):
    """Contents of the repository: every folder that may be a model is in `models` or `failures`.
    `failures`: by folder name, the reason for clients. `skipped`: looks into the other folders, and
    returns a line for operators on each of a few: path and reason why it is no model."""

    models: dict[str, ModelFolder]
    failures: dict[str, str]
    skipped: Callable[[], list[str]] = list


def scan(paths: Sequence[str]) -> ScanResult:
    """Read every model of the repository, and log the skipped folders. Raises as `folders`."""
    models: dict[str, ModelFolder] = {}
    failures: dict[str, str] = {}
    by_name = folders(paths)
    candidates = _candidates(by_name)
    if skipped := [printable(name) for name in sorted(by_name.keys() - candidates.keys())]:
        more = f" and {len(skipped) - _MOST_SKIPPED} more" if len(skipped) > _MOST_SKIPPED else ""
        what = "skipped folders without a version and config.pbtxt: %s%s (%s says more)"
        _log.info(what, ", ".join(skipped[:_MOST_SKIPPED]), more, "`shmserve check`")
    failures.update(absent(paths))
    for name, directories in sorted(candidates.items()):
        try:
            models[name] = read_folder(_only(name, directories))
        except ConfigError as ex:
            failures[printable(name)] = ex.message
    return ScanResult(models, failures, partial(_skipped, paths, by_name, candidates))


def _skipped(
    paths: Sequence[str], by_name: dict[str, list[str]], candidates: dict[str, list[str]]
) -> list[str]:
    """Return, for a few repositories and folders, path and reason why they have no model. An empty
    repository needs no reason."""
    local = [os.path.realpath(path) for path in paths if not catalog.is_catalog(path)]
    holding = {os.path.dirname(d) for directories in candidates.values() for d in directories}
    whole = {path: no_models.of_repository(path) for path in local if path not in holding}
    reasons = {path: reason for path, reason in whole.items() if reason}
    inside = [
        directory
        for name in sorted(by_name.keys() - candidates.keys() - set(IGNORED))
        for directory in by_name[name]
        if os.path.dirname(directory) not in reasons
    ]
    reasons.update((path, no_models.of_folder(path)) for path in inside[:_MOST_SKIPPED])
    more = len(inside) - _MOST_SKIPPED
    lines = [printable(f"{path} {reason}") for path, reason in reasons.items()]
    return [*lines, *([f"and {more} more folders"] if more > 0 else [])]


def find(paths: Sequence[str], name: str, override: str | None = None) -> ModelFolder:
    """Read one model, as for a load request. `override` is the model's configuration as JSON. Raise
    NotFound if the model has no folder. Raise ConfigError if the model cannot be served."""
    return read_folder(locate(paths, name), override)


def locate(paths: Sequence[str], name: str) -> str:
    """Return the folder of a model. Raise NotFound if the model has no folder. Raise ConfigError if
    the model has several folders, or is not in the cache yet."""
    directories = folders(paths).get(name) if ids.is_model_name(name) else None
    if not directories:
        if reason := absent(paths).get(name):
            raise ConfigError(reason)
        raise NotFound(f"model '{name}' is not in the repository")
    return _only(name, directories)


def _only(name: str, directories: list[str]) -> str:
    if len(directories) > 1:
        raise ConfigError("model appears in two or more repositories")
    return directories[0]


def names(paths: Sequence[str]) -> list[str]:
    """Return the sorted names of folders that can be models. Raises as `folders`."""
    return sorted(filter(ids.is_model_name, {*candidates(paths), *absent(paths)}))


def absent(paths: Sequence[str]) -> dict[str, str]:
    """Return the models of remote repositories that are not in the cache, each with the reason."""
    reasons: dict[str, str] = {}
    for path in filter(catalog.is_catalog, paths):
        reasons.update(catalog.absent(path))
    return reasons


def pending(paths: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return True if a repository was never listed, or a wanted model was never fetched. `wanted`:
    names of models; "*": all."""
    if any(catalog.read(path) is None for path in paths if catalog.is_catalog(path)):
        return True
    missing = absent(paths)
    return bool(missing) if "*" in wanted else any(name in missing for name in wanted)


def candidates(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return `folders` without folders that cannot be meant as models."""
    return _candidates(folders(paths))


def _candidates(by_name: dict[str, list[str]]) -> dict[str, list[str]]:
    return {
        name: directories
        for name, directories in by_name.items()
        if name not in IGNORED and any(map(looks_like_model, directories))
    }


def folders(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the paths of each visible folder name, in the order of the repository paths. Raise
    ConfigError if a repository path is not a readable folder."""
    directories: dict[str, list[str]] = {}
    seen: set[str] = set()
    for path in paths:
        if catalog.is_catalog(path):
            for name, directory in catalog.folders(path).items():
                directories.setdefault(name, []).append(directory)
            continue
        real = os.path.realpath(path)
        if real in seen:  # a folder named twice does not duplicate its models
            continue
        seen.add(real)
        try:
            with os.scandir(real) as entries:
                names = [e.name for e in entries if not e.name.startswith(".") and is_folder(e)]
        except OSError as ex:
            # may show the path: the operator wrote it, and the error ends the start of the service
            raise ConfigError(
                f"model_repository: '{path}' is not a readable folder ({ex.strerror})"
            ) from None
        for name in names:
            directories.setdefault(name, []).append(os.path.join(real, name))
    return directories


def fingerprint(directory: str) -> str:
    """Return names, sizes, times and inodes of a model's files as a short text."""
    digest = hashlib.blake2b(digest_size=16)
    for count, line in enumerate(_lines(directory, "", _DEPTH)):
        if count >= _MAX_FILES:
            break
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def survey(paths: Sequence[str]) -> dict[str, str]:
    """Return the fingerprint of every model of the repository. Raises as `folders`.

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
