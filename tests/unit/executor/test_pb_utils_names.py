"""Names in `triton_python_backend_utils` against the documentation, name by name."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from shmserve.executor.backends.triton import pb_utils
from tests.backend_runner import arrays, ask, load
from tests.model_files import model_maker, triton
from tests.unit.executor.test_triton_dialect import X

DOCUMENT = Path(__file__).parents[3] / "docs/python_models.md"
TABLE = DOCUMENT.read_text().split("## Names of ")[1].split("\n## ")[0]
ROWS = [line.split("|")[1] for line in TABLE.splitlines() if line.startswith("| `")]
LISTED = [
    (name, re.findall(r"\w+", arguments) if call else None)
    for row in ROWS
    for name, call, arguments in re.findall(r"`([\w.]+)(\(([^)]*)\))?`", row)
]


@pytest.mark.parametrize(("name", "arguments"), LISTED)
def test_what_is_documented_is_there(name: str, arguments: list[str] | None) -> None:
    found: Any = pb_utils
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found) or arguments is None
    if arguments is not None:
        parameters = [p for p in inspect.signature(found).parameters if p != "self"]
        assert parameters == arguments


def test_what_is_there_is_documented() -> None:
    assert {name.partition(".")[0] for name, _ in LISTED} == set(pb_utils.__all__)


def test_numbers_are_those_of_triton() -> None:
    errors = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED")
    errors += ("ALREADY_EXISTS", "CANCELLED")  # type: ignore[assignment]
    assert [getattr(pb_utils.TritonError, name) for name in errors] == list(range(8))
    levels = ("INFO", "WARNING", "ERROR", "VERBOSE")
    assert [getattr(pb_utils.Logger, name) for name in levels] == list(range(4))
    assert list(pb_utils.MetricKind) == list(range(3))
    assert [
        pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
        pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
        pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL,
        pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    ] == [1, 2, 1, 1, 2]


def test_both_of_tritons_modules_are_there(tmp_path) -> None:
    body = """
    import c_python_backend_utils
    assert c_python_backend_utils.Tensor is pb.Tensor
    assert not hasattr(c_python_backend_utils, "shared_memory")
    return [pb.InferenceResponse([pb.Tensor("Y", np.zeros(1, np.float32))])]
    """
    backend, spec = load(model_maker(tmp_path)(triton(body)))
    assert arrays(ask(backend, spec, ("Y",), X=X))
