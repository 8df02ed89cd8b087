"""Programs of users against a running server: tritonclient, curl, and plain gthread."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.running_server import binary_request
from tests.servers import Server, python, run_shmserve

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_client(address: str, program: str = "client_program.py") -> str:
    return python(HERE / program, address)


SHIPPED = {path.parent.name for path in (ROOT / "workers").glob("*/config.pbtxt")}
DECOUPLED = {"repeat_int32"}


def served(lines: list[str], kind: str) -> set[str]:
    """Return the workers that a program has called in this way."""
    return {line.split()[1] for line in lines if line.startswith(f"{kind} ")}


def test_tritonclient_on_every_shipped_worker(server: Server) -> None:
    lines = run_client(server.address()).split("\n")
    assert served(lines, "sync") == served(lines, "aio") == SHIPPED - DECOUPLED


def test_tritonclient_over_grpc_on_every_shipped_worker(server: Server) -> None:
    lines = run_client(server.grpc_address, "grpc_program.py").split("\n")
    assert served(lines, "sync") == SHIPPED - DECOUPLED
    assert served(lines, "stream") == served(lines, "aio") == SHIPPED
    assert "regions ok" in lines


def test_a_plain_gthread_run_works_too() -> None:
    gthread = ("-k", "gthread", "--threads", "4")
    with Server(gunicorn=gthread, grpc_processes=0) as server:
        run_client(server.address())
        status, fields, _ = binary_identity(server, np.arange(1 << 20, dtype=np.float32))
        assert status == 200
        receipt = json.loads(fields["shmserve-receipt"])
        assert receipt["copied_bytes"]["in"] == 4 << 20  # copied, and said so


def binary_identity(server: Server, array: np.ndarray) -> tuple[int, dict[str, str], bytes]:
    body, headers = binary_request(array, name="INPUT0")
    headers["shmserve-receipt"] = "1"
    return server.request("POST", "/v2/models/identity/infer", body, headers)


@pytest.mark.parametrize("mib", [1, 16, 64])
def test_the_receipt_of_a_large_request_shows_no_copy(server: Server, mib: int) -> None:
    array = np.random.default_rng(mib).random(mib << 18, dtype=np.float32)
    status, fields, body = binary_identity(server, array)
    assert status == 200
    length = int(fields["inference-header-content-length"])
    assert body[length:] == array.tobytes()
    receipt = json.loads(fields["shmserve-receipt"])
    assert receipt["copied_bytes"] == {"in": 0, "batch": 0, "out": 0, "device": 0}
    assert receipt["executor"] == "identity/1/0"
    assert all(receipt["ns"][stage] > 0 for stage in ("receive", "queue", "compute", "send"))
    assert fields["server-timing"].startswith("receive;dur=")


def test_show_tells_of_the_running_server(server: Server) -> None:
    roles = [row["role"] for row in server.show("processes")]
    assert roles.count("http") == 2
    assert roles.count("coordinator") == roles.count("supervisor") == 1
    assert {row["model"] for row in server.show("models") if row["state"] == "READY"} >= {
        "digits",
        "noop",
    }
    assert sum(int(str(row["bytes"])) for row in server.show("segments")) > 0
    assert isinstance(server.show("slots"), list)
    assert any(row.get("instance") == "digits/1/0" for row in server.show("queues"))


def test_check_finds_the_shipped_workers_in_order_and_a_bad_one_not(tmp_path: Path) -> None:
    def check(repository: Path) -> subprocess.CompletedProcess[str]:
        return run_shmserve(
            "check", environ={"PATH": "/usr/bin", "SHMSERVE_MODEL_REPOSITORY": str(repository)}
        )

    good = check(ROOT / "workers")
    assert good.returncode == 0, good.stdout + good.stderr
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "config.pbtxt").write_text('backend: "fortran"')
    bad = check(tmp_path)
    assert bad.returncode == 1
    assert "fortran" in bad.stdout + bad.stderr
