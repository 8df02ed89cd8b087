"""A really small /dev/shm, as in containers: in a mount namespace of the server."""

import json

import pytest

from tests.running_server import ROOT, RunningServer
from tests.servers import SMALL, Server, only

MODELS = ROOT / "tests/repositories/basic"
SETTINGS = SMALL | only("echo")
MIB = 1 << 20


def echo(server: RunningServer, nbytes: int) -> tuple[int, str]:
    """Return the status, and the error text or ""."""
    header = {"Inference-Header-Content-Length": "0"}
    status, _, body = server.request("POST", "/v2/models/echo/infer", bytes(nbytes), header)
    return status, "" if status == 200 else json.loads(body)["error"]


@pytest.mark.needs("mounts")
@pytest.mark.parametrize("pool", [0, 64 * MIB])
def test_what_fits_is_served_and_what_does_not_is_refused(pool: int) -> None:
    """No process gets a SIGBUS, even if the configured pool is larger than /dev/shm."""
    mount = 'mount -t tmpfs -o size=16M shm /dev/shm && exec "$@"'
    within = ("unshare", "--mount", "sh", "-c", mount, "sh")
    with Server(MODELS, within=within, **SETTINGS, pool_bytes=pool) as server:
        before = server.pids("executor"), server.pids("http worker")
        if pool:
            server.wait_log("enlarge /dev/shm")
        for _ in range(2):
            assert echo(server, MIB) == (200, "")
            status, why = echo(server, 15 * MIB)
            assert status == (503 if pool else 413)
            assert ("pool_bytes" if not pool else "shared memory is full") in why
        assert (server.pids("executor"), server.pids("http worker")) == before
        assert pool or "enlarge /dev/shm" not in server.log()
