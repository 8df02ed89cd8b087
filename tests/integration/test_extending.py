"""A distribution from outside adds a backend, a reader of folders, a route and a gRPC service."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import DoubleValue

from shmserve.testing.running_server import RunningServer

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "polynomial"


def install(folder: Path, project: Path) -> Path:
    """What `pip install` makes of the example: its packages, and the entry points of its table.

    Nothing is fetched or built, so that this needs no network and no build backend.
    """
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    packages = [path.parent for path in project.glob("*/__init__.py")]
    for package in packages:
        shutil.copytree(package, folder / package.name)
    about = folder / f"{table['name'].replace('-', '_')}-{table['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {table['name']}\nVersion: {table['version']}\n"
    )
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())])
        for group, entries in table["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"), EXAMPLE)


@pytest.fixture(scope="module")
def server(site: Path) -> Iterator[RunningServer]:
    with RunningServer(
        EXAMPLE / "models",
        {"PYTHONPATH": str(site), "SHMSERVE_POLYNOMIAL_LARGEST": "1000"},
        http_workers=1,
    ) as running:
        yield running
    assert running.leaks() == []


def infer(server: RunningServer, model: str, values: list[float]) -> list[float]:
    request = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [len(values)]}]}
    request["inputs"][0]["data"] = values
    status, _, body = server.request(
        "POST", f"/v2/models/{model}/infer", json.dumps(request).encode()
    )
    assert status == 200, body
    data: list[float] = json.loads(body)["outputs"][0]["data"]
    return data


def test_its_reader_finds_models_and_its_backend_runs_them(server: RunningServer) -> None:
    assert infer(server, "square", [1.0, 2.0, -3.0]) == [1.0, 4.0, 9.0]
    status, _, body = server.request("GET", "/v2/models/square/config")
    config = json.loads(body)
    assert (status, config["backend"]) == (200, "polynomial")
    assert config["default_model_filename"] == "coefficients.json"


def test_its_route_is_served_with_its_settings(server: RunningServer) -> None:
    status, _, body = server.request("GET", "/polynomial/square?x=12")
    assert (status, json.loads(body)) == (200, {"y": 144.0})
    for query, why in (("x=two", "x must be a number"), ("x=1001", "polynomial_largest")):
        status, _, body = server.request("GET", f"/polynomial/square?{query}")
        assert status == 400
        assert why in json.loads(body)["error"]
    assert server.request("GET", "/polynomial/none?x=1")[0] == 404


def test_its_service_is_served(server: RunningServer) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        ask = channel.unary_unary(
            "/example.Polynomial/Value",
            request_serializer=Struct.SerializeToString,
            response_deserializer=DoubleValue.FromString,
        )
        message = Struct()
        message.update({"model": "square", "x": 7})
        assert ask(message, timeout=60).value == 49
        with pytest.raises(grpc.RpcError) as told:
            ask(Struct(), timeout=60)
        assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_its_route_asks_for_the_secret_of_its_category(site: Path) -> None:
    with RunningServer(
        EXAMPLE / "models",
        {"PYTHONPATH": str(site)},
        http_workers=1,
        grpc_processes=0,
        http_restricted_api="inference:x-key=secret",
    ) as running:
        assert running.request("GET", "/polynomial/square?x=2")[0] == 403
        fields = {"x-key": "secret"}
        status, _, body = running.request("GET", "/polynomial/square?x=2", headers=fields)
        assert (status, json.loads(body)) == (200, {"y": 4.0})


def test_without_it_the_models_are_not_known() -> None:
    done = check({})
    assert done.returncode == 1
    assert "square: config.pbtxt is missing" in done.stdout.replace("'", "").replace("model ", "")


def test_a_setting_that_no_extension_has_is_unknown(site: Path) -> None:
    assert check({"PYTHONPATH": str(site)}).returncode == 0
    done = check({"PYTHONPATH": str(site), "SHMSERVE_POLYNOMIAL_LEAST": "1"})
    assert "unknown setting SHMSERVE_POLYNOMIAL_LEAST" in done.stdout + done.stderr


def check(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shmserve.cli", "check"],
        env={"SHMSERVE_MODEL_REPOSITORY": str(EXAMPLE / "models"), "PATH": "/usr/bin", **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_document_shows_the_files_as_they_are() -> None:
    document = (ROOT / "docs" / "extending.md").read_text()
    shown = re.findall(r"<!-- file: (\S+) -->\n\n((?:    .*\n|\n)+)", document)
    assert len(shown) >= 5
    for name, block in shown:
        lines = [line.removeprefix("    ") for line in block.strip("\n").splitlines()]
        assert "\n".join(lines) + "\n" == (EXAMPLE / name).read_text(), name
