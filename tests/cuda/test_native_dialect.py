"""The native dialect on a GPU: inputs and outputs of models, and errors."""

from __future__ import annotations

import gc
import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmserve.errors import Code, Internal, ResourceExhausted, ShmserveError
from shmserve.executor.backend import Context
from shmserve.executor.process.call_tensors import CallInput
from shmserve.testing.backend_runner import (
    FakeBackendRequest,
    arrays,
    ask,
    ask_stream,
    failure,
    load,
)
from shmserve.testing.model_files import X_TO_Y, Make, native
from tests.unit.executor.called_models import FakeOtherModels, answer

X = np.arange(4, dtype=np.float32)
GPU = "cuda:0"

DOUBLE = """
class Model:
    device_tensors = True
    def __init__(self, context):
        self.xp = context.xp
        self.two = self.xp.full((1,), 2, dtype="float32")
    def infer(self, request):
        x = request.input("X")
        self.xp.multiply(x, self.two, out=request.output("Y", x.shape))
"""


def on_device(body: str) -> str:
    return native(body).replace("class Model:\n", "class Model:\n    device_tensors = True\n")


@pytest.mark.parametrize("device", [GPU, "cpu"])
def test_one_code_runs_on_both(make: Make, cupy: Any, device: str) -> None:
    backend, _ = load(make(DOUBLE), device)
    assert backend.reads_on_device == (device == GPU)
    request = FakeBackendRequest(("Y",), X=X)
    got = arrays(backend.execute([request])[0])["Y"]
    assert got is request.offered["Y"]
    assert isinstance(got, cupy.ndarray if device == GPU else np.ndarray)
    assert got.tolist() == [0, 2, 4, 6]


def test_inputs_in_a_gpus_memory_are_used_where_they_lie(make: Make, cupy: Any) -> None:
    backend, spec = load(make(on_device("return {'Y': request.input('X')}")), GPU)
    x = cupy.asarray(X)
    assert arrays(ask(backend, spec, ("Y",), X=x))["Y"] is x


def test_a_model_that_does_not_ask_for_it_gets_numpy(make: Make, cupy: Any) -> None:
    body = "x = request.input('X'); assert type(x) is np.ndarray; return {'Y': x + 1}"
    backend, spec = load(make(native(body)), GPU)
    assert not backend.reads_on_device
    for x in (X, cupy.asarray(X)):
        got = arrays(ask(backend, spec, ("Y",), X=x))["Y"]
        assert isinstance(got, np.ndarray)
        assert got.tolist() == [1, 2, 3, 4]


def test_strings_stay_with_numpy(make: Make, cupy: Any) -> None:
    config = X_TO_Y.replace('name: "X" data_type: TYPE_FP32', 'name: "X" data_type: TYPE_STRING')
    backend, spec = load(make(on_device("return {'S': request.input('X')}"), config), GPU)
    texts = np.array([b"a", b"b"], object)
    assert arrays(ask(backend, spec, ("S",), X=texts))["S"].tolist() == [b"a", b"b"]


def test_outputs_nobody_wants_are_in_plain_device_memory(make: Make, cupy: Any) -> None:
    body = "request.output('Y', (3,))[:] = 1; return {'S': np.array(['a', 'b'])}"
    backend, _ = load(make(on_device(body)), GPU)
    request = FakeBackendRequest(("S",), X=X)
    assert arrays(backend.execute([request])[0])["S"].tolist() == ["a", "b"]
    assert request.offered == {}


GIVEN = """
import numpy as np, cupy
class Exporter:                 # as torch's tensors: DLPack, on a stream of its own
    def __init__(self, array, stream):
        self.array, self.stream = array, stream
    def __dlpack_device__(self):
        return self.array.__dlpack_device__()
    def __dlpack__(self, stream=None, **more):
        with self.stream:
            return self.array.__dlpack__(stream=stream, **more)
class Interface:                # as numba's arrays
    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__
class Host:                     # as torch's tensors on the CPU
    def __init__(self, array):
        self.array = array
    def __dlpack_device__(self):
        return (1, 0)
    def __dlpack__(self, **more):
        return self.array.__dlpack__()
class Model:
    device_tensors = True
    def infer(self, request):
        kind = request.parameters["kind"]
        if kind == "numpy":
            return {"Y": np.ones(4, np.float32)}
        if kind == "host":
            return {"Y": Host(np.ones(4, np.float32))}
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            self.given = cupy.full((4,), 1, dtype="float32")
        if kind == "dlpack":
            return {"Y": Exporter(self.given, stream)}
        if kind == "scattered":
            with stream:
                self.given = cupy.full((4, 2), 1, dtype="float32")
            return {"Y": Exporter(self.given[:, 1], stream)}
        stream.synchronize()
        if kind == "cupy":
            return {"Y": self.given}
        return {"Y": Interface(self.given)}
"""


