"""The service as the systemd unit confines it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmserve.testing.running_server import ROOT, RunningServer

UNIT = ROOT / "deploy/systemd/shmserve.service"


def start_confined(server, folder, *options):
    with server.log_path.open("ab") as log:
        server.master = subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "tests/integration/confined.py"), str(UNIT)),
                *(str(folder), *options),
                *(sys.executable, "-m", "shmserve", "serve"),
            ],
            cwd=ROOT,
            env=server.environ,
            stdout=log,
            stderr=log,
        )


@pytest.mark.needs("seccomp")
@pytest.mark.parametrize(
    "options", [(), pytest.param(("--mounts",), marks=pytest.mark.needs("mounts"))]
)
def test_it_serves_over_every_socket_as_the_unit_confines_it(tmp_path, options):
    """Layout as in the unit: sockets where clients reach them, the run directory below."""
    os.chmod(tmp_path, 0o755)
    server = RunningServer(model_control="explicit", load_models="identity", http_workers=1)
    server.unix_path = f"{tmp_path}/http.sock"
    server.environ["SHMSERVE_HTTP_BIND"] = f"127.0.0.1:{server.http_port},unix:{server.unix_path}"
    server.environ["SHMSERVE_GRPC_BIND"] = f"{server.grpc_address},unix:{tmp_path}/grpc.sock"
    server.environ["SHMSERVE_RUN_DIR"] = server.run_dir = f"{tmp_path}/private"
    try:
        start_confined(server, tmp_path, *options)
        server.wait_ready()
        server.wait_linked()
        (executor,) = server.pids("executor")
        confined = Path(f"/proc/{executor}/status").read_text()
        assert "Seccomp:\t2\n" in confined
        if options:
            assert "CapEff:\t0000000000000000\n" in confined
            check_mounts(executor, tmp_path)
        assert server.pids("grpc"), server.log()
        for name in ("http.sock", "grpc.sock"):
            assert (tmp_path / name).is_socket(), server.log()
        server.stop()
    finally:
        server.kill_all()
    assert server.leaks() == []


def check_mounts(pid, folder):
    """Check that a server process can write only to its folder and sees no files of others."""
    seen = Path(f"/proc/{pid}/root")
    assert os.statvfs(seen).f_flag & os.ST_RDONLY
    assert not os.statvfs(f"{seen}{folder}").f_flag & os.ST_RDONLY
    assert not os.statvfs(seen / "dev/shm").f_flag & os.ST_RDONLY
    theirs = {path.parts[2] for path in (folder, ROOT) if path.is_relative_to("/tmp")}
    assert set(os.listdir(seen / "tmp")) == theirs
    assert not [*(seen / "home").iterdir()]


def test_executors_go_first_where_memory_runs_out():
    settings: dict[str, Any] = {
        "model_control": "explicit",
        "load_models": "identity",
        "http_workers": 1,
    }
    with RunningServer(**settings) as server:
        found = {
            title: int(Path(f"/proc/{pid}/oom_score_adj").read_text())
            for pid, title in server.processes().items()
        }
        assert found.pop("shmserve: executor identity/1/0") == 500
        assert max(found.values()) < 500
