"""The gRPC service equals the service that unmodified clients are compiled against."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("describe_service.py")
ROOT = SCRIPT.parents[2]


def described(package: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), package],
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_names_numbers_and_types_are_those_of_tritonclient() -> None:
    ours, theirs = described("shmserve._generated"), described("tritonclient.grpc")
    assert len(ours["methods"]) == 20
    for part in ("methods", "messages", "enums"):
        assert ours[part] == theirs[part]
