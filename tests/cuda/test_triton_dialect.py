"""The Triton dialect on a GPU: tensors in device memory, in and out."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmserve.errors import Code, ConfigError
from shmserve.executor.backends import dlpack
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.backends.triton.tensor import Tensor
from shmserve.testing.backend_runner import FakeDeviceInput, arrays, ask, ask_stream, failure, load
from shmserve.testing.model_files import X_TO_Y, Make, triton

X = np.arange(4, dtype=np.float32)
GPU = "cuda:0"


def told(name: str, value: str) -> str:
    return f'{X_TO_Y} parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'


LEAVE = told("FORCE_CPU_ONLY_INPUT_TENSORS", "no")


def first(body: str) -> str:
    """Return a model that applies `body` to the first input `x` of its only request."""
    return triton(f"x = requests[0].inputs()[0]\n{body}")


AS_IT_IS = first("return [pb.InferenceResponse([pb.Tensor.from_dlpack('Y', x)])]")


@pytest.mark.parametrize("config", [X_TO_Y, told("FORCE_CPU_ONLY_INPUT_TENSORS", "yes")])
def test_inputs_are_host_tensors_unless_told_otherwise(make: Make, cupy: Any, config: str) -> None:
    body = "assert x.is_cpu() and x.__dlpack_device__() == (1, 0)\n"
    body += "return [pb.InferenceResponse([pb.Tensor('Y', x.as_numpy() + 1)])]"
    backend, spec = load(make(first(body), config), GPU)
    assert not backend.reads_on_device
    for x in (X, cupy.asarray(X)):
        assert arrays(ask(backend, spec, ("Y",), X=x))["Y"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("device", [GPU, "cpu"])
def test_inputs_stay_where_they_lie_if_the_model_wants_that(
    make: Make, cupy: Any, device: str
) -> None:
    backend, spec = load(make(AS_IT_IS, LEAVE), device)
    x = cupy.asarray(X)
    assert arrays(ask(backend, spec, ("Y",), X=x))["Y"] is x
    from_host = arrays(ask(backend, spec, ("Y",), X=X))["Y"]
    assert isinstance(from_host, np.ndarray)
    assert from_host.tolist() == [0, 1, 2, 3]


def test_a_device_tensor_has_no_numpy_array(make: Make, cupy: Any) -> None:
    body = """
assert not x.is_cpu() and x.shape() == [4] and x.triton_dtype().name == "TYPE_FP32"
try:
    x.as_numpy()
except pb.TritonModelException as ex:
    return [pb.InferenceResponse([], pb.TritonError(str(ex)))]
"""
    backend, spec = load(make(first(body), LEAVE), GPU)
    error = failure(ask(backend, spec, ("Y",), X=cupy.asarray(X)))
    assert error.message == "Tensor is stored in GPU and cannot be converted to NumPy."


def test_strings_are_host_tensors_all_the_same(make: Make, cupy: Any) -> None:
    config = LEAVE.replace('"X" data_type: TYPE_FP32', '"X" data_type: TYPE_STRING')
    body = "return [pb.InferenceResponse([pb.Tensor('S', x.as_numpy())])]"
    backend, spec = load(make(first(body), config), GPU)
    texts = np.array([b"a", b"b"], object)
    assert arrays(ask(backend, spec, ("S",), X=texts))["S"].tolist() == [b"a", b"b"]


def test_another_value_is_refused_by_name(make: Make) -> None:
    config = told("FORCE_CPU_ONLY_INPUT_TENSORS", "off")
    with pytest.raises(ConfigError, match="FORCE_CPU_ONLY_INPUT_TENSORS 'off' is neither"):
        load(make(AS_IT_IS, config))


def test_writable_inputs_are_copies_on_the_device(make: Make, cupy: Any) -> None:
    config = LEAVE + 'parameters { key: "writable_inputs" value { string_value: "true" } }'
    body = """
import cupy
array = cupy.from_dlpack(x)
array += 1
return [pb.InferenceResponse([pb.Tensor.from_dlpack("Y", array)])]
"""
    backend, spec = load(make(first(body), config), GPU)
    x = cupy.asarray(X)
    assert arrays(ask(backend, spec, ("Y",), X=x))["Y"].tolist() == [1, 2, 3, 4]
    assert x.tolist() == [0, 1, 2, 3]


def test_models_compute_with_capsules_and_objects(make: Make, cupy: Any) -> None:
    body = """
