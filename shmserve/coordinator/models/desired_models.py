"""Which models of the repository should run: the scan's result and `model_control`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.protocol import messages
from shmserve.protocol.control.link_messages import Instance
from shmserve.tensor.spec import ModelSpec

# An instance travels in one message, with room for its envelope.
_MAX_INSTANCE = 100 * 1024


class Folder(Protocol):
    """A model of the repository, as far as the coordinator cares."""

    @property
    def specs(self) -> tuple[ModelSpec, ...]: ...
    @property
    def failures(self) -> dict[str, str]: ...
    def instances(self) -> Sequence[Instance]: ...


class Scan(Protocol):
    """What the repository holds: folders that can be described, and reasons for the others."""

    @property
    def models(self) -> Mapping[str, Folder]: ...
    @property
    def failures(self) -> dict[str, str]: ...


class Scanner(Protocol):
    """`shmserve.repository.scan`."""

    def __call__(self, paths: Sequence[str]) -> Scan: ...


class Library(Protocol):
    """The module `shmserve.repository`, as far as the coordinator needs it."""

    def scan(self, paths: Sequence[str]) -> Scan: ...
    def survey(self, paths: Sequence[str]) -> dict[str, str]: ...
    def locate(self, paths: Sequence[str], name: str) -> str: ...
    def fingerprint(self, directory: str) -> str: ...
    def read_folder(self, directory: str, override: str | None = None) -> Folder: ...


class Wanted(Struct, frozen=True):
    """Versions to serve with their instances, and what cannot be served and why."""

    versions: tuple[tuple[ModelSpec, tuple[Instance, ...]], ...] = ()
    failures: dict[str, str] = {}


def choose(settings: Settings, scan: Scanner) -> Wanted:
    """Look at the repository and pick what should run."""
    try:
        found = scan(settings.model_repository)
    except ConfigError as ex:
        return Wanted(failures={"model_repository": ex.message})
    names = set(found.models)
    failures = dict(found.failures)
    if settings.model_control == "explicit" and "*" not in settings.load_models:
        names &= set(settings.load_models)
        failures = {name: why for name, why in failures.items() if name in settings.load_models}
        for name in settings.load_models:
            if name not in found.models and name not in failures:
                failures[name] = "load_models: there is no such model in the repository"
    versions: list[tuple[ModelSpec, tuple[Instance, ...]]] = []
    for name in sorted(names):
        folder = found.models[name]
        found_versions, found_failures = split(folder)
        versions += found_versions
        failures.update({f"{name}/{version}": why for version, why in found_failures.items()})
    return Wanted(tuple(versions), failures)


def split(
    folder: Folder,
) -> tuple[tuple[tuple[ModelSpec, tuple[Instance, ...]], ...], dict[str, str]]:
    """A model's versions with their instances, and versions that cannot be served."""
    failures = dict(folder.failures)
    versions = []
    instances = list(folder.instances())
    for spec in folder.specs:
        own = tuple(i for i in instances if i.spec.version == spec.version)
        if any(len(messages.encode(i)) > _MAX_INSTANCE for i in own):
            failures[spec.version] = "its configuration is too large"
        else:
            versions.append((spec, own))
    return tuple(versions), failures