@pytest.mark.parametrize("kind", ["numpy", "host", "cupy", "dlpack", "scattered", "interface"])
def test_what_is_given_is_taken_without_a_copy(make: Make, cupy: Any, kind: str) -> None:
    backend, spec = load(make(GIVEN), GPU)
    got = arrays(ask(backend, spec, ("Y",), {"kind": kind}, X=X))["Y"]
    assert isinstance(got, np.ndarray if kind in ("numpy", "host") else cupy.ndarray)
    # read on the default stream, which waits for the producer's stream
    assert got.tolist() == [1, 1, 1, 1]
    if isinstance(got, cupy.ndarray):
        model = backend._dialect._model  # type: ignore[attr-defined]
        assert got.data.ptr - model.given.data.ptr in (0, 4)


def test_what_was_given_lives_as_long_as_its_array(make: Make, cupy: Any) -> None:
    body = """
        class Exporter:
            def __init__(self, array):
                self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__
        return {"Y": Exporter(request.input("X") + 1)}
    """
    backend, spec = load(make(on_device(body)), GPU)
    got = arrays(ask(backend, spec, ("Y",), X=X))["Y"]
    pool = cupy.get_default_memory_pool()
    cupy.cuda.runtime.deviceSynchronize()
    before = pool.used_bytes()
    assert got.tolist() == [1, 2, 3, 4]
    del got
    gc.collect()
    assert pool.used_bytes() < before


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return {'Y': request.input('X').astype('float64')}", r"FP32 \(float32\), got float64"),
        ("return {'Y': request.input('X').reshape(2, 2)}", r"shape \[-1\], got \[2, 2\]"),
        ("return {'Z': request.input('X')}", "unknown output 'Z'"),
        ("return {'S': request.input('X')}", "must have datatype BYTES"),
        ("request.output('S', (2,))", "BYTES output 'S' must be returned"),
        ("y = request.output('Y', (4,)); return {'Y': y + 1}", "both offered and returned"),
    ],
)
def test_device_outputs_are_checked_like_others(
    make: Make, cupy: Any, body: str, reason: str
) -> None:
    backend, spec = load(make(on_device(body)), GPU)
    with pytest.raises(Internal, match=reason):
        raise failure(ask(backend, spec, ("Y",), X=X))


def test_bf16_passes_through_dlpack(make: Make, cupy: Any) -> None:
    body = """
        from shmserve.executor.backends import dlpack
        return {"Y": type("T", (), {"__dlpack__": lambda self, **_: dlpack.export(X)})()
                for X in [request.input("X")]}
    """
    config = X_TO_Y.replace("TYPE_FP32", "TYPE_BF16")
    backend, spec = load(make(on_device(body), config), GPU)
    x = X.astype(ml_dtypes.bfloat16)
    got = arrays(ask(backend, spec, ("Y",), X=x))["Y"]
    assert isinstance(got, cupy.ndarray)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got.get(), x)


# -------------------------------------------------------------------------------- decoupled

DECOUPLED = X_TO_Y + "model_transaction_policy { decoupled: true }"
THREAD = """
import threading
class Model:
    device_tensors = True
    def __init__(self, context):
        self.xp = context.xp
    def infer(self, request):
        threading.Thread(target=self.answer, args=(request,)).start()
    def answer(self, request):
        x = request.input("X")
        for turn in range(2):
            ones = self.xp.ones(4, dtype="float32")
            self.xp.add(x, ones * turn, out=request.output("Y", (4,)))
            request.send()
        request.finish()
"""


def test_threads_of_a_model_work_on_the_instances_device(make: Make, fake_cupy: Any) -> None:
    backend, spec = load(make(THREAD, DECOUPLED), "cuda:1")
    fake_cupy.cuda.Device(0).use()  # the test's own thread answers nothing
    got = ask_stream(backend, spec, X=X)
    assert got.ended.wait(60)
    assert not got.errors
    answers = [arrays(one)["Y"] for one in got.sent]
    assert [array.device.id for array in answers] == [1, 1]
    assert [array.tolist() for array in answers] == [[0, 1, 2, 3], [1, 2, 3, 4]]


