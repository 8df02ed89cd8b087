"""Desired models: chooses the models to run from the repository's scan and `model_control`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from shmserve import model_places
from shmserve.config import Settings
from shmserve.core.registry import Snapshot
from shmserve.errors import ConfigError
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import Instance
from shmserve.tensor.spec import ModelSpec

Version = tuple[ModelSpec, tuple[Instance, ...]]  # with all instances
# Bytes. One message carries an instance, so leave room for the envelope.
_MAX_INSTANCE = 100 * 1024


class Folder(Protocol):
    """A model's folder in the repository, as used by the coordinator."""

    @property
    def specs(self) -> tuple[ModelSpec, ...]: ...
    @property
    def failures(self) -> dict[str, str]: ...
    def instances(self) -> Sequence[Instance]: ...


class Scan(Protocol):
    """Contents of the repository: readable folders, the reasons why other folders are unreadable,
    and a function that tells why some folders are no models."""

    @property
    def models(self) -> Mapping[str, Folder]: ...
    @property
    def failures(self) -> dict[str, str]: ...
    @property
    def skipped(self) -> Callable[[], list[str]]: ...


Scanner = Callable[[Sequence[str]], Scan]  # `shmserve.repository.scan`


class Library(Protocol):
    """Module `shmserve.repository`, as used by the coordinator."""

    def scan(self, paths: Sequence[str]) -> Scan: ...
    def survey(self, paths: Sequence[str]) -> dict[str, str]: ...
    def pending(self, paths: Sequence[str], wanted: Sequence[str]) -> bool: ...
    def locate(self, paths: Sequence[str], name: str) -> str: ...
    def fingerprint(self, directory: str) -> str: ...
    def read_folder(self, directory: str, override: str | None = None) -> Folder: ...


class DesiredModels(Struct, frozen=True):
    """Versions to serve with their instances, and reasons for models that cannot be served.
    `implied`: models not named in the settings but needed by an ensemble. `skipped`:
    looks into folders that are no models, and returns a line for operators on each of a few.
    `is_empty`: True if the repository has no model."""

    versions: tuple[Version, ...] = ()
    failures: dict[str, str] = {}
    implied: frozenset[str] = frozenset()
    skipped: Callable[[], list[str]] = list
    is_empty: bool = False


def choose(settings: Settings, scan: Scanner) -> DesiredModels:
    """Scan the repository and choose the models to run."""
    try:
        repository = scan(model_places.repository_paths(settings))
    except ConfigError as ex:
        return DesiredModels(failures={"model_repository": ex.message})
    names = set(repository.models)
    failures = dict(repository.failures)
    implied: frozenset[str] = frozenset()
    if settings.model_control == "explicit" and "*" not in settings.load_models:
        wanted = _with_steps(settings.load_models, repository)
        implied = wanted - set(settings.load_models)
        names &= wanted
        failures = {name: why for name, why in failures.items() if name in wanted}
        for name in settings.load_models:
            if name not in repository.models and name not in failures:
                failures[name] = "load_models: there is no such model in the repository"
    versions: list[Version] = []
    for name in sorted(names):
        of_model, refused = split(repository.models[name])
        versions += of_model
        failures.update({f"{name}/{version}": why for version, why in refused.items()})
    is_empty = not repository.models and not repository.failures
    return DesiredModels(tuple(versions), failures, implied, repository.skipped, is_empty)


def continued(settings: Settings, before: Snapshot) -> Settings:
    """Return the settings, with models added that clients loaded by name in another generation,
    which published `before`."""
    if settings.model_control != "explicit" or "*" in settings.load_models:
        return settings
    ready = (name for name, _ in before.ready_entries)
    names = dict.fromkeys([*settings.load_models, *ready])
    return replace(settings, load_models=tuple(n for n in names if n not in settings.pipelines))


def _with_steps(names: Iterable[str], repository: Scan) -> frozenset[str]:
    """Return these models, and the models of ensembles among them."""
    wanted: set[str] = set()
    coming = list(names)
    while coming:
        name = coming.pop()
        if name not in wanted:
            wanted.add(name)
            folder = repository.models.get(name)
            specs = folder.specs if folder is not None else ()
            coming += [step.model for spec in specs for step in spec.steps]
    return frozenset(wanted)


def split(folder: Folder) -> tuple[tuple[Version, ...], dict[str, str]]:
    """Return a model's versions with their instances, and the reasons for versions that cannot be
    served."""
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
