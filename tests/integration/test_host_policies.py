"""Host policies: instances run on the cores, and take memory of the node, that the policy names."""

import os
from pathlib import Path
from typing import Any

import pytest

from shmserve import config
from shmserve.errors import ConfigError
from shmserve.executor.process.host_policy import HostPolicy, parse
from tests.model_files import model_maker
from tests.running_server import RunningServer, wait_until
from tests.servers import SMALL, Starting

MODEL = """
    import os
    import threading

    import numpy as np

    class Model:
        def infer(self, request):
            cores = [sorted(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")]
            with open("/proc/self/numa_maps") as file:
                bound = sum(" bind:0 " in line for line in file)
            everywhere = sorted({core for some in cores for core in some})
            return {"CORES": np.array(everywhere, np.int32), "BOUND": np.array([bound], np.int32)}
"""
CONFIG = """
    backend: "python"
    input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
    output [
      { name: "CORES" data_type: TYPE_INT32 dims: [ -1 ] },
      { name: "BOUND" data_type: TYPE_INT32 dims: [ 1 ] }
    ]
    instance_group [ { kind: KIND_CPU host_policy: "%s" } ]
"""
ASKED = {"inputs": [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [1]}]}


def test_rules_add_up() -> None:
    assert parse(["cpu-cores=0-2", "cpu-cores=7"]) == HostPolicy(frozenset({0, 1, 2, 7}))
    assert parse(["numa-node=1"]) == HostPolicy(node=1)


@pytest.mark.parametrize("rule", ["cpu-cores=a", "cpu-cores=1,numa=2", "cores=1", ""])
def test_rules_that_mean_nothing_are_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match="host_policies"):
        config.load({"SHMSERVE_HOST_POLICIES": f"cpu={rule}"})


def answers(server: RunningServer, model: str, found: dict[str, Any]) -> bool:
    """Put the answer into `found`. Return False if there is none, as when a thread has ended."""
    status, document = server.infer(model, ASKED) if server.lives() else (0, {})
    found[model] = {output["name"]: output["data"] for output in document.get("outputs", ())}
    return status == 200


def reason(server: RunningServer, model: str) -> str:
    """Return the reason in the index why a model is not served."""
    return "".join(row.get("reason", "") for row in server.index() if row["name"] == model)


def test_instances_keep_to_their_policies(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    first, last = cores[0], cores[-1]
    for name in ("plain", "named", "unknown", "gone"):
        model_maker(tmp_path)(MODEL, CONFIG % ("" if name == "plain" else name), name)
    policies = {
        "cpu": [f"cpu-cores={first}"],
        "named": [f"cpu-cores={first}-{last}", "numa-node=0"],
        "gone": ["cpu-cores=1000-1001"],
    }
    text = ";".join(f"{name}={','.join(rules)}" for name, rules in policies.items())
    with Starting(tmp_path, **SMALL, host_policies=text) as server:
        found: dict[str, Any] = {}
        for name in ("plain", "named", "unknown"):
            wait_until(lambda name=name: answers(server, name, found), f"{name} is not loaded")  # type: ignore[misc]
        assert found["plain"] == {"CORES": [first], "BOUND": [0]}
        assert found["named"]["CORES"] == sorted(os.sched_getaffinity(0))
        assert found["named"]["BOUND"][0] > 0
        assert found["unknown"]["CORES"] == sorted(os.sched_getaffinity(0))
        wait_until(lambda: reason(server, "gone"), "it has not failed")
        assert reason(server, "gone").endswith(
            "host policy 'gone': none of the cores [1000, 1001] can be used here"
        )
