"""ONNX models on a GPU: binding of tensors, options for the provider, and failures."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from shmserve import repository
from shmserve.errors import Code, ConfigError, ShmserveError
from shmserve.executor.backend import Context
from shmserve.executor.backends import create
from shmserve.executor.backends.array_views import device_array_at
from shmserve.executor.devices import Devices
from shmserve.executor.process import model_loading
from shmserve.shm.mappings import Mappings
from tests.backend_runner import FakeBackendRequest, arrays, ask, failure, load

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from tests.unit.executor.test_onnx_backend import adder, save, value  # noqa: E402

T = onnx.TensorProto
GPU = "cuda:0"
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
X = np.arange(4, dtype=np.float32)


class Binding:
    """Bound tensors, in ONNX Runtime's order of arguments. Outputs without an address get memory
    of the session."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.outputs: dict[str, tuple[Any, ...]] = {}
        self.own: dict[str, Any] = {}

    def bind_input(self, name: str, *bound: Any) -> None:
        self.inputs[name] = bound

    def bind_output(self, name: str, *bound: Any) -> None:
        assert len(bound) == 2 or bound[-1], "ONNX Runtime refuses a null pointer"
        self.outputs[name] = bound

    def array(self, bound: tuple[Any, ...]) -> Any:
        kind, number, element_type, shape, address = bound
        assert (kind, element_type) == ("cuda", T.FLOAT)
        return device_array_at(address, tuple(shape), np.dtype(np.float32), self, number)

    def get_outputs(self) -> list[Any]:
        return [
            SimpleNamespace(data_ptr=lambda a=a: a.data.ptr, shape=lambda a=a: list(a.shape))
            for a in self.own.values()
        ]

    def clear_binding_inputs(self) -> None:
        self.inputs = {}

    def clear_binding_outputs(self) -> None:
        self.outputs = {}


class Session:
    """Adds X to itself as ONNX Runtime would on CUDA: on a stream that waits for no other."""

    def __init__(self, path: str, options: Any, providers: list[Any], works: bool = True) -> None:
        self.real = ort.InferenceSession(path, options, providers=[CPU])
        self.get_inputs, self.get_outputs = self.real.get_inputs, self.real.get_outputs
        self.get_session_options = self.real.get_session_options
        self.given = providers
        self.works = works
        self.error = ""
        self.errors: list[str] = []  # of the next runs
        self.seen: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

    def get_providers(self) -> list[str]:
        return [CUDA, CPU] if self.works and self.given != [CPU] else [CPU]

    def io_binding(self) -> Any:
        if self.get_providers() == [CPU]:
            return self.real.io_binding()
        import cupy

        self.stream = cupy.cuda.Stream(non_blocking=True)
        return Binding(cupy)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        if not isinstance(binding, Binding):
            self.real.run_with_iobinding(binding, options)
            return
        if self.error or self.errors:
            raise RuntimeError(self.error or self.errors.pop())
        self.seen.append((options, binding.inputs, binding.outputs))
        with self.stream:
            x = binding.array(binding.inputs["X"])
            for name, bound in binding.outputs.items():
                binding.own[name] = made = x + x
                if len(bound) > 2:
                    binding.array(bound)[...] = made
        self.stream.synchronize()


SHRINK = "memory.enable_memory_arena_shrinkage"


class Runtime:
    """The module onnxruntime, built for CUDA."""

    def __init__(self, works: bool = True) -> None:
        self.works = works
        self.session: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(ort, name)

    def get_available_providers(self) -> list[str]:
        return [CUDA, CPU]

    def InferenceSession(self, path: str, options: Any, providers: list[Any]) -> Session:
        self.session = Session(path, options, providers, self.works)
        return self.session


