"""Short run of `python -m bench.gpu`: every measurement runs and is right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda import fake, standin
from tests.servers import completed

ROOT = Path(__file__).parents[2]
PARTS = "copies", "regions", "overlap", "deaths", "executors", "rounds"
NOTHING = {"in": 0, "batch": 0, "out": 0, "device": 0}

pytestmark = [
    pytest.mark.fake_cuda,  # on a GPU the benchmark runs alone
    pytest.mark.skipif(standin.active(), reason="with kernels of g++ it takes minutes"),
]


def run(environment: dict[str, str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return completed(
        sys.executable, "-m", "bench.gpu", "--quick", *arguments, environ=os.environ | environment
    )


def test_everything_runs_and_the_fake_is_not_timed(
    cuda_environment: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "result.json"
    done = run(cuda_environment, "--output", output)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(output.read_text())
    assert told["parts"].keys() == set(PARTS)
    assert told["method"].startswith("Gains from a GPU")
    assert told["parts"]["rounds"]["grpc"]["rounds"] == 20
    assert done.stdout.endswith("problems: none\n")
    places = told["parts"]["regions"]["rows"]["1 MiB"]
    assert places["CUDA region"]["copied_bytes"] == NOTHING
    assert places["binary HTTP"]["copied_bytes"] == {**NOTHING, "device": 2 << 20}
    assert told["parts"]["deaths"]["requests_of_another_client"] > 0
    if told["gpu"]["cupy"] == "0-fake":
        assert told["gpu"]["timing"] == "fake: no timing"
        assert set(told["parts"]["copies"]["rows"]["bare"].values()) == {"fake: no timing"}


def test_a_part_that_fails_hides_no_other(compiled: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    little = fake.environment(compiled, memory=3 << 20)  # copies need more, regions do not
    done = run(little, "--only", "copies,regions", "--output", output)
    assert done.returncode == 1
    parts = json.loads(output.read_text())["parts"]
    assert "no memory left" in parts["copies"]["problems"][0]
    assert parts["regions"]["problems"] == []
    assert parts["regions"]["rows"].keys() == {"64 KiB", "1 MiB"}
