"""Cost of one host for the others: reports, time series, registry entries, and places in a
balancer.

Every figure is counted on real processes: a service with a few models and with more, so that the
cost of each model shows, and a HAProxy with as many slots as a large cluster has.
"""

import json
import os
import pickle
import shutil
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from bench.scale import ray_calls
from shmserve.cluster import haproxy_config
from shmserve.cluster.cluster_file import ClusterFile, ClusterSettings, ModelTable
from shmserve.cluster.haproxy_slots import Address, backend
from shmserve.cluster.haproxy_socket import Balancer
from shmserve.cluster.node_service import NodeReport
from shmserve.cluster.policies.measured_load import NodeLook, ReplicaCounts
from tests.running_server import ROOT, RunningServer, free_port, wait_until

MODELS = (1, 8)
BALANCERS = ((10, 16), (50, 32), (140, 64))  # models, slots of each
_LOOKS = 50


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {"report": _reports()}
    found["service"] = {f"{models} models": _service(models) for models in MODELS}
    if shutil.which("haproxy"):
        found["haproxy"] = {f"{m} models x {s} slots": _balancer(m, s) for m, s in BALANCERS}
    if find_spec("ray"):
        found["ray"] = ray_calls.measure()
    return found


def _reports() -> dict[str, int]:
    """Return the bytes that one node sends through Ray at each look, before Ray's own envelope."""
    found = {}
    for models in (1, 10, 30):
        names = frozenset(f"model-{i:04}" for i in range(models))
        counts = {name: ReplicaCounts(10**6, 1234.5, 6543.2) for name in names}
        look = NodeLook(80 << 30, names, names, {}, counts)
        place = Address("192.168.100.100", 8000, 8000)
        found[f"report of {models} models, bytes"] = len(
            pickle.dumps(NodeReport(look, place, place, 12345, 1))
        )
        found[f"orders of {models} models, bytes"] = len(pickle.dumps(names))
    return found


def _service(models: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(models):
            source = ROOT / "tests/repositories/basic/echo"
            shutil.copytree(source, Path(folder) / f"echo{number}")
        with RunningServer(folder, http_workers=2) as server:
            _answer_some(server, models)
            _, _, metrics = server.request("GET", "/metrics")
            _, _, stats = server.request("GET", "/v2/models/stats")
            lines = [line for line in metrics.splitlines() if line and not line.startswith(b"#")]
            times = []
            for _ in range(_LOOKS):
                begun = time.perf_counter()
                server.request("POST", "/v2/repository/index", b'{"ready":true}')
                server.request("GET", "/v2/models/stats")
                times.append(time.perf_counter() - begun)
            return {
                "series": len(lines),
                "metrics_bytes": len(metrics),
                "statistics_bytes": len(stats),
                "look_ms": round(median(times) * 1000, 2),
                "registry_bytes": os.path.getsize(Path(server.run_dir) / "registry.msgpack"),
                "processes": len(server.processes()),
            }


def _answer_some(server: RunningServer, models: int) -> None:
    tensor = {"name": "IN", "shape": [1], "datatype": "FP32", "data": [1.0]}
    for number in range(models):
        status, answer = server.infer(f"echo{number}", {"inputs": [tensor]})
        if status != 200:
            raise RuntimeError(json.dumps(answer))


def _balancer(models: int, slots: int) -> dict[str, Any]:
    """Return the memory of a HAProxy with empty slots, and the time to fill and to read the
    slots."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ClusterSettings(
            haproxy_sockets=(f"{folder}/h.sock",),
            haproxy_slots=slots,
            haproxy_http_bind=f"127.0.0.1:{free_port()}",
            haproxy_grpc_bind=f"127.0.0.1:{free_port()}",
            haproxy_check_s=1000.0,  # no server answers
        )
        tables = {f"model-{i:04}": ModelTable(1) for i in range(models)}
        config = Path(folder) / "haproxy.cfg"
        config.write_text(haproxy_config.text(ClusterFile(settings, tables)))
        process = subprocess.Popen(
            ["haproxy", "-db", "-q", "-f", str(config)], stdin=subprocess.DEVNULL
        )
        try:
            wait_until(Path(f"{folder}/h.sock").exists, "the balancer has no socket")
            balancer = Balancer(f"{folder}/h.sock")
            nodes = [Address("127.0.0.1", 20_000 + i, 20_000 + i) for i in range(slots)]
            wanted = {
                backend(door, name): dict.fromkeys(nodes, 128)
                for door in ("http", "grpc")
                for name in tables
            }
            begun = time.perf_counter()
            commands, _ = balancer.route(wanted)
            filled = time.perf_counter()
            balancer.route(wanted)
            return {
                "slots": 2 * slots * (models + 1),
                "resident_mib": _resident(process.pid) >> 20,
                "commands": commands,
                "fill_s": round(filled - begun, 2),
                "look_s": round(time.perf_counter() - filled, 2),
                "state_bytes": len(balancer.ask(["show servers state"])),
            }
        finally:
            process.terminate()
            process.wait(20)


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
