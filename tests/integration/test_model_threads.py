"""Threads of a model's runs: OpenMP's policy, and the number that `shmserve show models` has."""

import os
from pathlib import Path

import pytest

from tests.model_files import model_maker
from tests.running_server import ROOT
from tests.servers import SMALL, Server, only

MODEL = """
    import os

    import numpy as np

    class Model:
        def infer(self, request):
            return {"OUT": np.array([os.environ["OMP_WAIT_POLICY"].encode()], object)}
"""
CONFIG = """
    backend: "python"
    input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
    output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
ASKED = {"inputs": [{"name": "IN", "shape": [1], "datatype": "INT32", "data": [1]}]}


@pytest.mark.parametrize(("given", "policy"), [("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_of_openmp_sleep_while_they_wait_unless_told_otherwise(
    tmp_path: Path, given: str, policy: str
) -> None:
    model_maker(tmp_path)(MODEL, CONFIG, "told")
    environ = {"OMP_WAIT_POLICY": given} if given else {}
    with Server(tmp_path, environ, **SMALL) as server:
        status, answer = server.infer("told", ASKED)
        assert (status, answer["outputs"][0]["data"]) == (200, [policy])
        [row] = server.show("models")
        assert row["threads"] == 0, "the model chooses its threads itself"


def test_the_threads_of_an_onnx_model_are_shown() -> None:
    with Server(ROOT / "workers", **only("digits"), **SMALL) as server:
        rows = [row for row in server.show("models") if row["instance"]]
    assert {row["threads"] for row in rows} == {max(1, len(os.sched_getaffinity(0)) // len(rows))}
