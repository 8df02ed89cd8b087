"""The gRPC service equals the service that unmodified clients are compiled against."""

import json
from pathlib import Path
from typing import Any

from tests.servers import python

SCRIPT = Path(__file__).with_name("describe_service.py")
ROOT = SCRIPT.parents[2]


def described(package: str) -> dict[str, Any]:
    printed = python(SCRIPT, package, environ={"PYTHONPATH": str(ROOT)})
    document: dict[str, Any] = json.loads(printed)
    return document


def test_names_numbers_and_types_are_those_of_tritonclient() -> None:
    ours, theirs = described("shmserve._generated"), described("tritonclient.grpc")
    assert len(ours["methods"]) == 20
    for part in ("methods", "messages", "enums"):
        assert ours[part] == theirs[part]
