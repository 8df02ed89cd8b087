"""Which models of the repository should run: the scan's result and `model_control`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.protocol import messages
from shmserve.protocol.link_messages import Instance
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


class Wanted(Struct, frozen=True):
    """Versions to serve with their instances, and what cannot be served and why."""

    versions: tuple[tuple[ModelSpec, tuple[Instance, ...]], ...] = ()
    failures: dict[str, str] = {}


def check(settings: Settings) -> None:
    """Refuse what is not supported yet, by name.

    Raises:
        ConfigError: naming the setting and its value.
    """
    if settings.model_control == "poll":
        raise ConfigError("model_control: 'poll' is not supported yet, use none or explicit")


def choose(settings: Settings, scan: Scanner) -> Wanted:
    """Look at the repository and pick what should run."""
    check(settings)
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
    versions = []
    for name in sorted(names):
        folder = found.models[name]
        failures.update({f"{name}/{version}": why for version, why in folder.failures.items()})
        instances = list(folder.instances())
        for spec in folder.specs:
            own = tuple(i for i in instances if i.spec.version == spec.version)
            if any(len(messages.encode(i)) > _MAX_INSTANCE for i in own):
                failures[f"{name}/{spec.version}"] = "its configuration is too large"
            else:
                versions.append((spec, own))
    return Wanted(tuple(versions), failures)