@pytest.fixture
def runtime(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setitem(sys.modules, "onnxruntime", made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "m"


def executor_devices(directory: str) -> Devices:
    """Return the devices of an executor that has tried to load the model on GPU 0."""
    instance = repository.read_folder(directory).instances()[0]
    devices = Devices(0, Mappings())
    model_loading.load(structs.replace(instance, device=GPU, auto=True), devices)
    return devices


def parameters(**told: str) -> str:
    return "".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{text}" }} }}\n'
        for name, text in told.items()
    )


# ---------------------------------------------------------------------------------- binding


def test_device_pointers_are_bound_both_ways(
    runtime: Runtime, fake_cupy: Any, folder: Path
) -> None:
    backend, _ = load(adder(folder, ["N"]), "cuda:1")
    assert backend.reads_on_device
    x = fake_cupy.asarray(X) + 1  # not there before the default stream was waited for
    request = FakeBackendRequest(("Y",), X=x)
    got = arrays(backend.execute([request])[0])["Y"]
    assert got is request.offered["Y"]
    assert got.tolist() == [2, 4, 6, 8]
    (_, inputs, outputs) = runtime.session.seen[0]
    assert inputs == {"X": ("cuda", 1, T.FLOAT, (4,), x.data.ptr)}
    assert outputs == {"Y": ("cuda", 1, T.FLOAT, (4,), got.data.ptr)}
    assert runtime.session.given == [(CUDA, {"device_id": "1"}), CPU]
    assert backend._binding.inputs == backend._binding.outputs == {}  # type: ignore[attr-defined]


def test_inputs_from_the_host_are_brought_first(runtime: Runtime, folder: Path) -> None:
    backend, spec = load(adder(folder, ["N"]), GPU)
    assert arrays(ask(backend, spec, X=X))["Y"].tolist() == [0, 2, 4, 6]


def test_outputs_of_unknown_shape_are_wrapped_where_they_lie(
    runtime: Runtime, fake_cupy: Any, folder: Path
) -> None:
    node = onnx.helper.make_node("Add", ["X", "X"], ["Y"])
    ends = [value("X", T.FLOAT, ["N"])], [value("Y", T.FLOAT, ["K"])]
    backend, _ = load(save(folder, [node], *ends), "cuda:1")
    request = FakeBackendRequest(("Y",), X=X)
    got = arrays(backend.execute([request])[0])["Y"]
    assert request.offered == {}
    assert runtime.session.seen[0][2] == {"Y": ("cuda", 1)}
    assert (got.device.id, got.tolist()) == (1, [0, 2, 4, 6])
    assert got.data.ptr == backend._binding.own["Y"].data.ptr  # type: ignore[attr-defined]


def test_empty_tensors_have_an_address(runtime: Runtime, folder: Path) -> None:
    backend, spec = load(adder(folder, ["N"]), GPU)
    assert arrays(ask(backend, spec, X=np.zeros(0, np.float32)))["Y"].shape == (0,)
    _, inputs, outputs = runtime.session.seen[0]
    assert math.prod(bound[-1] for bound in (inputs["X"], outputs["Y"]))


def test_models_with_strings_run_with_host_arrays(runtime: Runtime, folder: Path) -> None:
    node = onnx.helper.make_node("Identity", ["X"], ["Y"])
    ends = [value("X", T.STRING, ["N"])], [value("Y", T.STRING, ["N"])]
    directory = save(folder, [node], *ends)
    backend, spec = load(directory, GPU)
    runtime.session.run = runtime.session.real.run
    assert not backend.reads_on_device
    assert arrays(ask(backend, spec, X=np.array([b"a"], object)))["Y"].tolist() == ["a"]
    # the model computes on the GPU, so the loss of the GPU matters
    devices = executor_devices(directory)
    assert devices.opened is not None


# ---------------------------------------------------------------------------------- options


def test_tritons_parameters_become_options_of_the_provider(
    runtime: Runtime, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = {
        "cudnn_conv_algo_search": "1",
        "gpu_mem_limit": "1073741824",
        "arena_extend_strategy": "1",
        "do_copy_in_default_stream": "0",
    }
    with caplog.at_level("INFO"):
        load(adder(folder, ["N"], config=parameters(**told)), GPU)
    assert runtime.session.given[0][1] == {
        "device_id": "0",
        "cudnn_conv_algo_search": "HEURISTIC",
        "gpu_mem_limit": "1073741824",
        "arena_extend_strategy": "kSameAsRequested",
        "do_copy_in_default_stream": "0",
    }
    assert "no effect" not in caplog.text
    with caplog.at_level("INFO"):
        load(adder(folder.parent / "n", ["N"], config=parameters(**told)))
    assert caplog.text.count("no effect (the instance runs on the CPU)") == len(told)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("cudnn_conv_algo_search", "3", "none of 0, 1, 2"),
        ("arena_extend_strategy", "x", "none of 0, 1"),
        ("do_copy_in_default_stream", "true", "none of 0, 1"),
        ("gpu_mem_limit", "4GB", "is no number of bytes"),
        ("gpu_mem_limit", "0", "is no number of bytes"),
        (SHRINK, "gpu", "is no list of 'cpu:0' and 'gpu:K'"),
        (SHRINK, "cpu:0;gpu:01", "is no list of 'cpu:0' and 'gpu:K'"),
    ],
)
def test_wrong_values_are_refused_by_name(
    runtime: Runtime, folder: Path, name: str, text: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"parameters\.{name} '{text}' {reason}|{reason}"):
        load(adder(folder, ["N"], config=parameters(**{name: text})), GPU)


