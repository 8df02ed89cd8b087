"""Rate limiter in a real server: instances that share a resource never execute at the same time."""

import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.holding import Hold, in_flight
from tests.running_server import wait_until
from tests.servers import SMALL, Server, only

MODELS = Path(__file__).parents[1] / "repositories" / "limited"
RESOURCES = 'resources [ { name: "memory" global: true count: 1 } ]'
BATCHING = "dynamic_batching { }"
SEQUENCES = "sequence_batching { }"
CALLS = 25


def variant(models: Path, name: str, old: str, new: str) -> None:
    """Copy the model `alone`, with one change in the configuration."""
    shutil.copytree(models / "alone", models / name)
    config = models / name / "config.pbtxt"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new, 1))


@pytest.fixture
def models(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    shutil.copytree(MODELS, models)
    for name, batcher in (("batched", BATCHING), ("sequenced", SEQUENCES)):
        variant(models, name, "instance_group", f"{batcher}\ninstance_group")
    variant(models, "elsewhere", "memory", "disk")
    return models


@pytest.fixture
def server(models: Path) -> Iterator[Server]:
    with Server(models, **SMALL, rate_limit="execution_count") as server:
        yield server


def ask(server: Server, model: str, command: str = "run", **more: Any) -> tuple[int, Any]:
    tensor = {"name": "COMMAND", "datatype": "BYTES", "shape": [1, 1], "data": [command]}
    return server.infer(model, {"inputs": [tensor], **more})


def times(server: Server, model: str, number: int) -> list[tuple[int, int]]:
    """Return when the model ran for each of several requests, sent in turn."""
    ran = []
    for _ in range(CALLS):
        if model == "streaming":
            status, told = server.post("/v2/models/streaming/generate", {"COMMAND": "run"})
            assert status == 200, told
            ran.append(told["TIMES"])
            continue
        sequence = {"sequence_id": number, "sequence_start": True, "sequence_end": True}
        more: dict[str, Any] = {"parameters": sequence} if model == "sequenced" else {}
        status, answer = ask(server, model, **more)
        assert status == 200, answer
        ran.append(answer["outputs"][0]["data"])
    return [(began, ended) for began, ended in ran]


def test_who_shares_a_resource_never_executes_beside_another(
    server: Server, threads: ThreadPoolExecutor
) -> None:
    names = ["alone", "batched", "sequenced", "streaming"] * 2
    told = [threads.submit(times, server, name, n + 1) for n, name in enumerate(names)]
    ran = sorted({run for each in told for run in each.result()})  # a batch's are all the same
    assert len(ran) > 4 * CALLS
    overlaps = [(a, b) for a, b in itertools.pairwise(ran) if b[0] < a[1]]
    assert overlaps == []


def hold(server: Server, threads: ThreadPoolExecutor, holding: Hold) -> Future[tuple[int, Any]]:
    """Let `alone` execute until the test releases it, and `batched` wait for its resource."""
    threads.submit(ask, server, "alone", f"hold:{holding.path}")
    holding.wait_begun()
    waiting = threads.submit(ask, server, "batched")
    wait_until(lambda: in_flight(server, "batched/1/0") == 1, "it does not wait")
    assert ask(server, "elsewhere")[0] == 200  # needs a different resource
    assert not waiting.done()
    return waiting


def test_the_death_of_a_holder_gives_back_what_it_held(
    server: Server, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with Hold(tmp_path) as holding:
        waiting = hold(server, threads, holding)
        os.kill(server.pids("executor alone")[0], signal.SIGKILL)
        assert waiting.result()[0] == 200
    server.wait_instances()
    assert ask(server, "alone")[0] == 200


def test_a_restarted_coordinator_knows_who_holds_and_who_waits(
    server: Server, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with Hold(tmp_path) as holding:
        waiting = hold(server, threads, holding)
        os.kill(server.pids("coordinator")[0], signal.SIGKILL)
        server.wait_linked()
        for _ in range(20):  # the limiter grants turns again
            assert ask(server, "elsewhere")[0] == 200
        assert not waiting.done()
        holding.let_go()
        assert waiting.result()[0] == 200


def test_a_deadline_passes_while_a_request_waits_for_resources(
    models: Path, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with Server(models, **SMALL, rate_limit="execution_count", request_timeout_s=2.0) as server:
        with Hold(tmp_path) as holding:
            threads.submit(ask, server, "alone", f"hold:{holding.path}")
            holding.wait_begun()
            told = [threads.submit(ask, server, name) for name in ("alone", "batched")]
            assert [each.result()[0] for each in told] == [504, 504]
        assert ask(server, "batched")[0] == 200


def test_while_it_is_off_resources_have_no_effect_and_the_log_says_so(
    models: Path, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with Server(models, **SMALL) as server:
        with Hold(tmp_path) as holding:
            threads.submit(ask, server, "alone", f"hold:{holding.path}")
            holding.wait_begun()
            assert ask(server, "batched")[0] == 200
        server.wait_log("instance_group.rate_limiter: no effect (rate_limit is off)")
        shown = server.get("/v2/models/alone/config")[1]["instance_group"][0]["rate_limiter"]
        resource = {"name": "memory", "global": True, "count": 1}
        assert shown == {"resources": [resource], "priority": 2}


def test_a_model_that_could_never_execute_is_not_loaded(models: Path) -> None:
    variant(models, "large", RESOURCES, RESOURCES.replace("count: 1", "count: 3"))
    with Server(
        models,
        **SMALL,
        rate_limit="execution_count",
        rate_limit_resources="MEMORY:2",
        **only("alone"),
    ) as server:
        status, _, answer = server.request("POST", "/v2/repository/models/large/load", b"{}")
        assert status == 400
        assert "'memory' has count 3, but rate_limit_resources has 2" in answer.decode()
        assert ask(server, "alone")[0] == 200
