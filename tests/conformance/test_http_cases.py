"""Recorded requests of the inference protocol against a real server.

Requests about client shared memory have separate objects and regions each.
"""

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conformance.conformance_runner import judge, load_cases, send
from tests.running_server import RunningServer

SHM = Path("/dev/shm")
BASE = "/v2/systemsharedmemory"
CASES = load_cases()
REGION_CASES = load_cases("regions")


@pytest.mark.parametrize("case", CASES, ids=[f"{c['group']}-{c['name']}" for c in CASES])
def test_case(case: dict[str, Any], conformance_server: RunningServer) -> None:
    answer = send(case, conformance_server.http_host, conformance_server.http_port)
    assert not judge(case, answer)


def fill(size: int, kind: Any) -> bytes:
    if isinstance(kind, dict):
        data = base64.b64decode(kind["base64"])
    elif kind == "arange_f32":
        data = np.arange(size // 4, dtype=np.float32).tobytes()
    else:
        data = b"\xff" * size if kind == "ff" else b""
    return data.ljust(size, b"\0")


class Steps:
    """Prepares the objects of a case and checks the state afterwards."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.made: dict[str, int] = {}

    def do(self, step: dict[str, Any]) -> None:
        kind = step["op"].removeprefix("shm_")
        if kind == "register":
            fields = {key: step[key] for key in ("key", "offset", "byte_size")}
            path = f"{BASE}/region/{step['name']}/register"
            status = self.server.request("POST", path, json.dumps(fields).encode())[0]
            assert status == 200 or not step.get("must", True)
            return
        if kind == "unregister":
            path = f"{BASE}/region/{step['name']}/unregister"
            assert self.server.request("POST", path)[0] == 200
            return
        if kind == "unregister_all":
            assert self.server.request("POST", f"{BASE}/unregister")[0] == 200
            return
        path = SHM / step["name"]
        if kind == "create":
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, fill(step["size"], step["fill"]))
            self.made[step["name"]] = fd
        elif kind == "mkdir":
            path.mkdir()
        elif kind == "chmod":
            path.chmod(step["mode"])
        elif kind == "truncate":
            os.truncate(path, step["size"])
        else:
            assert kind == "unlink"
            path.unlink()

    def after(self, checks: list[dict[str, Any]]) -> list[str]:
        status = json.loads(self.server.request("GET", f"{BASE}/status")[2])
        listed = {region["name"]: region for region in status}
        problems = []
        for check in checks:
            kind, name = check["op"], check["name"]
            if kind == "region_absent":
                ok = name not in listed
            elif kind == "region_listed":
                ok = listed.get(name) == {k: v for k, v in check.items() if k != "op"}
            else:
                wanted = bytearray(fill(check["size"], check["fill"]))
                for offset, data in check["patch"]:
                    raw = base64.b64decode(data)
                    wanted[offset : offset + len(raw)] = raw
                ok = os.pread(self.made[name], 1 << 20, 0) == bytes(wanted)
            problems += [] if ok else [f"{check} does not hold: {listed}"]
        return problems

    def clean(self, case: dict[str, Any]) -> None:
        self.server.request("POST", f"{BASE}/unregister")
        for step in case["setup"]:
            path = SHM / step.get("name", "")
            if step["op"] == "shm_mkdir":
                path.rmdir()
            elif step["op"] == "shm_create":
                path.unlink(missing_ok=True)
                os.close(self.made[step["name"]])


@pytest.fixture
def steps(conformance_server: RunningServer) -> Iterator[Steps]:
    yield Steps(conformance_server)
    assert conformance_server.ready()


@pytest.mark.parametrize(
    "case", REGION_CASES, ids=[f"{c['group']}-{c['name']}" for c in REGION_CASES]
)
def test_region_case(case: dict[str, Any], steps: Steps) -> None:
    try:
        for step in case["setup"]:
            steps.do(step)
        answer = send(case, steps.server.http_host, steps.server.http_port)
        assert not judge(case, answer, steps.after)
    finally:
        steps.clean(case)
