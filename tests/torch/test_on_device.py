"""TorchScript models of instances on a GPU: with a torch without GPUs, and with a real GPU."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmserve import repository
from shmserve.errors import Code, ConfigError
from shmserve.executor.backend import Context
from shmserve.executor.backends import create
from tests.backend_runner import FakeBackendRequest, arrays, ask, failure, load
from tests.torch.test_backend import _quiet, config, make, parameter

__all__ = ["_quiet", "make"]  # fixtures

pytestmark = pytest.mark.torch

GPU = "cuda:0"
X = np.arange(4, dtype=np.float32)


def context(directory: str, auto: bool) -> Context:
    spec = repository.read_folder(directory).specs[-1]
    return Context(spec, directory, "m/1/0", GPU, auto)


def test_a_torch_without_cuda(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    more = parameter("ENABLE_CACHE_CLEANING", "true") + parameter("DISABLE_CUDNN", "true")
    told = context(make("Double", config("x", "OUTPUT__0", more=more)), auto=False)
    with pytest.raises(ConfigError, match="model 'm': torch cannot use a GPU here"):
        create(told.spec).load(told)
    backend = create(told.spec)
    with caplog.at_level("INFO"):
        spec = backend.load(context(told.directory, auto=True))
    assert "runs on the CPU: torch cannot use a GPU here" in caplog.text
    assert caplog.text.count("no effect (the instance runs on the CPU)") == 2
    assert not backend.reads_on_device
    assert arrays(ask(backend, spec, x=X))["OUTPUT__0"].tolist() == [0, 2, 4, 6]


# ----------------------------------------------------------------------------- a real device


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.gpu
def test_inputs_are_used_where_they_lie_and_outputs_too(make: Any, cupy: Any) -> None:
    backend, spec = load(make("Same", config("x", "OUTPUT__0")), GPU)
    assert backend.reads_on_device
    x = cupy.asarray(X)
    got = arrays(ask(backend, spec, x=x))["OUTPUT__0"]
    assert isinstance(got, cupy.ndarray)
    assert got.data.ptr == x.data.ptr


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["INT8", "INT64", "UINT16", "FP16", "BF16", "FP64", "BOOL"])
@pytest.mark.parametrize("size", [3, 0])
def test_datatypes(make: Any, cupy: Any, kind: str, size: int) -> None:
    named = {"FP16": "f2", "FP64": "f8", "BOOL": "?", "BF16": ml_dtypes.bfloat16}
    x = np.array([1, 0, 1][:size]).astype(np.dtype(named.get(kind) or kind.lower()))
    backend, spec = load(make("Same", config("x", "OUTPUT__0", kind)), GPU)
    got = arrays(ask(backend, spec, x=cupy.asarray(x)))["OUTPUT__0"]
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got.get(), x)


@pytest.mark.gpu
def test_work_is_in_order_with_cupys(make: Any, cupy: Any) -> None:
    backend, spec = load(make("Double", config("x", "OUTPUT__0")), GPU)
    x = cupy.zeros(1 << 24, dtype="float32")
    for turn in range(1, 5):
        x += 1
        got = arrays(ask(backend, spec, x=x))["OUTPUT__0"]
        assert float((got - 2 * turn).max()) == 0


@pytest.mark.gpu
def test_a_model_that_writes_into_its_input_gets_a_copy(make: Any, cupy: Any) -> None:
    backend, _ = load(make("InPlace", config("x", "OUTPUT__0")), GPU)
    x = cupy.asarray(X)
    request = FakeBackendRequest(("OUTPUT__0",), x=x)
    assert arrays(backend.execute([request])[0])["OUTPUT__0"].tolist() == [0, 2, 4, 6]
    assert x.tolist() == X.tolist()


@pytest.mark.gpu
def test_no_memory_left(make: Any, cupy: Any) -> None:
    more = parameter("ENABLE_CACHE_CLEANING", "true") + parameter("DISABLE_CUDNN", "false")
    backend, spec = load(make("Vast", config("x", "OUTPUT__0", more=more)), GPU)
    error = failure(ask(backend, spec, x=cupy.asarray(X)))
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert error.message == "CUDA device 0 has no memory left for this request"
    small, spec = load(make("Double", config("x", "OUTPUT__0"), "n"), GPU)
    assert arrays(ask(small, spec, x=X))["OUTPUT__0"].tolist() == [0, 2, 4, 6]


@pytest.mark.gpu
def test_the_native_dialect_gives_torchs_tensors(tmp_path: Path, cupy: Any) -> None:
    from tests.model_files import model_maker

    code = """
    import torch
    class Model:
        device_tensors = True
        def infer(self, request):
            x = torch.from_dlpack(request.input("X"))
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                return {"Y": x * 2}
    """
    backend, spec = load(model_maker(tmp_path)(code), GPU)
    for _ in range(5):
        x = np.random.default_rng(0).random(1 << 22, np.float32)
        got = arrays(ask(backend, spec, ("Y",), X=x))["Y"]
        cupy.cuda.Device().synchronize()  # as the executor does before a copy
        np.testing.assert_array_equal(got.get(), 2 * x)
