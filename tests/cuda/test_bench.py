"""`python -m bench.gpu` in short: everything it measures runs and is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NOTHING = {"in": 0, "batch": 0, "out": 0, "device": 0}


def test_everything_runs_and_the_fake_is_not_timed(
    cuda_environment: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--quick", "--output", output],
        cwd=ROOT,
        env=os.environ | cuda_environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(output.read_text())
    assert told["parts"].keys() == {"copies", "regions", "overlap", "rounds", "deaths"}
    places = told["parts"]["regions"]["rows"]["1 MiB"]
    assert places["CUDA region"]["copied_bytes"] == NOTHING
    assert places["binary HTTP"]["copied_bytes"] == {**NOTHING, "device": 2 << 20}
    assert told["parts"]["deaths"]["requests_of_another_client"] > 0
    if told["gpu"]["cupy"] == "0-fake":
        assert told["gpu"]["timing"] == "fake: no timing"
        assert set(told["parts"]["copies"]["rows"]["bare"].values()) == {"fake: no timing"}
