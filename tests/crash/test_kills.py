"""kill -9 is a normal event: at named points of the code, and under load."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.crash.chaos import with_batches
from tests.crash.disturbances import ROLES
from tests.crash.load import ALONE, WITH_BATCHES, Load
from tests.crash.soak import grown, slots, soak, write
from tests.needs import NEEDS
from tests.running_server import RunningServer, wait_until
from tests.servers import Server, only

HERE = Path(__file__).parent
MODELS = HERE.parent / "repositories" / "basic"

# The models that `Load` uses; no other model need be started.
LOADED: dict[str, Any] = {**only("echo,pair"), "grpc_processes": 0}
BATCHES = LOADED | {"load_models": "echo,pair,gathered"}

# Where each process dies: before the n-th call of a function.
POINTS = {
    "frontend, slot reserved": "shmserve.dispatch.calls.call:Call.add_input:20",
    "frontend, request sent": "shmserve.dispatch.calls.attempt:Attempt._wait:20",
    "frontend, answer received": "shmserve.dispatch.calls.call:Call._output:20",
    "frontend, slots not yet released": "shmserve.dispatch.calls.call:Call.close:20",
    "executor, request received": "shmserve.executor.loop.request_runner:RequestRunner.run:20",
    "executor, output reserved": "shmserve.executor.tensors.request:ExecutorRequest.offer:20",
    "executor, output written": "shmserve.executor.tensors.request:Outputs.lease:20",
    "executor, answer not yet sent": "shmserve.executor.peers.channels:Channels.send:20",
    "executor, request of a lane read": "shmserve.executor.peers.lane_gate:LaneGate.admit:20",
    "executor, answer of a lane not yet sent": (
        "shmserve.executor.peers.lane_peers:LanePeers.answer:20"
    ),
    "executor, answer of a lane not yet counted": (
        "shmserve.executor.peers.lane_counting:LaneCounting.answered:20"
    ),
    "executor, segment about to be made": "shmserve.shm.segment:Segment.__init__:3",
    "any, segment still has its name": "posix_ipc:unlink_shared_memory:3",
    "executor, model loaded": "shmserve.executor.loop.loop:Loop.run:1",
    "executor, batch is being gathered": "shmserve.executor.tensors.batch:GatheredBatch.add:20",
    "executor, batch gathered": "shmserve.executor.loop.batch_runner:BatchRunner._infer:20",
    "executor, half a batch leased": "shmserve.executor.tensors.batch:BatchedOutputs.lease:20",
    "coordinator, snapshot unpublished": "shmserve.shm.registry_page:RegistryWriter.publish:3",
    "coordinator, budget asked": "shmserve.core.memory.budget:Ledger.grant:2",
    "supervisor, before it starts": "shmserve.supervisor.processes.executors:Executors._start:2",
}


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS.keys())
def test_a_process_that_dies_at_a_named_point_costs_its_own_request_at_most(
    point: str, tmp_path: Path
) -> None:
    flag = tmp_path / "armed"
    flag.touch()
    environ = {"PYTHONPATH": str(HERE / "points"), "CRASH_POINT": point, "CRASH_FLAG": str(flag)}
    models, settings, asked = MODELS, LOADED, ALONE
    if "batch" in point.lower():
        models, settings, asked = with_batches(tmp_path / "models"), BATCHES, WITH_BATCHES  # type: ignore[assignment]
    with Server(models, environ, **settings) as server:
        with Load(server, clients=4, models=asked) as verdict:
            wait_until(lambda: not flag.exists(), f"nothing died at {point}")
            seen = verdict.counts["right"]
            wait_until(lambda: verdict.counts["right"] > seen + 200, "no answers afterwards")
        server.wait_ready()
        assert verdict.wrong == []
        wait_until(lambda: slots(server) == 0, "slots are left")


def test_chaos_once() -> None:
    """Every process is killed under load, each while something else goes wrong as well."""
    command = [sys.executable, "-m", "tests.crash.chaos", "--once", "--seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert {f"kill {role}" for role in ROLES} <= summary["disturbances"].keys()
    assert summary["left_out"] == [] or not NEEDS["mounts"].met()
    assert summary["batches"] > 0


def test_supervisor_and_coordinator_at_once() -> None:
    with Server(MODELS, **LOADED) as server:
        server.wait_instances()
        server.wait_arenas()
        before = server.pids("executor")
        # Sizes for which no arena has to grow, because growth needs the coordinator.
        with Load(server, clients=2, sizes=(10, 1000, 20_000)) as verdict:
            # A lane and an executor's first use of a region need the coordinator as well.
            wait_until(lambda: verdict.counts["over lane"] > 50, "no answers over a lane")
            killed = {role: server.pids(role) for role in ("supervisor", "coordinator")}
            for (pid,) in killed.values():
                os.kill(pid, signal.SIGKILL)
            for role, pids in killed.items():
                wait_until(lambda: server.pids(role) not in ([], pids), f"no {role}")  # noqa: B023
        server.wait_ready()
        assert verdict.wrong == []
        assert verdict.closed == []
        assert verdict.refused == []  # the data path does not use supervisor and coordinator
        assert server.pids("executor") == before  # models were not loaded again


def test_after_kill_9_of_the_master_one_restart_leaves_nothing() -> None:
    with Server(MODELS, **LOADED | {"grpc_processes": 1}) as server:
        assert server.master is not None
        server.master.kill()
        server.master.wait()
        wait_until(lambda: not server.processes(), f"still there: {server.processes()}")
        server.start()


def test_sighup_replaces_http_workers_and_leaves_models_alone() -> None:
    with Server(MODELS, **LOADED) as server:
        server.wait_instances()
        executors, workers = server.pids("executor"), server.pids("http worker")
        with Load(server, clients=4) as verdict:
            assert server.master is not None
            server.master.send_signal(signal.SIGHUP)
            wait_until(
                lambda: (
                    not set(workers) & set(server.pids("http worker"))
                    and len(server.pids("http worker")) == len(workers)
                ),
                "workers were not replaced",
            )
        assert server.pids("executor") == executors
        assert verdict.wrong == []
        assert verdict.refused == []


def test_a_restarted_executor_is_told_of_by_the_next_kill(own_server: RunningServer) -> None:
    own_server.wait_instances()
    expected = len(own_server.pids("executor"))
    for _ in range(3):  # restarts back off, but come
        (victim,) = own_server.pids("executor echo")
        os.kill(victim, signal.SIGKILL)
        wait_until(
            lambda: (
                victim not in own_server.pids("executor echo")  # noqa: B023
                and len(own_server.pids("executor")) >= expected
                and own_server.ready()
            ),
            "echo is not back",
        )


def test_nothing_grows(tmp_path: Path) -> None:
    with Server(MODELS, **LOADED | {"grpc_processes": 1}) as server:
        verdict, samples = soak(server, seconds=6, every_s=0.2)
    assert grown(samples) == []
    assert verdict.wrong == verdict.silent() == []
    assert {"http worker", "grpc", "executor", "coordinator"} <= {one.role for one in samples}
    assert samples[-1].slots == 0
    write(samples, tmp_path / "soak", "soak")
    assert (tmp_path / "soak.svg").read_text().count("<polyline") > 20