def test_a_generator_on_a_device(make: Make, cupy: Any) -> None:
    body = """
        for turn in range(2):
            request.output("Y", (4,))[:] = request.input("X") + turn
            yield
    """
    backend, spec = load(make(on_device(body), DECOUPLED), GPU)
    got = ask_stream(backend, spec, X=X)
    assert [arrays(one)["Y"].tolist() for one in got.sent] == [[0, 1, 2, 3], [1, 2, 3, 4]]


# ----------------------------------------------------------------------------------- errors

TOO_MUCH = """
class Model:
    device_tensors = True
    def __init__(self, context):
        self.xp = context.xp
    def infer(self, request):
        kept = self.xp.zeros(1000, dtype="uint8")
        self.xp.empty(1 << 50, dtype="uint8")
"""


def test_no_memory_left_is_told_and_the_model_goes_on(
    make: Make, cupy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend, spec = load(make(TOO_MUCH), GPU)
    pool = cupy.get_default_memory_pool()
    used, total = pool.used_bytes(), pool.total_bytes()
    with caplog.at_level(logging.ERROR):
        error = failure(ask(backend, spec, ("Y",), X=X))
    assert isinstance(error, ResourceExhausted)
    assert error.http_status == 503
    assert error.message == "CUDA device 0 has no memory left for this request"
    assert "OutOfMemoryError" in caplog.text
    cupy.cuda.runtime.deviceSynchronize()
    assert pool.used_bytes() <= used  # the memory of the failed call is free again
    assert pool.total_bytes() <= total


def test_no_memory_left_for_a_model(make: Make, cupy: Any) -> None:
    code = TOO_MUCH.replace("self.xp = context.xp", "context.xp.empty(1 << 50, dtype='uint8')")
    with pytest.raises(ResourceExhausted, match="device 0 has no memory left for this model"):
        load(make(code), GPU)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("cupy.cuda.runtime.setDevice(99)", "cudaErrorInvalidDevice: invalid device ordinal"),
        (
            "raise RuntimeError('CUDA error: invalid argument\\nat /x/y.cpp\\n0xdeadbeef')",
            "invalid argument",
        ),
    ],
)
def test_other_errors_have_cudas_own_name(make: Make, cupy: Any, line: str, told: str) -> None:
    backend, spec = load(make(on_device(f"import cupy; {line}")), GPU)
    error = failure(ask(backend, spec, ("Y",), X=X))
    assert (error.code, error.http_status) == (Code.INTERNAL, 500)
    assert error.message == f"CUDA device 0 failed: {told}"


SCRIPTED = """The following operation failed in the TorchScript interpreter.
Traceback of TorchScript, serialized code (most recent call last):
  File "code/__torch__/modules.py", line 8, in forward
    _0 = torch.empty([1125899906842624])
         ~~~~~~~~~~~ <--- HERE
RuntimeError: CUDA {}
Advice.
"""
NO_MEMORY = "has no memory left for this request"


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to …", NO_MEMORY),
        ("RuntimeError", SCRIPTED.format("out of memory. Tried"), NO_MEMORY),
        ("RuntimeError", SCRIPTED.format("error: no luck"), "failed: no luck"),
    ],
)
def test_torchs_words_for_it(make: Make, cupy: Any, kind: str, text: str, told: str) -> None:
    body = f"raise type({kind!r}, (RuntimeError,), {{}})({text!r})"
    backend, spec = load(make(on_device(body)), GPU)
    error = failure(ask(backend, spec, ("Y",), X=X))
    assert error.message == f"CUDA device 0 {told}"
    assert (error.code is Code.RESOURCE_EXHAUSTED) == (told == NO_MEMORY)


def test_a_device_array_is_an_input_of_a_call(make: Make, cupy: Any) -> None:
    models = FakeOtherModels(answer(5))
    body = "return {'Y': request.call('other', {'A': request.input('X') * 2})['Y']}"
    backend, spec = load(make(on_device(body)), GPU, models=models)
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [5]
    [tensor] = models.asked[0].inputs
    assert isinstance(tensor.array, cupy.ndarray)
    content = bytearray(X.nbytes)
    call_input = CallInput(tensor)
    assert (call_input.nbytes, call_input.shape) == (X.nbytes, X.shape)
    call_input.fill(memoryview(content))
    assert np.frombuffer(content, X.dtype).tolist() == (X * 2).tolist()


def test_without_cupy_the_arrays_module_says_what_is_missing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    context = Context(None, "", "m/1/0", GPU)
    with pytest.raises(ShmserveError, match=r"pip install 'shmserve\[gpu\]'"):
        _ = context.xp
