"""Repository jobs: the coordinator's disk work, run by the background thread."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from shmserve.coordinator.models import model_reader
from shmserve.coordinator.models.background import Background
from shmserve.coordinator.models.desired_models import Library
from shmserve.coordinator.models.model_reader import ModelReader
from shmserve.transport import rundir

Done = Callable[[ModelReader | Exception], None]


class RepositoryJobs(Struct, frozen=True):
    """Jobs on the model repository and on overrides (files sent with load requests).

    `paths`: paths of the repository. `tried`: fingerprint of each model's folder when model
    control last tried to load the model on its own.
    """

    _library: Library
    _paths: Sequence[str]
    _run_dir: str
    _background: Background
    tried: dict[str, str] = {}

    def read(self, name: str, overrides: str, done: Done) -> bool:
        """Read one model. Return False if too many jobs wait."""
        work = functools.partial(
            model_reader.read, self._library, self._paths, self._run_dir, name, overrides
        )
        return self._background.submit(work, done)

    def survey(self, done: Callable[[dict[str, str] | Exception], None]) -> bool:
        """Get the fingerprints of all models. Return False if too many jobs wait."""
        return self._background.submit(functools.partial(self._library.survey, self._paths), done)

    def remove(self, overrides: str) -> None:
        """Remove overrides that no revision uses."""
        work = functools.partial(model_reader.remove, self._run_dir, overrides)
        self._background.submit(work, lambda _: None)

    def overrides(self) -> list[tuple[str, float]]:
        """Return names and ages, in seconds, of all existing overrides."""
        folder = rundir.overrides(self._run_dir)
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
        ages = []
        for name in names:
            try:
                age_s = time.time() - os.stat(os.path.join(folder, name)).st_mtime
            except FileNotFoundError:
                continue
            ages.append((name, age_s))
        return ages
