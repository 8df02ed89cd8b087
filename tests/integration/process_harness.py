"""Run the process tree with stand-ins and inspect the tree from outside."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import msgspec

from shmserve.cli.operating import show
from shmserve.core.registry import Snapshot
from shmserve.errors import ShmserveError, Unavailable
from shmserve.shm.registry_page import RegistryReader
from shmserve.transport import rundir
from tests.running_server import is_running, marked, wait_until

STAND_INS = Path(__file__).parent / "stand_ins"


class Tree:
    """Service with stand-ins, in a separate run directory, until the end of its `with` block."""

    def __init__(
        self, folder: Path, models: dict[str, Any], environ: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.run_dir = str(folder / "run")
        (folder / "models.json").write_bytes(
            msgspec.json.encode({"models": {n: {"name": n, **m} for n, m in models.items()}})
        )
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")},
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "SHMSERVE_RUN_DIR": self.run_dir,
            "SHMSERVE_MODEL_REPOSITORY": str(folder),
            "SHMSERVE_DRAIN_TIMEOUT_S": "3",
            **(environ or {}),
        }
        self.reader = RegistryReader(self.run_dir)
        self.master: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.master = subprocess.Popen(
                [sys.executable, str(STAND_INS / "master.py")],
                env=self.environ,
                stderr=log,
                start_new_session=True,
            )

    def snapshot(self) -> Snapshot | None:
        try:
            return self.reader.current()
        except Unavailable:
            return None

    def ready(self) -> bool:
        snapshot = self.snapshot()
        return snapshot is not None and snapshot.ready

    def wait_ready(self) -> None:
        wait_until(self.ready, "readiness")

    def live(self, model: str) -> dict[str, int]:
        """Published instances of a model and their pids."""
        snapshot = self.snapshot()
        assert snapshot is not None
        return {i.name: i.pid for i in snapshot.models[model]["1"].instances}

    def rows(self, what: str = "processes") -> list[dict[str, Any]]:
        try:
            return show.ask(self.run_dir, what)
        except ShmserveError:
            return []

    def pid(self, role: str) -> int:
        """Return the pid of a role with a single process, or 0 if no process runs."""
        return rundir.lock(self.run_dir, role).holder() or 0

    def members(self) -> list[int]:
        """Return the pids of all processes with our run directory, stand-ins included."""
        return [*filter(is_running, marked(f"SHMSERVE_RUN_DIR={self.run_dir}"))]

    def kill(self, pid: int) -> None:
        assert pid
        os.kill(pid, signal.SIGKILL)
        if pid == self.master.pid:
            self.master.wait(60)
        wait_until(lambda: not is_running(pid), f"end of {pid}")

    def replace(self, *roles: str) -> None:
        """Kill the single processes of these roles, and wait for others."""
        before = {role: self.pid(role) for role in roles}
        for pid in before.values():
            self.kill(pid)
        for role, pid in before.items():
            wait_until(lambda: self.pid(role) not in (0, pid), f"another {role}")  # noqa: B023

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the service if the test has not ended it. No process may be left."""
        if self.master.poll() is None:
            self.master.kill()
        self.master.wait(60)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self.members(), "the end of all", 60)
        left = self.members()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"left over: {left}\n{(self.folder / 'log').read_text()}"
