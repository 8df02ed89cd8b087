"""Cost of orders and reports on their way through Ray, with actors that are asked as nodes are."""

import contextlib
import os
import secrets
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from shmserve.cluster.haproxy_slots import Address
from shmserve.cluster.node_service import NodeReport
from shmserve.cluster.policies.measured_load import NodeLook, ReplicaCounts
from tests.running_server import marked

ACTORS = 8
_MODELS = 10
_ROUNDS = 100
_STORE = 80 << 20


class _Node:
    """A node with ten models, without a service."""

    def __init__(self) -> None:
        names = frozenset(f"model-{i:04}" for i in range(_MODELS))
        counts = {name: ReplicaCounts(10**6, 1234.5, 6543.2) for name in names}
        place = Address("192.168.100.100", 8000, 8000)
        look = NodeLook(80 << 30, names, names, {}, counts)
        self._report = NodeReport(look, place, place, 12345, 1)

    def update(self, orders: frozenset[str]) -> NodeReport:
        return self._report


def measure() -> dict[str, Any]:
    """Return the milliseconds of a call, alone and beside other calls, and the memory of the
    processes."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # loopback alone
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    import ray

    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAY_TMPDIR"] = folder
        plasma = Path(folder, "plasma")
        plasma.mkdir()
        (Path(folder) / "ray").mkdir()
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=_STORE,
            log_to_driver=False,
            _plasma_directory=str(plasma),
            _node_ip_address="127.0.0.1",
        )
        try:
            return _calls(ray)
        finally:
            ray.shutdown()


def _calls(ray: Any) -> dict[str, Any]:
    kind = ray.remote(num_cpus=0)(_Node)
    actors = [kind.remote() for _ in range(ACTORS)]
    orders = frozenset(f"model-{i:04}" for i in range(_MODELS))
    ray.get([actor.update.remote(orders) for actor in actors])
    alone, together = [], []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        ray.get(actors[0].update.remote(orders))
        alone.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        ray.get([actor.update.remote(orders) for actor in actors])
        together.append((time.perf_counter() - begun) / ACTORS)
    return {
        "a call, ms": round(median(alone) * 1000, 2),
        f"one of {ACTORS} at once, ms": round(median(together) * 1000, 2),
        "resident MiB of a node's raylet": _resident(("raylet/raylet",)),
        "resident MiB of an actor": _resident(("ray::_Node",)) // ACTORS,
    }


def _resident(titles: tuple[str, ...]) -> int:
    """Return the MiB of this process's descendants with one of `titles` in the command line."""
    total = 0
    for pid in marked(f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}"):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if any(title in command for title in titles):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (total * os.sysconf("SC_PAGE_SIZE")) >> 20
