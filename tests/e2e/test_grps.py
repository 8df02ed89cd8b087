"""GRPS users' programs against a running server, and the online flag after deaths of processes."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.holding import replace
from tests.running_server import free_port, wait_until
from tests.servers import SMALL, Server, python, served

ROOT = Path(__file__).parents[2]
REPOSITORY = ROOT / "tests" / "repositories" / "grps_project"


@pytest.fixture
def grps_server() -> Iterator[Server]:
    bind = f"127.0.0.1:{free_port()}"
    with Server(REPOSITORY, grpc_bind=bind, http_workers=2) as server:
        yield server


def test_a_program_written_from_the_documentation(grps_server: Server) -> None:
    printed = python(
        str(ROOT / "tests" / "e2e" / "grps_client.py"),
        grps_server.address(),
        grps_server.environ["SHMSERVE_GRPC_BIND"],
        environ={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert printed.split() == ["http", "grpc"]


def is_ready(server: Server) -> bool:
    return server.get("/grps/v1/health/ready")[0] == 200


def test_the_online_flag_is_one_and_survives_the_coordinator(grps_server: Server) -> None:
    assert not is_ready(grps_server)
    assert grps_server.get("/grps/v1/health/online")[0] == 200
    for _ in range(6):  # whichever HTTP worker answers
        assert is_ready(grps_server)
    replace(grps_server, "coordinator")
    # The server may still be starting, so retry the request
    wait_until(lambda: grps_server.get("/grps/v1/health/online")[0] == 200, "no answer")
    wait_until(lambda: is_ready(grps_server), "not ready again")
    os.kill(grps_server.pids("coordinator")[0], signal.SIGKILL)
    wait_until(lambda: is_ready(grps_server), "the flag was lost")
    wait_until(lambda: grps_server.get("/grps/v1/health/offline")[0] == 200, "no answer")
    assert not is_ready(grps_server)


def test_online_from_the_start() -> None:
    with Server(REPOSITORY, grps_online="true", grpc_processes=0) as server:
        assert is_ready(server)
        body = b'{"str_data": "x"}'
        kind = {"Content-Type": "application/json"}
        status, fields, answer = server.request(
            "POST", "/grps/v1/infer/predict?streaming=true", body, kind
        )
        assert (status, fields["transfer-encoding"]) == (200, "chunked")
        assert b'"str_data":"x"' in answer


projects = served(ROOT / "tests" / "repositories" / "grps", **SMALL)


JSON = {"Content-Type": "application/json"}


def post(
    server: Server, path: str, body: object, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    return server.request("POST", path, json.dumps(body).encode(), {**JSON, **headers})


def test_a_projects_answers_and_streams(projects: Server) -> None:
    predict = "/grps/v1/infer/predict?model=your_model-1.0.0"
    assert json.loads(post(projects, predict, {"str_data": "hi"})[2])["str_data"] == "hi!"
    status, fields, body = post(projects, predict + "&streaming=true", {"str_data": "a b c"})
    assert (status, fields["transfer-encoding"]) == (200, "chunked")
    assert body.replace(b"}{", b"}\n{").count(b"\n") == 2
    status, _, body = post(projects, predict + "&streaming=true", {"str_data": "a raise b"})
    first, last = body.replace(b"}{", b"}\n{").splitlines()
    assert (status, json.loads(first)["str_data"]) == (200, "a!")
    told = json.loads(last)["status"]
    assert (told["code"], told["status"]) == (500, "FAILURE")
    assert "the stream broke" in told["msg"]
    status, _, body = post(projects, predict, {"str_data": "raise"})
    assert status == json.loads(body)["status"]["code"] == 500
    assert b"/etc" not in body


def test_models_of_a_project_and_its_dag(projects: Server) -> None:
    def run(model: str) -> str:
        body = {"str_data": "x", "model": model}
        answer = json.loads(post(projects, "/grps/v1/infer/predict", body)[2])
        return str(answer["str_data"])

    assert [run("first-1.0.0"), run("second-1.0.0"), run("chain-1")] == ["xa", "xb/1", "xab/1"]


def test_a_project_with_a_path_of_its_own(projects: Server) -> None:
    path = "/v1/chat/completions"
    status, fields, body = post(projects, path, {"prompt": "a b", "stream": True})
    assert (status, fields["content-type"]) == (200, "text/event-stream")
    assert (fields["transfer-encoding"], body) == ("chunked", b"data: a\n\ndata: b\n\n")
    status, _, body = post(projects, path, {"prompt": "a b"})
    assert (status, json.loads(body)["words"]) == (200, ["a", "b"])
    status, fields, body = projects.request("GET", path + "?say=hey", None, {"User-Agent": "me"})
    assert (status, body, fields["x-agent"]) == (203, b"hey", "me")
    status, fields, body = post(projects, path, {"fail": 1})
    assert (status, fields["content-type"].partition(";")[0]) == (500, "text/plain")
    assert b"no chat today" in body
    assert b"Traceback" not in body
