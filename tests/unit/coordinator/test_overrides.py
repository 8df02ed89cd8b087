"""Files of load requests: how long they are kept."""

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from shmserve.config import Settings
from shmserve.coordinator.models.model_control import ModelControl
from shmserve.coordinator.models.repository_jobs import RepositoryJobs
from shmserve.transport import rundir


def test_files_of_a_coming_request_outlive_a_jump_of_the_clock(tmp_path):
    names = ("http-1-5", "http-2-5")  # the second frontend has ended
    for name in names:
        folder = rundir.overrides(str(tmp_path), name)
        os.makedirs(folder)
        os.utime(folder, (0, 0))  # as if they were made long ago
    removed: list[str] = []
    jobs: Any = SimpleNamespace(
        overrides=RepositoryJobs.overrides.__get__(SimpleNamespace(_run_dir=str(tmp_path))),
        remove=removed.append,
    )
    settings = Settings(model_control="explicit", load_timeout_s=100)
    reconciler: Any = SimpleNamespace(
        processes={"http-1": None},
        models=SimpleNamespace(by_name={}),
        draining=False,
        complete=True,
    )
    control = ModelControl(settings, reconciler, jobs, Mock(), Mock(), Mock())
    control.remote = Mock()
    kept: dict[str, int] = {}
    for now in range(0, 300, 5):
        control.turn(float(now))
        kept |= {name: now for name in names if name not in removed}
    assert kept == {"http-1-5": 135, "http-2-5": 35}
