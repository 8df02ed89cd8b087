"""The native dialect: requests, offered outputs, nonsense."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import Internal
from shmserve.testing.backend_runner import FakeBackendRequest, arrays, ask, failure, load
from shmserve.testing.model_files import Make, native

X = np.arange(4, dtype=np.float32)


# ------------------------------------------------------------- native dialect


def test_native_context_and_close(make: Make, tmp_path: Path) -> None:
    code = f"""
    class Model:
        def __init__(self, context):
            self.context = context
        def infer(self, request):
            c = self.context
            return {{"S": __import__("numpy").array([c.spec.name, c.instance], object)}}
        def close(self):
            open({str(tmp_path / "closed")!r}, "w").close()
    """
    backend, spec = load(make(code))
    assert arrays(ask(backend, spec, ("S",), X=X))["S"].tolist() == ["m", "m/1/0"]
    backend.close()
    backend.close()
    assert (tmp_path / "closed").exists()


def test_native_request(make: Make) -> None:
    code = native(
        """
        x = request.input("X")
        assert not x.flags.writeable
        assert request.id == "request-1" and request.parameters == {"p": 5}
        assert request.requested == ("Y",) and request.inputs == ("X",)
        assert not request.cancelled
        out = request.output("Y", x.shape)
        assert request.output("Y", list(x.shape)) is out
        np.multiply(x, 2, out=out)
        """
    )
    backend, spec = load(make(code))
    assert arrays(ask(backend, spec, ("Y",), {"p": 5}, X=X))["Y"].tolist() == [0, 2, 4, 6]


def test_native_outputs_nobody_wants_cost_nothing(make: Make) -> None:
    code = native(
        """
        request.output("Y", (3,))[:] = 1
        return {"S": np.array([b"a", b"b"])}
        """
    )
    backend, _spec = load(make(code))
    request = FakeBackendRequest(("S",), X=X)
    got = arrays(backend.execute([request])[0])
    assert request.offered == {}
    assert got["S"].dtype == object
    assert got["S"].tolist() == [b"a", b"b"]


def test_a_returned_input_is_passed_through(make: Make) -> None:
    backend, _spec = load(make(native("return {'Y': request.input('X')}")))
    request = FakeBackendRequest(("Y",), X=X)
    got = arrays(backend.execute([request])[0])
    assert np.shares_memory(got["Y"], request.inputs["X"].memory)


@pytest.mark.parametrize("readable", [True, False], ids=["number", "complex"])
def test_what_speaks_dlpack_is_taken_without_a_copy(make: Make, readable: bool) -> None:
    """Such as torch's tensors."""
    body = """
        class Tensor:
            def __init__(self, array):
                self.array = array
            def __dlpack__(self, **_):
                return self.array.__dlpack__()
        made = self.made = np.ones(4, request.parameters["dtype"])
        return {"Y": Tensor(made)}
    """
    backend, spec = load(make(native(body)))
    response = ask(backend, spec, ("Y",), {"dtype": "float32" if readable else "complex64"}, X=X)
    if readable:
        got = arrays(response)["Y"]
        assert np.shares_memory(got, backend._dialect._model.made)  # type: ignore[attr-defined]
    else:
        assert "output 'Y': no datatype for DLPack elements" in failure(response).message


def test_offered_array_may_be_returned_too(make: Make) -> None:
    backend, spec = load(make(native("y = request.output('Y', (1,)); y[0] = 3; return {'Y': y}")))
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [3]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return None", "gave no output 'Y'"),
        ("return [1]", "None or a dict, got list"),
        ("return {'Z': np.zeros(1, np.float32)}", "unknown output 'Z'"),
        ("return {'Y': [1.0]}", "must be an array, got list"),
        ("return {'Y': np.zeros(1)}", r"datatype FP32 \(float32\), got float64"),
        ("return {'Y': np.zeros(1, '>f4')}", "datatype FP32"),
        ("return {'Y': np.zeros((1, 1), np.float32)}", r"shape \[-1\], got \[1, 1\]"),
        ("return {'Y': np.float32(1)}", r"shape \[-1\], got \[\]"),
        ("request.output('Z', (1,))", "unknown output 'Z'"),
        ("request.output('Y', (1, 2))", r"shape \[-1\], got \[1, 2\]"),
        ("request.output('S', (2,))", "BYTES output 'S' must be returned"),
        ("request.output('Y', (1,)); request.output('Y', (2,))", "two shapes"),
        ("request.output('Y', (1,)); return {'Y': np.zeros(1, np.float32)}", "both offered and"),
        ("request.input('nope')", "no input 'nope'"),
    ],
)
def test_native_nonsense_is_an_internal_error(make: Make, body: str, reason: str) -> None:
    backend, spec = load(make(native(body)))
    error = failure(ask(backend, spec, ("Y",), X=X))
    assert isinstance(error, Internal)
    with pytest.raises(Internal, match=reason):
        raise error


def test_bytes_outputs_are_checked_too(make: Make) -> None:
    backend, spec = load(make(native("return {'S': np.array([b'a'], object)}")))
    assert "shape [2], got [1]" in failure(ask(backend, spec, ("S",), X=X)).message


def test_models_loaded_in_one_process_have_metrics_of_their_own(make: Make) -> None:
    code = """
    class Model:
        def __init__(self, context):
            self.made = context.metrics.{kind}("seen", "of this model")
        def infer(self, request):
            return {{}}
    """
    for kind in ("counter", "gauge"):
        backend, _ = load(make(code.format(kind=kind), name=kind))
        backend.close()