@pytest.mark.parametrize(
    ("device", "entry"), [(GPU, "cpu:0;gpu:0"), ("cuda:1", "cpu:0")], ids=["own", "other"]
)
def test_only_the_sessions_own_arenas_shrink(
    runtime: Runtime, folder: Path, device: str, entry: str
) -> None:
    config = parameters(**{SHRINK: "cpu:0;gpu:0"})
    backend, spec = load(adder(folder, [4], config=config), device)
    arrays(ask(backend, spec, X=X))
    assert runtime.session.seen[0][0].get_run_config_entry(SHRINK) == entry


def test_on_the_cpu_the_cpus_arena_shrinks(folder: Path) -> None:
    config = parameters(**{SHRINK: "gpu:0;cpu:0"})
    backend, spec = load(adder(folder, [4], config=config))
    assert arrays(ask(backend, spec, X=X))["Y"].tolist() == [0, 2, 4, 6]
    assert backend._run_options.get_run_config_entry(SHRINK) == "cpu:0"  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("lacks", ["provider", "library", "cupy"])
def test_without_the_provider(
    runtime: Runtime,
    folder: Path,
    lacks: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if lacks == "provider":
        monkeypatch.setattr(runtime, "get_available_providers", lambda: [CPU])
    elif lacks == "library":
        runtime.works = False
    else:
        monkeypatch.setitem(sys.modules, "cupy", None)
    why = {
        "provider": "onnxruntime-gpu instead of",
        "library": "provider does not start",
        "cupy": r"pip install 'shmserve\[gpu\]'",
    }[lacks]
    directory = adder(folder, ["N"])
    found = repository.read_folder(directory).specs[-1]
    context = Context(found, directory, "m/1/0", GPU)
    with pytest.raises(ConfigError, match=f"'onnxruntime' cannot use a GPU: .*{why}"):
        create(found).load(context)
    backend = create(found)
    with caplog.at_level("INFO"):
        spec = backend.load(structs.replace(context, auto=True))
    assert "runs on the CPU: ONNX Runtime cannot use a GPU" in caplog.text
    assert not backend.reads_on_device
    got = arrays(ask(backend, spec, X=X))["Y"]
    assert isinstance(got, np.ndarray)
    assert got.tolist() == [0, 2, 4, 6]
    devices = executor_devices(directory)
    assert (devices.ordinal, devices.opened) == (None, None)


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        (
            "[ONNXRuntimeError] : 6 : Failed to allocate memory for requested buffer of size 9",
            Code.RESOURCE_EXHAUSTED,
            "CUDA device 0 has no memory left for this request",
        ),
        (
            "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=box ; "
            "file=/src/cuda_call.cc ; line=1 ; expr=cudaStreamSynchronize(stream);",
            Code.INTERNAL,
            "CUDA device 0 failed: an illegal memory access was encountered",
        ),
        ("something else", Code.INTERNAL, "something else"),
    ],
)
def test_errors_of_the_provider(
    runtime: Runtime, folder: Path, text: str, code: Code, told: str
) -> None:
    backend, spec = load(adder(folder, ["N"]), GPU)
    runtime.session.error = text
    error = failure(ask(backend, spec, X=X))
    assert (error.code, error.message) == (code, told)


def test_a_gpu_without_memory_says_nothing_of_shapes(runtime: Runtime, folder: Path) -> None:
    """Outputs of known shape are written directly to their place, even after such an error."""
    backend, spec = load(adder(folder, ["N"]), GPU)
    runtime.session.errors = ["Failed to allocate memory for requested buffer of size 9"]
    assert failure(ask(backend, spec, X=X)).code is Code.RESOURCE_EXHAUSTED
    request = FakeBackendRequest(("Y",), X=X)
    assert arrays(backend.execute([request])[0])["Y"] is request.offered["Y"]


def test_no_memory_left_for_a_model(
    runtime: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Available memory of 5 is smaller than requested bytes of 9")

    monkeypatch.setattr(runtime, "InferenceSession", fail)
    with pytest.raises(ShmserveError, match="device 0 has no memory left for this model"):
        load(adder(folder, ["N"]), GPU)


# ------------------------------------------------------------------------------ a real device


@pytest.mark.gpu
@pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="onnxruntime-gpu is missing")
@pytest.mark.parametrize("known", [True, False])
def test_the_real_provider(cupy: Any, folder: Path, known: bool) -> None:
    node = onnx.helper.make_node("Add", ["X", "X"], ["Y"])
    ends = [value("X", T.FLOAT, ["N"])], [value("Y", T.FLOAT, ["N" if known else "K"])]
    backend, spec = load(save(folder, [node], *ends), GPU)
    for size in (1, 1 << 22, 0):
        x = cupy.arange(size, dtype="float32")
        for _ in range(5):
            x = x + 1
            got = arrays(ask(backend, spec, X=x))["Y"]
            assert isinstance(got, cupy.ndarray)
            np.testing.assert_array_equal(got.get(), 2 * x.get())
