"""Models whose type hints are their configuration: functions and classes on arrays."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from shmserve.errors import ConfigError, InvalidArgument, ShmserveError
from shmserve.executor.backend import BatchForm
from shmserve.model import Shape, batched
from tests.backend_runner import arrays, ask, ask_stream, failure, load

HEAD = """
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, Optional, TypedDict

import numpy as np
from numpy.typing import NDArray

from shmserve.model import ModelRequest, Shape, batched

Floats = Annotated[NDArray[np.float32], Shape(-1)]
Rows = Annotated[NDArray[np.float32], Shape("batch", 3)]
"""
X = np.arange(4, dtype=np.float32)


def made(folder: Path, code: str, config: str = "") -> str:
    (folder / "m/1").mkdir(parents=True)
    (folder / "m/1/model.py").write_text(HEAD + dedent(code))
    if config:
        (folder / "m/config.pbtxt").write_text(config)
    return str(folder / "m")


def tensors(spec: Any) -> list[tuple[str, str, tuple[int, ...], bool]]:
    return [(t.name, t.datatype, t.shape, t.optional) for t in (*spec.inputs, *spec.outputs)]


def test_a_function(tmp_path: Path) -> None:
    backend, spec = load(made(tmp_path, "def double(x: Floats) -> Floats: return 2 * x"))
    assert tensors(spec) == [("x", "FP32", (-1,), False), ("output", "FP32", (-1,), False)]
    assert spec.max_batch_size == 0
    assert not spec.decoupled
    assert arrays(ask(backend, spec, x=X))["output"].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("hint", "tensor"),
    [
        ("np.ndarray[tuple[int, Literal[3]], np.dtype[np.int64]]", ("INT64", (-1, 3))),
        ("Annotated[NDArray[np.float16], Shape('width', 2, -1)]", ("FP16", (-1, 2, -1))),
        ("Annotated[NDArray[np.bool_], Shape(1)]", ("BOOL", (1,))),
        ("Annotated[NDArray[np.bytes_], Shape(1)]", ("BYTES", (1,))),
        ("Annotated[NDArray[np.object_], Shape(1)]", ("BYTES", (1,))),
    ],
)
def test_hints_of_arrays(tmp_path: Path, hint: str, tensor: tuple[str, Any]) -> None:
    _, spec = load(made(tmp_path, f"def f(x: {hint}) -> {hint}: return x"))
    assert [(t.datatype, t.shape) for t in (*spec.inputs, *spec.outputs)] == [tensor, tensor]


def test_a_class_with_context_and_close(tmp_path: Path) -> None:
    code = f"""
    def helper(x: int) -> int: return x
    class Scaled:
        def __init__(self, context, factor=3):
            self.factor, self.name = factor, context.spec.name
        def predict(self, x: Floats) -> Floats:
            assert self.name == "m"
            return x * self.factor
        def close(self):
            open({str(tmp_path / "closed")!r}, "w").close()
    """
    backend, spec = load(made(tmp_path, code))
    assert arrays(ask(backend, spec, x=X))["output"].tolist() == [0, 3, 6, 9]
    backend.close()
    assert (tmp_path / "closed").exists()


def test_optional_arguments(tmp_path: Path) -> None:
    code = """
    def predict(x: Floats, bias: Floats | None, scale: Optional[Floats] = None) -> Floats:
        assert scale is None
        return x if bias is None else x + bias
    """
    backend, spec = load(made(tmp_path, code))
    assert [(t.name, t.optional) for t in spec.inputs] == [
        ("x", False),
        ("bias", True),
        ("scale", True),
    ]
    assert arrays(ask(backend, spec, x=X))["output"].tolist() == X.tolist()
    assert arrays(ask(backend, spec, x=X, bias=X))["output"].tolist() == (2 * X).tolist()


@pytest.mark.parametrize(
    ("answer", "value", "names"),
    [
        ("tuple[Floats, Floats]", "(x, -x)", ["output_0", "output_1"]),
        ("Both", "Both(x, -x)", ["first", "second"]),
        ("Named", "{'first': x, 'second': -x}", ["first", "second"]),
    ],
)
def test_several_outputs(tmp_path: Path, answer: str, value: str, names: list[str]) -> None:
    code = f"""
    class Both(NamedTuple):
        first: Floats
        second: Floats
    class Named(TypedDict):
        first: Floats
        second: Floats
    def predict(x: Floats) -> {answer}: return {value}
    """
    backend, spec = load(made(tmp_path, code))
    got = arrays(ask(backend, spec, x=X))
    assert list(got) == names
    assert (got[names[0]] + got[names[1]]).tolist() == [0, 0, 0, 0]


def test_wrong_answers_of_the_function(tmp_path: Path) -> None:
    code = """
    def predict(x: Floats) -> tuple[Floats, Floats]:
        return x if x[0] else (x, x.astype(np.int8))
    """
    backend, spec = load(made(tmp_path, code))
    assert "must be 2 arrays, got ndarray" in failure(ask(backend, spec, x=X + 1)).message
    assert "'output_1' must have datatype FP32" in failure(ask(backend, spec, x=X)).message


def test_text(tmp_path: Path) -> None:
    hint = "Annotated[NDArray[np.str_], Shape(-1)]"
    code = f"def f(x: {hint}) -> {hint}: return np.array([e.upper() for e in x], object)"
    backend, spec = load(made(tmp_path, code))
    got = arrays(ask(backend, spec, x=np.array(["ä".encode(), b"b"], object)))
    assert got["output"].tolist() == ["Ä", "B"]
    error = failure(ask(backend, spec, x=np.array([b"\xff"], object)))
    assert isinstance(error, InvalidArgument)
    assert "input 'x'" in error.message


def test_batches(tmp_path: Path) -> None:
    code = """
    @batched(max_size=16, delay_ms=2.5)
    def predict(x: Rows, y: Rows | None = None) -> Annotated[NDArray[np.int64], Shape("batch", 1)]:
        return np.full((len(x), 1), len(x))
    """
    backend, spec = load(made(tmp_path, code))
    assert spec.max_batch_size == 16
    assert backend.batching is BatchForm.STACKED
    assert tensors(spec)[0] == ("x", "FP32", (-1, 3), False)
    assert tensors(spec)[2] == ("output", "INT64", (-1, 1), False)
    document = spec.config.as_dict()
    assert document["dynamic_batching"]["max_queue_delay_microseconds"] == 2500
    rows = np.zeros((2, 3), np.float32)
    assert arrays(ask(backend, spec, x=rows))["output"].tolist() == [[2], [2]]


def test_config_pbtxt_adds_to_the_hints(tmp_path: Path) -> None:
    config = 'max_batch_size: 5 parameters { key: "p" value { string_value: "v" } }'
    code = """
    class Model:
        def __init__(self, context): self.p = context.spec.parameters["p"]
        def predict(self, x: Rows) -> Rows: return x
    """
    _, spec = load(made(tmp_path, code, config))
    assert (spec.max_batch_size, spec.parameters) == (5, {"p": "v"})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("max_batch_size: 5", r"max_batch_size is 5 .* no hint has Shape\(\"batch\""),
        (
            'input { name: "x" data_type: TYPE_INT8 dims: -1 }',
            "data_type TYPE_INT8 in the config.*, the code's type hints adds TYPE_FP32",
        ),
        ("model_transaction_policy { decoupled: true }", "type hints sets it to false"),
    ],
)
def test_config_pbtxt_against_the_hints(tmp_path: Path, config: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^model 'm': .*{reason}"):
        load(made(tmp_path, "def f(x: Floats) -> Floats: return x", config))


def test_streams(tmp_path: Path) -> None:
    code = f"""
    def predict(x: Rows) -> Iterator[Rows]:
        try:
            for row in x:
                yield row[None]
        finally:
            open({str(tmp_path / "ended")!r}, "w").close()
    """
    backend, spec = load(made(tmp_path, code))
    assert spec.decoupled
    assert spec.max_batch_size == 0
    assert tensors(spec)[0] == ("x", "FP32", (-1, 3), False)
    sent = ask_stream(backend, spec, x=np.zeros((2, 3), np.float32))
    assert sent.ended.is_set()
    assert not sent.errors
    assert [arrays(answer)["output"].shape for answer in sent.sent if answer.outputs] == [
        (1, 3)
    ] * 2
    assert (tmp_path / "ended").exists()


def test_the_request(tmp_path: Path) -> None:
    code = """
    def predict(x: Floats, request: ModelRequest) -> Floats:
        return x * request.parameters["factor"]
    """
    backend, spec = load(made(tmp_path, code))
    assert [tensor.name for tensor in spec.inputs] == ["x"]
    assert arrays(ask(backend, spec, (), {"factor": 5}, x=X))["output"].tolist() == [0, 5, 10, 15]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(x) -> Floats: ...", r"argument 'x' has no type hint: write x: NDArray\[np.float32"),
        ("def f(x: Floats): ...", "f has no hint of its answer: write -> and a type"),
        ("def f() -> Floats: ...", "the function has no argument: write one such as x: NDArray"),
        ("def f(x: np.ndarray) -> Floats: ...", "'x' is an array of unknown elements: write NDA"),
        ("def f(x: NDArray) -> Floats: ...", r"'x' has elements of no one type .*: write NDArray"),
        ("def f(x: NDArray[np.floating]) -> Floats: ...", r"no one type \(floating\): write NDA"),
        ("def f(x: NDArray[np.int8]) -> Floats: ...", r"Annotated\[NDArray\[np.int8\], Shape\(-1"),
        ("def f(x: Floats, y: int) -> Floats: ...", "argument 'y' is int beside arrays: write"),
        ("def f(x: Floats) -> dict[str, Floats]: ...", "the answer is a dict without names: write"),
        ("def f(x: Floats) -> int: ...", "the answer is int beside arrays"),
        ("def f(x: Rows) -> Floats: ...", r"'output' has no batch, and 'x' has: write Shape\(\"ba"),
        ("def f(*x: Floats) -> Floats: ...", r"argument '\*x.*': write arguments with a name each"),
        ("async def f(x: Floats) -> Floats: ...", "f is async: write def"),
        ("def f(x: 'Unknown') -> Floats: ...", "the hints of f cannot be read: name 'Unknown'"),
        ("@batched(4)\ndef f(x: Floats) -> Floats: ...", r"batched needs Shape\(\"batch\", ...\)"),
        (
            "def a(x: Floats) -> Floats: ...\ndef b(x: Floats) -> Floats: ...",
            "a and b may each be the model: name the model's function predict, or .* def _b",
        ),
        (
            "class A:\n    def predict(self, x: Floats) -> Floats: ...\nclass B(A): ...",
            "A and B may each be the model: write an underscore in front of .* such as class _B",
        ),
        (
            "def f(x: Annotated[NDArray[np.int8], Shape('batch')]) -> Rows: ...",
            r"'x': write Shape\(\"batch\", 1\)",
        ),
    ],
)
def test_hints_that_say_too_little(tmp_path: Path, code: str, reason: str) -> None:
    with pytest.raises(ShmserveError, match=reason):
        load(made(tmp_path, code))


@pytest.mark.parametrize("dims", [(), (0,), (-2,), (True,), (1.5,), ("",), (3, "batch")])
def test_shapes_that_cannot_be(dims: Any) -> None:
    with pytest.raises(ValueError, match="Shape"):
        Shape(*dims)


@pytest.mark.parametrize("given", [(0,), (4, -1)])
def test_batches_that_cannot_be(given: Any) -> None:
    with pytest.raises(ValueError, match="batched"):
        batched(*given)
