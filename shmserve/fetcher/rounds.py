"""Round of the fetcher: list the remote repositories, fetch requested models, write the
catalogs."""

import logging
import threading
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct

from shmserve import model_places
from shmserve.config import Settings
from shmserve.errors import ShmserveError
from shmserve.fetcher import cache as caches
from shmserve.fetcher import model_fetch, remote_files
from shmserve.fetcher.cache import Cache
from shmserve.fetcher.model_fetch import FileSource
from shmserve.fetcher.remote_files import RemoteModel
from shmserve.log_fields import log_fields
from shmserve.repository import catalog
from shmserve.repository.catalog import Catalog, CatalogEntry

_log = logging.getLogger(__name__)


class RoundOutcome(Struct, frozen=True):
    """Outcome of a round. `problems`: for each model that is missing or outdated in the cache, the
    reason. `unlisted`: reasons why repositories could not be listed, each with the address."""

    problems: dict[str, str]
    unlisted: tuple[str, ...]


class Rounds:
    """Rounds over the remote repositories. Thread-safe: rounds may run concurrently. `opened`:
    function that returns the store of an address."""

    def __init__(
        self, settings: Settings, cache: Cache, opened: Callable[[str], FileSource]
    ) -> None:
        paths = model_places.repository_paths(settings)
        self._remote = [
            (url, path)
            for url, path in zip(settings.model_repository, paths, strict=True)
            if model_places.is_remote(url)
        ]
        self._limits = settings.repository_transfers, settings.repository_timeout_s
        self._cache = cache
        self._opened = opened
        self._stores: dict[str, FileSource] = {}
        self._lock = threading.Lock()  # guards the fields below
        self._used: set[str] = set()  # snapshots requested or in use in the previous round
        self._using: set[str] = set()  # and in this round
        self._told: dict[str, dict[str, str]] = {}
        # latest listed snapshot by address and model; an earlier, incomplete one stays incomplete
        self._latest: dict[tuple[str, str], str] = {}

    def run(self, names: Iterable[str], keep: Iterable[str]) -> RoundOutcome:
        """List the repositories, and fetch the current files of the named models ("*": all) and of
        the steps of ensembles. `keep`: snapshots in use by the service's executors."""
        wanted = set(names)
        self._use(set(keep), wanted)
        problems: dict[str, str] = {}
        unlisted: list[str] = []
        for url, path in self._remote:
            done = self._repository(url, path, wanted)
            unlisted += [done.problem] if done.problem else []
            of_models = {
                name: why
                for name, entry in done.models.items()
                if (why := done.problem or entry.problem) and wanted & {name, "*"}
            }
            problems |= of_models
            self._tell(url, {"": done.problem} if done.problem else of_models)
        return RoundOutcome(problems, tuple(unlisted))

    # ----------------------------------------------------------- one repository

    def _repository(self, url: str, path: str, wanted: set[str]) -> Catalog:
        """Update and return a repository's catalog. The catalog is written after each model,
        because the coordinator may be waiting for just this model."""
        try:
            listed = self._store(url).models()
        except ShmserveError as ex:
            return self._write(path, Catalog(url), problem=ex.message)
        for address, name in list(self._latest):
            if address == url and name not in listed:
                self._abandon_earlier(url, name)
        known = catalog.read(path) or Catalog(url)
        entries = {name: known.models.get(name, CatalogEntry()) for name in listed}
        current = self._write(path, Catalog(url, entries))
        coming = {model.name: model for model in remote_files.by_name(listed, wanted)}
        done: set[str] = set()
        while coming:
            name, model = coming.popitem()
            done.add(name)
            entry = self._model(url, model, entries[name])
            current = self._write(path, current, {name: entry})
            content = model_fetch.files_of(self._cache, entry.snapshot)
            steps = content.steps if content is not None else ()
            wanted |= set(steps)
            coming.update({s: listed[s] for s in steps if s in listed and s not in done})
        return current

    def _model(self, url: str, model: RemoteModel, entry: CatalogEntry) -> CatalogEntry:
        try:
            digest = model.digest(url)
            self._abandon_earlier(url, model.name, digest)
            self._use_also(digest)
            model_fetch.fetch(self._store(url), self._cache, model, entry.snapshot, *self._limits)
        except (ShmserveError, OSError) as ex:
            reason = ex.message if isinstance(ex, ShmserveError) else _of_disk(ex)
            is_cached = self._cache.snapshot(entry.snapshot)
            return CatalogEntry(entry.snapshot if is_cached else "", reason)
        if digest != entry.snapshot:
            about = log_fields(model=model.name, nbytes=model.nbytes, source=url)
            _log.info("fetched", extra=about)
        return CatalogEntry(digest)

    def _abandon_earlier(self, url: str, name: str, digest: str = "") -> None:
        """Remove received files of an earlier state of a model. "": the model is gone."""
        with self._lock:
            earlier = self._latest.pop((url, name), "")
            if digest:
                self._latest[url, name] = digest
        if earlier not in ("", digest):
            self._cache.abandon(earlier)

    def _write(
        self, path: str, made: Catalog, changed: dict[str, CatalogEntry] | None = None,
        problem: str = "",
    ) -> Catalog:  # fmt: skip
        """Write a catalog with the changed entries. Entries that other services have written are
        kept, and snapshots no longer in the cache are dropped."""
        with self._cache.locked():
            known = catalog.read(path)
            if problem and known is None:
                return Catalog(made.url, {}, problem)
            known_entries = known.models if known is not None else {}
            names = known_entries if problem else made.models
            entries = {name: known_entries.get(name, CatalogEntry()) for name in names} | (
                changed or {}
            )
            entries = {name: self._checked(entry) for name, entry in entries.items()}
            written = Catalog(made.url, entries, problem)
            if written != known:
                caches.write(path, msgspec.json.encode(written))
            return written

    def _checked(self, entry: CatalogEntry) -> CatalogEntry:
        is_usable = not entry.snapshot or self._cache.snapshot(entry.snapshot)
        return entry if is_usable else CatalogEntry("", entry.problem)

    def _store(self, url: str) -> FileSource:
        with self._lock:
            if url not in self._stores:
                self._stores[url] = self._opened(url)
            return self._stores[url]

    # ------------------------------------------------------------------- leases

    def _use(self, keep: set[str], wanted: set[str]) -> None:
        """Lease the snapshots that are requested, running, or were so in the previous round. The
        previous ones count because the coordinator may have just read the catalog."""
        with self._lock, self._cache.locked():
            self._used = self._using
            self._using = keep | {
                entry.snapshot
                for _, path in self._remote
                for name, entry in (catalog.read(path) or Catalog("")).models.items()
                if entry.snapshot and wanted & {name, "*"}
            }
            self._cache.use(self._used | self._using)

    def _use_also(self, digest: str) -> None:
        with self._lock, self._cache.locked():
            self._using.add(digest)
            self._cache.use(self._used | self._using)

    # ---------------------------------------------------------------------- log

    def _tell(self, url: str, problems: dict[str, str]) -> None:
        """Log each problem once, and log when no problem is left. "": the whole repository."""
        with self._lock:
            before = self._told.get(url, {})
            for name, why in problems.items():
                if before.get(name) != why:
                    about = log_fields(model=name, reason=why) if name else log_fields(reason=why)
                    _log.error("not fetched: %s", url, extra=about)
            if before and not problems:
                _log.info("fetched again: %s", url)
            self._told[url] = problems


def _of_disk(ex: OSError) -> str:
    return f"the cache cannot be written ({ex.strerror})"
