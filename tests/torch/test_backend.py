"""The pytorch backend with a real torch: naming, datatypes, copies, options, mistakes."""

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmserve.errors import Code, ConfigError, ShmserveError
from tests.backend_runner import FakeBackendRequest, arrays, ask, load

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript's own future
        yield


@pytest.fixture
def make(tmp_path: Path) -> Any:
    import torch

    from tests.torch import modules

    def write(name: str, config: str, model: str = "m") -> str:
        folder = tmp_path / model
        (folder / "1").mkdir(parents=True)
        torch.jit.script(getattr(modules, name)()).save(folder / "1" / "model.pt")
        (folder / "config.pbtxt").write_text(config)
        return str(folder)

    return write


def config(inputs: str, outputs: str, kind: str = "FP32", dims: str = "-1", more: str = "") -> str:
    text = more
    for key, names in (("input", inputs), ("output", outputs)):
        for name in names.split():
            text += f'{key} [ {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }} ]\n'
    return text


X = np.arange(4, dtype=np.float32)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ("INPUT__0 INPUT__1", "OUTPUT__0 OUTPUT__1"),
        ("INPUT__1 INPUT__0", "OUTPUT__1 OUTPUT__0"),
        ("x y", "OUTPUT__0 OUTPUT__1"),
        ("y x", "SUM__0 DIFFERENCE__1"),
        ("FIRST SECOND", "SUM DIFFERENCE"),
    ],
)
def test_names_by_place_by_argument_or_in_order(make: Any, inputs: str, outputs: str) -> None:
    backend, spec = load(make("AddSub", config(inputs, outputs)))
    assert spec.platform == "pytorch_libtorch"
    first = next(n for n in inputs.split() if n in ("INPUT__0", "x", "FIRST"))
    second = next(n for n in inputs.split() if n != first)
    total = next(n for n in outputs.split() if n.endswith("__0") or n == "SUM")
    difference = next(n for n in outputs.split() if n != total)
    got = arrays(ask(backend, spec, **{first: X, second: X + 1}))  # type: ignore[arg-type]
    assert got[total].tolist() == [1, 3, 5, 7]
    assert got[difference].tolist() == [-1, -1, -1, -1]


def test_results_by_name_and_in_lists(make: Any, tmp_path: Path) -> None:
    backend, spec = load(make("Named", config("x", "SAME TWICE")))
    assert arrays(ask(backend, spec, ("TWICE",), x=X))["TWICE"].tolist() == [0, 2, 4, 6]


def test_lists(make: Any) -> None:
    backend, spec = load(make("Listed", config("x", "OUTPUT__1 OUTPUT__0")))
    got = arrays(ask(backend, spec, x=X))
    assert got["OUTPUT__1"].tolist() == [1, 2, 3, 4]


def test_inputs_as_one_dictionary(make: Any) -> None:
    backend, spec = load(make("Dictionary", config("a b", "OUTPUT__0")))
    assert arrays(ask(backend, spec, a=X, b=X))["OUTPUT__0"].tolist() == [0, 2, 4, 6]


def test_optional_inputs(make: Any) -> None:
    text = config("x y", "OUTPUT__0").replace(
        'name: "y" data_type: TYPE_FP32', 'name: "y" data_type: TYPE_FP32 optional: true'
    )
    backend, spec = load(make("Maybe", text))
    assert arrays(ask(backend, spec, x=X))["OUTPUT__0"].tolist() == [100, 101, 102, 103]
    assert arrays(ask(backend, spec, x=X, y=X))["OUTPUT__0"].tolist() == [0, 2, 4, 6]


def test_an_input_that_comes_out_is_not_copied(make: Any) -> None:
    backend, _ = load(make("Same", config("x", "OUTPUT__0")))
    request = FakeBackendRequest(("OUTPUT__0",), x=X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no warning about read-only memory
        got = arrays(backend.execute([request])[0])["OUTPUT__0"]
    assert np.shares_memory(got, request.inputs["x"].memory)


def test_an_input_the_model_writes_into_is_a_copy(make: Any) -> None:
    backend, _ = load(make("InPlace", config("x", "OUTPUT__0")))
    request = FakeBackendRequest(("OUTPUT__0",), x=X)
    assert arrays(backend.execute([request])[0])["OUTPUT__0"].tolist() == [0, 2, 4, 6]
    assert request.inputs["x"].memory.tolist() == X.tolist()


def test_results_need_not_be_contiguous(make: Any) -> None:
    backend, spec = load(make("Transposed", config("x", "OUTPUT__0", dims="-1, -1")))
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert arrays(ask(backend, spec, x=x))["OUTPUT__0"].tolist() == x.T.tolist()


INTEGERS = ["UINT8", "INT8", "INT16", "INT32", "INT64", "UINT16", "UINT32", "UINT64"]
KINDS = [*INTEGERS, "FP16", "BF16", "FP32", "FP64", "BOOL"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 0])
def test_datatypes(make: Any, kind: str, size: int) -> None:
    named = {"FP16": "f2", "FP32": "f4", "FP64": "f8", "BOOL": "?", "BF16": ml_dtypes.bfloat16}
    dtype = np.dtype(named.get(kind) or kind.lower())
    backend, spec = load(make("Same", config("x", "OUTPUT__0", kind)))
    x = np.array([1, 0, 1][:size]).astype(dtype)
    got = arrays(ask(backend, spec, x=x))["OUTPUT__0"]
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, x)


