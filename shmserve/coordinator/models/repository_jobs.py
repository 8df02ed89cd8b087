"""Repository jobs: the coordinator's disk work, run by the background thread."""

import functools
import hashlib
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from shmserve import single_models
from shmserve.coordinator.models.desired_models import Library, Version, split
from shmserve.coordinator.models.repository_watch import RepositoryLook
from shmserve.errors import Code, ConfigError, ShmserveError
from shmserve.transport import rundir

_log = logging.getLogger(__name__)

_MAX_JOBS = 4096

Done = Callable[[Any], None]


class Background:
    """Thread that runs jobs, which may wait for a disk, one by one. The results are handed to the
    coordinator's loop, which is woken by `wake`. Jobs have no access to the coordinator's state."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.Queue[tuple[Callable[[], Any], Done]] = queue.Queue(_MAX_JOBS)
        self._done: queue.SimpleQueue[tuple[Done, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], Any], done: Done) -> bool:
        """Run `work` in the thread, then call `done` with the result, or with the exception, in
        `settle`. Return False if too many jobs wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="background", daemon=True)
            self._thread.start()
        try:
            self._jobs.put_nowait((work, done))
        except queue.Full:
            return False
        return True

    def settle(self) -> None:
        """Hand over finished results. Call on the coordinator's thread."""
        while not self._done.empty():
            done, result = self._done.get()
            done(result)

    def _run(self) -> None:
        while True:
            work, done = self._jobs.get()
            try:
                result = work()
            except Exception as ex:
                _log.exception("background job failed")
                result = ex
            self._done.put((done, result))
            self._wake()


class ModelReader(Struct, frozen=True):
    """Result of reading a model. `error_code`: empty on success. `kept`: true if the overrides
    hold files of the model."""

    name: str
    versions: tuple[Version, ...] = ()
    failures: dict[str, str] = {}
    fingerprint: str = ""
    kept: bool = False
    error_code: str = ""
    error: str = ""


class RepositoryJobs(Struct, frozen=True):
    """Jobs on the model repository and on overrides (files sent with load requests). `paths`: paths
    of the repository. `tried`: fingerprint of each model's folder when model control last tried to
    load the model on its own."""

    _library: Library
    _paths: Sequence[str]
    _run_dir: str
    _background: Background
    tried: dict[str, str] = {}

    def read(
        self, name: str, overrides: str, done: Callable[[ModelReader | Exception], None]
    ) -> bool:
        """Read one model for a load request, from the repository or with overrides. Errors that a
        client can cause are part of the result. Return False if too many jobs wait."""
        return self._background.submit(functools.partial(self._read, name, overrides), done)

    def survey(self, done: Callable[[RepositoryLook | Exception], None]) -> bool:
        """Get the fingerprints of all models. Return False if too many jobs wait."""
        return self._background.submit(self._survey, done)

    def _survey(self) -> RepositoryLook:
        begun = time.monotonic()
        single_models.refresh(self._run_dir)
        return RepositoryLook(self._library.survey(self._paths), time.monotonic() - begun)

    def remove(self, overrides: str) -> None:
        """Remove overrides that no revision uses."""
        if rundir.is_overrides(overrides):
            folder = rundir.overrides(self._run_dir, overrides)
            work = functools.partial(shutil.rmtree, folder, ignore_errors=True)
            self._background.submit(work, lambda _: None)

    def overrides(self) -> list[str]:
        """Return the names of all existing overrides."""
        try:
            return os.listdir(rundir.overrides(self._run_dir))
        except FileNotFoundError:
            return []

    def _read(self, name: str, overrides: str) -> ModelReader:
        try:
            return self._found(name, overrides)
        except ConfigError as ex:
            return ModelReader(name, error_code=Code.INVALID_ARGUMENT, error=ex.message)
        except ShmserveError as ex:
            return ModelReader(name, error_code=ex.code, error=ex.message)

    def _found(self, name: str, overrides: str) -> ModelReader:
        config: str | None = None
        kept = False
        directory = ""
        if overrides:
            folder = rundir.overrides(self._run_dir, overrides)
            directory = os.path.join(folder, name)
            kept = os.path.isdir(directory)
            try:
                with open(os.path.join(folder, rundir.OVERRIDE_CONFIG), encoding="utf-8") as file:
                    config = file.read()
            except OSError:
                raise ConfigError("the files of the load request are gone") from None
        if not kept:
            single_models.refresh(self._run_dir)
            directory = self._library.locate(self._paths, name)
        # taken before reading, so later changes are noticed
        mark = self._library.fingerprint(directory)
        if config is not None:
            mark += ":" + hashlib.blake2b(config.encode(), digest_size=16).hexdigest()
        versions, failures = split(self._library.read_folder(directory, config))
        return ModelReader(name, versions, failures, mark, kept)
