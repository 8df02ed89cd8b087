"""Response cache in a real server: from config.pbtxt to statistics and metrics."""

import os
import signal
from pathlib import Path

import pytest

from tests.holding import statistics
from tests.model_files import model_maker
from tests.running_server import wait_until
from tests.servers import SMALL, Server, only

MODEL = """
import os
import numpy as np

class Model:
    runs = 0

    def infer(self, request):
        Model.runs += 1
        return {"RUN": np.array([Model.runs, os.getpid()], np.int64)}
"""
CONFIG = """
    backend: "python"
    input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
    output [ { name: "RUN" data_type: TYPE_INT64 dims: [ 2 ] } ]
    %s
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, cache in (("kept", "response_cache { enable: true }"), ("plain", "")):
        model_maker(tmp_path)(MODEL, CONFIG % cache, name)
    return tmp_path


def test_a_kept_answer_outlives_its_executor_but_not_its_model(repository: Path) -> None:
    with Server(
        repository, **SMALL, **only("*"), response_cache_bytes=1 << 20, metrics_triton_names="true"
    ) as server:

        def ask(model: str, value: int) -> list[int]:
            tensor = {"name": "IN", "shape": [1], "datatype": "INT32", "data": [value]}
            status, document = server.infer(model, {"inputs": [tensor]})
            assert status == 200, document
            data: list[int] = document["outputs"][0]["data"]
            return data

        first = ask("kept", 1)
        assert ask("kept", 1) == first
        assert [ask("kept", 2)[0], ask("plain", 1)[0], ask("plain", 1)[0]] == [2, 1, 2]
        os.kill(first[1], signal.SIGKILL)
        wait_until(lambda: _pid(server) not in (0, first[1]), "it is not restarted")
        assert ask("kept", 1) == first
        inference = statistics(server, "kept")["inference_stats"]
        found = {key: inference[key]["count"] for key in ("success", "cache_hit", "cache_miss")}
        assert found == {"success": 4, "cache_hit": 2, "cache_miss": 2}
        assert statistics(server, "kept")["inference_count"] == 2
        _, _, page = server.request("GET", "/metrics")
        hits = b'nv_cache_num_hits_per_model{model="kept",version="1"} 2'
        assert hits in page.splitlines()
        (repository / "kept" / "1" / "model.py").write_text(MODEL + "# changed\n")
        assert server.control("load", "kept") == (200, None)
        again = ask("kept", 1)
        assert again[0] == 1
        assert again != first


def _pid(server: Server) -> int:
    rows = server.show("models")
    return next((r["pid"] for r in rows if r["instance"].startswith("kept/") and r["pid"]
                 and r["instance_state"] == "READY"), 0)  # fmt: skip