def test_texts(make: Any) -> None:
    backend, spec = load(make("Texts", config("s", "OUTPUT__0", "STRING")))
    got = arrays(ask(backend, spec, s=np.array([b"a", "ä".encode()], object)))
    assert got["OUTPUT__0"].tolist() == ["a!", "ä!"]
    bad = ask(backend, spec, s=np.array([b"\xff"], object))
    assert bad.error is not None
    assert bad.error.code is Code.INVALID_ARGUMENT


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


def test_options(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    more = "".join(
        parameter(*pair)
        for pair in (
            ("INTRA_OP_THREAD_COUNT", "1"),
            ("INFERENCE_MODE", "false"),
            ("DISABLE_OPTIMIZED_EXECUTION", "true"),
            ("ENABLE_JIT_EXECUTOR", "true"),
            ("ENABLE_JIT_PROFILING", "true"),
            ("ENABLE_WEIGHT_SHARING", "true"),
        )
    )
    try:
        with caplog.at_level("INFO"):
            backend, spec = load(make("Double", config("x", "OUTPUT__0", more=more)))
        assert torch.get_num_threads() == 1
        assert not torch._C._get_graph_executor_optimize()
        assert arrays(ask(backend, spec, x=X))["OUTPUT__0"].tolist() == [0, 2, 4, 6]
    finally:
        torch._C._set_graph_executor_optimize(True)
    assert "parameters.ENABLE_WEIGHT_SHARING: no effect" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("Double", config("x z", "OUTPUT__0"), "place 1, but forward takes 1"),
        ("Double", config("INPUT__3", "OUTPUT__0"), "'INPUT__3' has place 3, but forward takes 1"),
        ("AddSub", config("x", "OUTPUT__0"), "has 1 inputs, forward takes 2: argument 'y'"),
        ("AddSub", config("INPUT__0 b", "OUTPUT__0"), "'b' does not end with __"),
        ("AddSub", config("A__0 B__0", "OUTPUT__0"), "two inputs have the same place"),
        ("Double", config("x", ""), "must tell input and output"),
        ("Double", parameter("INFERENCE_MODE", "9") + config("x", "O"), "'9' is not true or false"),
        ("Double", parameter("INTRA_OP_THREAD_COUNT", "0") + config("x", "O"), "is not 1 to 1024"),
        (
            "Double",
            "model_transaction_policy { decoupled: true }" + config("x", "O"),
            "cannot be decoupled",
        ),
    ],
)
def test_mistakes_are_refused_at_load(make: Any, name: str, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(make(name, 'backend: "pytorch"' + text))


@pytest.mark.parametrize(
    ("name", "outputs", "reason"),
    [
        ("Double", "OUTPUT__0 OUTPUT__1", "'OUTPUT__1' has place 1, the model gave 1"),
        ("Number", "OUTPUT__0", "must be a tensor, got int"),
        ("Named", "OTHER", "gave no output 'OTHER'"),
    ],
)
def test_mistakes_are_told_when_they_show(make: Any, name: str, outputs: str, reason: str) -> None:
    backend, spec = load(make(name, config("x", outputs)))
    error = ask(backend, spec, x=X).error
    assert error is not None
    assert reason in error.message


def test_a_file_that_is_no_torchscript(make: Any) -> None:
    import torch

    directory = Path(make("Double", config("x", "OUTPUT__0")))
    for content in (b"junk", None):
        path = directory / "1" / "model.pt"
        if content is None:
            torch.save({"weight": torch.ones(2)}, path)
        else:
            path.write_bytes(content)
        with pytest.raises(ShmserveError, match=r"file 'model.pt' is not a TorchScript model"):
            load(str(directory))


def test_warm_up_and_reshape(make: Any) -> None:
    more = (
        "max_batch_size: 4\n"
        'model_warmup [ { name: "w" batch_size: 2 inputs { key: "x" value { '
        "data_type: TYPE_FP32 dims: [ 6 ] random_data: true } } } ]\n"
        'input [ { name: "x" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } } ]\n'
        'output [ { name: "O__0" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } } ]\n'
    )
    backend, spec = load(make("Double", more))
    x = np.ones((2, 6), np.float32)
    assert arrays(ask(backend, spec, x=x))["O__0"].shape == (2, 6)