import cupy
doubled = cupy.from_dlpack(x.to_dlpack()) * 2
return [pb.InferenceResponse([pb.Tensor.from_dlpack("Y", doubled.__dlpack__(stream=1))])]
"""
    backend, spec = load(make(first(body), LEAVE), GPU)
    got = arrays(ask(backend, spec, ("Y",), X=cupy.asarray(X)))["Y"]
    assert isinstance(got, cupy.ndarray)
    assert got.tolist() == [0, 2, 4, 6]


def test_senders_take_device_tensors_from_any_thread(make: Make, cupy: Any) -> None:
    body = """
import threading
def answer(request, sender):
    import cupy
    x = cupy.from_dlpack(request.inputs()[0])
    for turn in range(2):
        sender.send(pb.InferenceResponse([pb.Tensor.from_dlpack("Y", x + turn)]))
    sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
for request in requests:
    threading.Thread(target=answer, args=(request, request.get_response_sender())).start()
"""
    config = LEAVE + "model_transaction_policy { decoupled: true }"
    backend, spec = load(make(triton(body), config), GPU)
    got = ask_stream(backend, spec, X=cupy.asarray(X))
    assert got.ended.wait(60)
    assert [arrays(one)["Y"].tolist() for one in got.sent] == [[0, 1, 2, 3], [1, 2, 3, 4]]


def test_no_memory_left_is_told_without_a_prefix(make: Make, cupy: Any) -> None:
    backend, spec = load(make(first("import cupy; cupy.empty(1 << 50)"), LEAVE), GPU)
    error = failure(ask(backend, spec, ("Y",), X=X))
    assert error.code is Code.RESOURCE_EXHAUSTED
    assert error.message == "CUDA device 0 has no memory left for this request"


# ------------------------------------------------------------------------------- the tensor


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "f2", "f8", ml_dtypes.bfloat16], ids=str)
def test_there_and_back(cupy: Any, shape: tuple[int, ...], dtype: Any) -> None:
    values = np.ones(shape, dtype)
    array = cupy.asarray(values)
    tensor = Tensor.from_dlpack("A", dlpack.export(array))
    assert not tensor.is_cpu()
    assert tensor.__dlpack_device__() == (2, 0)
    assert tensor.shape() == list(shape)
    again = Tensor.from_dlpack("B", tensor.to_dlpack()).array()
    assert (again.dtype, again.shape) == (values.dtype, shape)
    np.testing.assert_array_equal(again.get(), values)
    if values.size:
        assert again.data.ptr == array.data.ptr


def test_what_is_not_contiguous_is_refused(cupy: Any) -> None:
    with pytest.raises(TritonModelException, match="Only contiguous DLPack tensors"):
        Tensor.from_dlpack("A", cupy.asarray(np.zeros((2, 3), np.float32)).T)


def test_device_arrays_go_in_by_dlpack_only(cupy: Any) -> None:
    with pytest.raises(TypeError, match=r"needs a numpy array.*Tensor\.from_dlpack"):
        Tensor("A", cupy.asarray(X))


@pytest.mark.parametrize("number", [None, 1, -1, 0], ids=str)
def test_consumers_on_the_default_stream_need_not_wait(cupy: Any, number: int | None) -> None:
    tensor = Tensor.from_dlpack("A", cupy.asarray(X) + 1)
    got = dlpack.take(tensor.__dlpack__(stream=number))
    assert got.tolist() == [1, 2, 3, 4]


def test_a_consumers_own_stream_waits_for_the_default_one(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    tensor = Tensor.from_dlpack("A", cupy.asarray(X) + 1)
    got = dlpack.take(tensor.__dlpack__(stream=stream.ptr))
    with stream:
        doubled = got * 2
    stream.synchronize()
    with stream:
        assert doubled.get().tolist() == [2, 4, 6, 8]


def test_an_input_on_another_device_says_where_it_is_used(fake_cupy: Any) -> None:
    with fake_cupy.cuda.Device(1):
        source = FakeDeviceInput("X", fake_cupy.asarray(X))
    tensor = Tensor.of_input(source, on_device=True)
    assert tensor.__dlpack_device__() == (2, 1)
    stream = None
    with fake_cupy.cuda.Device(1):
        stream = fake_cupy.cuda.Stream(non_blocking=True)
        got = dlpack.take(tensor.__dlpack__(stream=stream.ptr))
    assert got.device.id == 1


def test_tensors_of_a_gpu_need_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **_: object) -> object:
            raise AssertionError("not asked for")

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"pip install 'shmserve\[gpu\]'"):
        Tensor.from_dlpack("A", OnGpu())
