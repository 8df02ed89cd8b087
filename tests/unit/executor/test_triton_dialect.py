"""The Triton dialect: unmodified models, errors, nonsense, auto-completion, DLPack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmserve import repository
from shmserve.errors import Code, ShmserveError
from shmserve.executor.backend import Context
from shmserve.executor.backends import create
from shmserve.executor.backends.triton.inference_response import InferenceResponse
from shmserve.repository import model_folder
from tests.backend_runner import FakeBackendRequest, arrays, ask, failure, load
from tests.model_files import X_TO_Y as CONFIG
from tests.model_files import Make, triton

X = np.arange(4, dtype=np.float32)


# ------------------------------------------------------------- Triton dialect

CALL = "pb.InferenceRequest(model_name='x', requested_output_names=[]"
IDENTITY = (
    "return [pb.InferenceResponse([pb.Tensor('Y', r.inputs()[0].as_numpy())]) for r in requests]"
)


def test_triton_identity_is_an_alias(make: Make) -> None:
    backend, _ = load(make(triton(IDENTITY)))
    requests = [FakeBackendRequest(("Y",), X=X), FakeBackendRequest(("Y",), X=X + 1)]
    for request, response in zip(requests, backend.execute(requests), strict=True):
        assert np.shares_memory(arrays(response)["Y"], request.inputs["X"].memory)


def test_triton_initialize_and_finalize(make: Make, tmp_path) -> None:
    more = f"""
    def initialize(self, args):
        import json
        assert all(isinstance(v, str) for v in args.values())
        self.args = args
        self.config = json.loads(args["model_config"])
    def finalize(self):
        open({str(tmp_path / "final")!r}, "w").close()
"""
    body = """
    c = self.config
    assert pb.get_input_config_by_name(c, "X")["data_type"] == "TYPE_FP32"
    assert pb.get_output_config_by_name(c, "Z") is None
    assert not pb.using_decoupled_model_transaction_policy(c)
    assert pb.triton_string_to_numpy("TYPE_FP32") == np.float32
    assert pb.triton_string_to_numpy("TYPE_STRING") == np.object_
    assert pb.triton_to_numpy_type(8) == np.int32 and pb.numpy_to_triton_type(np.int32) == 8
    assert pb.triton_to_numpy_type(99) is None and pb.numpy_to_triton_type(complex) is None
    assert pb.TRITON_STRING_TO_NUMPY["TYPE_INT8"] == np.int8
    assert requests[0].trace().get_context() is None
    a = self.args
    s = np.array([a["model_name"] + a["model_version"] + a["model_instance_kind"],
                  a["model_instance_device_id"]], dtype=object)
    return [pb.InferenceResponse(output_tensors=[pb.Tensor("S", s)])]
    """
    directory = make(triton(body, more))
    backend, spec = load(directory)
    assert arrays(ask(backend, spec, ("S",), X=X))["S"].tolist() == ["m1CPU", "0"]
    backend.close()
    assert (tmp_path / "final").exists()


def test_a_models_own_readiness_is_not_asked(make: Make) -> None:
    more = """
    def is_model_ready(self):
        raise AssertionError("nobody asks")
"""
    backend, spec = load(make(triton("return [pb.InferenceResponse(requests[0].inputs())]", more)))
    assert arrays(ask(backend, spec, ("X",), X=X))["X"].tolist() == X.tolist()


def of_instances(directory: str) -> list[str]:
    """Return the words that each instance of a model answers."""
    found = []
    for instance in repository.read_folder(directory).instances():
        backend = create(instance.spec)
        spec = backend.load(Context(instance.spec, directory, instance.name, instance.device))
        found.append(" ".join(arrays(ask(backend, spec, ("S",), X=X))["S"]))
    return found


def test_triton_instance_kind_is_that_of_its_group(make: Make) -> None:
    groups = "instance_group [ { kind: KIND_MODEL }, { kind: KIND_CPU } ]"
    more = "\n    def initialize(self, args):\n        self.kind = args['model_instance_kind']\n"
    body = "return [pb.InferenceResponse([pb.Tensor('S', np.array([self.kind, ''], object))])]"
    assert of_instances(make(triton(body, more), CONFIG + groups)) == ["MODEL ", "CPU "]


def test_triton_instances_on_gpus_are_told_their_device(make: Make, monkeypatch) -> None:
    monkeypatch.setattr(model_folder.gpus, "visible_devices", lambda: ("0", "1"))  # type: ignore[attr-defined]
    monkeypatch.setattr(model_folder.util, "find_spec", lambda name: object())  # type: ignore[attr-defined]
    groups = "instance_group [ { kind: KIND_CPU }, { kind: KIND_GPU count: 2 name: 'g' } ]"
    keys = "('model_instance_name', 'model_instance_kind', 'model_instance_device_id')"
    more = f"\n    def initialize(self, args):\n        self.told = [args[k] for k in {keys}]\n"
    body = "return [pb.InferenceResponse([pb.Tensor('S', np.array(self.told, object))])]"
    found = of_instances(make(triton(body, more), CONFIG + groups))
    assert found == ["m_0_0 CPU 0", "g_0 GPU 0", "g_0 GPU 1", "g_1 GPU 0", "g_1 GPU 1"]


def test_triton_request_methods(make: Make) -> None:
    body = """
    r = requests[0]
    import json
    assert r.request_id() == "request-1" and r.requested_output_names() == {"Y"}
    assert r.correlation_id() == 9 and r.flags() == 3 and r.timeout() == 50 and r.priority() == 2
    assert json.loads(r.parameters()) == {"own": True}
    assert not r.is_cancelled()
    assert r.model_name() == "m" and r.model_version() == 1
    x = pb.get_input_tensor_by_name(r, "X")
    assert pb.get_input_tensor_by_name(r, "nope") is None
    assert x.name() == "X" and x.shape() == [4] and x.is_cpu()
    assert x.triton_dtype() == 11 and x.triton_dtype().name == "TYPE_FP32"
    assert x.as_numpy() is x.as_numpy() and not x.as_numpy().flags.writeable
    pb.Logger.log_info("hello"); pb.Logger.log("x", pb.Logger.VERBOSE)
    response = pb.InferenceResponse([pb.Tensor("Y", x.as_numpy() + 1)], parameters={"k": 1})
    assert pb.get_output_tensor_by_name(response, "Y").shape() == [4]
    assert json.loads(response.parameters()) == {"k": 1} and not response.has_error()
    return [response]
    """
    backend, spec = load(make(triton(body)))
    told: Any = {"sequence_id": 9, "sequence_start": True, "sequence_end": True}
    told |= {"timeout": 50, "priority": 2, "own": True}
    response = ask(backend, spec, ("Y",), told, X=X)
    assert arrays(response)["Y"].tolist() == [1, 2, 3, 4]
    assert response.parameters == {"k": 1}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("UNKNOWN", Code.UNKNOWN),
        ("INTERNAL", Code.INTERNAL),
        ("NOT_FOUND", Code.NOT_FOUND),
        ("INVALID_ARG", Code.INVALID_ARGUMENT),
        ("UNAVAILABLE", Code.UNAVAILABLE),
        ("UNSUPPORTED", Code.UNIMPLEMENTED),
        ("ALREADY_EXISTS", Code.ALREADY_EXISTS),
        ("CANCELLED", Code.CANCELLED),
    ],
)
def test_triton_errors(make: Make, code: str, kind: Code) -> None:
    body = f"return [pb.InferenceResponse(error=pb.TritonError('no /a/b', pb.TritonError.{code}))]"
    backend, spec = load(make(triton(body)))
    error = failure(ask(backend, spec, ("Y",), X=X))
    assert (error.code, error.message) == (kind, "no <path>")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "return None",
            "Failed to process the request(s) for model 'm_0_0', message: Expected a list in the "
            "execute return, found type '<class 'NoneType'>'.",
        ),
        ("return 5", "Expected a list in the execute return, found type '<class 'int'>'."),
        (
            "return []",
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            "objects. InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0",
        ),
        ("return [None]", "Expected an 'InferenceResponse' object in the execute function return"),
        ("pb.InferenceResponse([None])", "TritonModelException: output_tensors must be a list"),
        ("return ['x']", "return list, found type '<class 'str'>'."),
        ("1 / 0", "for model 'm_0_0', message: ZeroDivisionError: division by zero"),
        (
            "t = pb.Tensor('Y', requests[0].inputs()[0].as_numpy())\n"
            "return [pb.InferenceResponse([t, t])]",
            "twice",
        ),
        ("return [pb.InferenceResponse([1])]", "list of Tensor"),
        ("pb.Tensor('Y', [1.0])", "needs a numpy array, got list"),
        ("pb.Tensor('Y', np.zeros(1, complex))", "no datatype for complex128"),
        ("pb.Tensor(None, np.zeros(1))", "name must be text, got NoneType"),
        ("pb.InferenceResponse(None)", "must be a list of Tensor, got NoneType"),
        ("pb.Logger.log_info(None)", "must be text, got NoneType"),
        ("pb.Logger.log('x', 1)", "must be a LogLevel, got int"),
        (f"{CALL}, inputs=[None])", "TritonModelException: inputs must be a list of Tensor"),
        (f"{CALL}, inputs=[5])", "TypeError: inputs must be a list of Tensor, and has int"),
        ("pb.InferenceRequest()", "TypeError: InferenceRequest: argument 'inputs' is missing"),
        ("pb.InferenceRequest(inputs=[])", "argument 'requested_output_names' is missing, or None"),
        (
            "pb.InferenceRequest(inputs=[], requested_output_names=[])",
            "argument 'model_name' is missing, or None",
        ),
        (
            "pb.InferenceRequest(inputs=[], requested_output_names=[1], model_name='x')",
            "requested_output_names cannot be int",
        ),
        (f"{CALL}, inputs=[], correlation_id=None)", "TypeError: InferenceRequest: argument 'corr"),
        (
            f"{CALL}, inputs=[], correlation_id=1.5)",
            "TritonModelException: Correlation ID must be integer or string",
        ),
        ("pb.load_model('x')", "model 'x' cannot be loaded: no server is running"),
        ("pb.unload_model('x')", "model 'x' cannot be unloaded: no server is running"),
        ("requests[0].exec()", "exec: only requests that the model has made can be run"),
        (
            "requests[0].set_release_flags(2)",
            "only requests to a model with sequence_batching.iter",
        ),
        ("pb.deserialize_bytes_tensor(b'123')", "ends within an element"),
        ("raise pb.TritonModelException('mine')", "mine"),
        ("requests[0].inputs()[0].as_numpy()[0] = 1", "read-only"),
        ("pb.triton_string_to_numpy('TYPE_X')", "KeyError: 'TYPE_X'"),
        ("pb.InferenceResponse([], parameters={'a': None})", "bool/int/str, found type"),
    ],
)
def test_triton_nonsense(make: Make, body: str, reason: str) -> None:
    backend, spec = load(make(triton(body)))
    error = failure(ask(backend, spec, ("Y",), X=X))
    assert error.code is Code.INTERNAL
    assert reason in error.message


def test_one_bad_response_does_not_spoil_the_others(make: Make) -> None:
    backend, _ = load(make(triton(IDENTITY + "[:1] + [None]")))
    good, bad = backend.execute([FakeBackendRequest(("Y",), X=X), FakeBackendRequest(("Y",), X=X)])
    assert good.error is None
    assert bad.error is not None


def test_outputs_are_taken_as_the_model_gives_them(make: Make, caplog) -> None:
    body = """
    y = pb.Tensor("Y", np.zeros((2, 2)))
    s = pb.Tensor("S", np.array([1, 2.5, b"x", "y"], object))
    return [pb.InferenceResponse([y, s, pb.Tensor("Q", np.zeros(1))])]
    """
    backend, spec = load(make(triton(body)))
    for _ in range(2):
        response = ask(backend, spec, ("Y", "S"), X=X)
        assert [output.datatype for output in response.outputs] == ["FP64", "BYTES"]
        got = arrays(response)
        assert got["Y"].shape == (2, 2)
        assert got["S"].tolist() == ["1", "2.5", b"x", "y"]
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == [
        "model 'm': output 'Y' is FP64, but FP32 in the configuration",
        "model 'm': output 'S' has shape [4], but [2] in the configuration",
    ]
    assert ask(backend, spec, ("Y", "nope"), X=X).error is None


@pytest.mark.parametrize("dtype", ["S", "U", "object"])
def test_strings_of_any_numpy_kind(make: Make, dtype: str) -> None:
    body = f"return [pb.InferenceResponse([pb.Tensor('S', np.array(['ab', 'c'], {dtype!r}))])]"
    backend, spec = load(make(triton(body.replace("'object'", "object"))))
    got = arrays(ask(backend, spec, ("S",), X=X))["S"].tolist()
    assert [e if isinstance(e, str) else e.decode() for e in got] == ["ab", "c"]


def test_byte_tensors_are_framed_and_read_back() -> None:
    load("workers/add_sub")
    import triton_python_backend_utils as pb  # type: ignore[import-not-found]

    array = np.array([[b"a", "ä"], [b"", 5]], object)
    data = pb.serialize_byte_tensor(array)
    assert data == b"\x01\0\0\0a\x02\0\0\0\xc3\xa4\0\0\0\0\x01\0\0\x005"
    assert pb.deserialize_bytes_tensor(data).tolist() == [b"a", "ä".encode(), b"", b"5"]
    assert pb.serialize_byte_tensor(np.zeros(0, object)) == ()
    assert pb.serialize_byte_tensor(np.zeros(2)) is None


def test_log_lines_have_their_level(make: Make, caplog) -> None:
    body = "for f in 'info warn error verbose'.split(): getattr(pb.Logger, 'log_' + f)(f)\n"
    body += "pb.Logger.log('told', pb.Logger.WARNING)\n" + IDENTITY
    backend, spec = load(make(triton(body)))
    with caplog.at_level("DEBUG", "shmserve.model"):
        ask(backend, spec, ("Y",), X=X)
    got = [f"{r.levelname} {r.message}" for r in caplog.records if r.name == "shmserve.model"]
    assert got == ["INFO info", "WARNING warn", "ERROR error", "DEBUG verbose", "WARNING told"]


def test_a_file_of_another_name_has_its_neighbours(make: Make) -> None:
    more = "    def initialize(self, args):\n        from . import neighbour\n"
    directory = Path(make(triton(IDENTITY, more), CONFIG + 'default_model_filename: "a.b.py"'))
    (directory / "1" / "model.py").rename(directory / "1" / "a.b.py")
    (directory / "1" / "neighbour.py").write_text("")
    load(str(directory))


def test_files_beside_the_model(make: Make, tmp_path) -> None:
    more = """
    def initialize(self, args):
        import os, pathlib
        import beside, above
        from . import beside as relative
        assert relative.VALUE == beside.VALUE
        path = os.path.join(args["model_repository"], args["model_version"], "data.txt")
        assert path == os.path.join(pb.get_model_dir(), "data.txt")
        assert os.path.dirname(__file__) == pb.get_model_dir()
        self.text = pathlib.Path(path).read_text() + beside.VALUE + above.VALUE
"""
    body = "return [pb.InferenceResponse([pb.Tensor('S', np.array([self.text, ''], object))])]"
    directory = Path(make(triton(body, more)))
    (directory / "1" / "beside.py").write_text("VALUE = 'b'")
    (directory / "above.py").write_text("VALUE = 'c'")
    (directory / "1" / "data.txt").write_text("a")
    backend, spec = load(str(directory))
    assert arrays(ask(backend, spec, ("S",), X=X))["S"][0] == "abc"


def test_writable_inputs_are_copies(make: Make) -> None:
    body = """
    x = requests[0].inputs()[0].as_numpy()
    x += 1
    return [pb.InferenceResponse([pb.Tensor("Y", x)])]
    """
    parameter = 'parameters { key: "writable_inputs" value { string_value: "true" } }'
    backend, _ = load(make(triton(body), CONFIG + parameter))
    request = FakeBackendRequest(("Y",), X=X)
    assert arrays(backend.execute([request])[0])["Y"].tolist() == [1, 2, 3, 4]
    assert request.inputs["X"].memory.tolist() == [0, 1, 2, 3]


RESHAPED = """
backend: "python" max_batch_size: 2
input [ { name: "X" data_type: TYPE_FP32 dims: [ 2, -1 ] reshape { shape: [ 1, 2, -1 ] } } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [] } } ]
"""


def test_reshape(make: Make) -> None:
    body = """
    x = requests[0].inputs()[0]
    assert x.shape() == [2, 1, 2, 3] and x.as_numpy().shape == (2, 1, 2, 3), x.shape()
    return [pb.InferenceResponse([pb.Tensor("Y", x.as_numpy().sum((1, 2, 3)))])]
    """
    backend, spec = load(make(triton(body), RESHAPED))
    assert (spec.inputs[0].shape, spec.outputs[0].shape) == ((-1, 2, -1), (-1, 1))
    got = arrays(ask(backend, spec, X=np.ones((2, 2, 3), np.float32)))["Y"]
    assert got.tolist() == [[6], [6]]


AUTO = """
    @staticmethod
    def auto_complete_config(config):
        assert config.as_dict()["name"] == "m"
        config.set_max_batch_size(4)
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]})
        %s
        return config
"""


def test_auto_complete_config(make: Make) -> None:
    _, spec = load(make(triton(IDENTITY, AUTO % ""), 'backend: "python"'))
    assert spec.max_batch_size == 4
    assert spec.inputs[0].shape == (-1, -1)
    config = json.loads(spec.config.json())
    assert config["output"][0]["dims"] == [-1]
    assert config["max_batch_size"] == 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("return None", "must return the configuration it got, got None"),
        ("config.add_input({'name': 'Q'})", "input 'Q' of auto_complete_config has no 'data_type'"),
        ("config.add_output({})", "an output of auto_complete_config has no 'name'"),
        (
            "config.add_input({'name': 'X', 'data_type': 'TYPE_FP32', 'dims': [-1], 'optional': 1})"
            "\n        config.add_input({'name': 'X', 'data_type': 'TYPE_INT8', 'dims': [-1]})",
            "data_type TYPE_FP32 in the configuration, auto_complete_config adds TYPE_INT8",
        ),
        ("config.add_input({'name': 'Q', 'data_type': 'x', 'dims': [1], 'z': 0})", "property 'z'"),
        ("config.add_output({'name': 'Q', 'data_type': 'TYPE_X', 'dims': [1]})", "TYPE_X"),
        ("config.add_input({'name': 'X', 'data_type': 'TYPE_FP32', 'dims': [2]})", r"dims \[-1\]"),
        ("config.set_max_batch_size(2)", "max_batch_size is 4"),
        ("config.set_model_transaction_policy({'x': 1})", "unknown property 'x'"),
        (
            "config.set_model_transaction_policy({'decoupled': True})"
            "\n        config.set_model_transaction_policy({'decoupled': False})",
            "is decoupled in the configuration",
        ),
    ],
)
def test_auto_complete_config_is_checked(make: Make, line: str, reason: str) -> None:
    with pytest.raises(ShmserveError, match=reason):
        load(make(triton(IDENTITY, AUTO % line), 'backend: "python"'))


def test_labels_survive_auto_complete_config(make: Make) -> None:
    config = 'backend: "python" output [ { name: "Y" label_filename: "names" } ]'
    directory = Path(make(triton(IDENTITY, AUTO % ""), config))
    (directory / "names").write_text("a\nb\n")
    _, spec = load(str(directory))
    assert (spec.outputs[0].labels, spec.outputs[0].shape) == (("a", "b"), (-1, -1))


def test_auto_complete_config_without_a_file(make: Make) -> None:
    directory = make(triton(IDENTITY, AUTO % "config.set_dynamic_batching()"), "")
    (Path(directory) / "config.pbtxt").unlink()
    _, spec = load(directory)
    assert (spec.backend, spec.max_batch_size) == ("python", 4)
    assert "dynamic_batching" in json.loads(spec.config.json())


def test_auto_complete_config_completes_an_entry(make: Make) -> None:
    config = 'backend: "python" input [ { name: "X" } ] output [ { name: "Y" dims: [ -1 ] } ]'
    _, spec = load(make(triton(IDENTITY, AUTO % ""), config))
    assert spec.inputs[0].shape == (-1, -1)
    config += 'output [ { name: "S" data_type: TYPE_INT8 dims: 1 } ]'
    with pytest.raises(ShmserveError, match="input 'X': data_type or dims is missing"):
        load(make(triton(IDENTITY), config, name="n"))


# --------------------------------------------------------------------- DLPack

DTYPES = ["BOOL", "UINT8", "UINT64", "INT8", "INT32", "INT64", "FP16", "BF16", "FP32", "FP64"]


@pytest.mark.parametrize("name", DTYPES)
def test_dlpack_identity_without_a_copy(make: Make, name: str) -> None:
    config = CONFIG.replace("TYPE_FP32", f"TYPE_{name}")
    body = (
        "return [pb.InferenceResponse([pb.Tensor.from_dlpack('Y', r.inputs()[0].to_dlpack())])"
        " for r in requests]"
    )
    backend, _spec = load(make(triton(body), config))
    types = {"BF16": ml_dtypes.bfloat16, "BOOL": np.bool_, "FP16": np.float16}
    kinds = {"UINT8": "u1", "UINT64": "u8", "INT8": "i1", "INT32": "i4", "INT64": "i8"}
    dtype = np.dtype(types.get(name) or kinds.get(name) or {"FP32": "f4", "FP64": "f8"}[name])
    x = np.array([0, 1, 1, 0, 1]).astype(dtype)
    request = FakeBackendRequest(("Y",), X=x)
    got = arrays(backend.execute([request])[0])["Y"]
    assert got.dtype == dtype
    assert got.ctypes.data == request.inputs["X"].memory.ctypes.data
    np.testing.assert_array_equal(got, x)


def test_response_type_is_the_models_own() -> None:
    load("workers/add_sub")
    import triton_python_backend_utils as pb

    assert pb.InferenceResponse is InferenceResponse


def test_a_rescheduled_request_has_no_response(make: Make) -> None:
    body = f"requests[0].set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)\n{IDENTITY}"
    config = f"{CONFIG}\nsequence_batching {{ iterative_sequence: true }}"
    backend, spec = load(make(triton(body), config))
    error = failure(ask(backend, spec, ("Y",), X=X))
    expected = "Expected a None object in the execute function return list for reschduled request, "
    assert f"message: {expected}found type" in error.message
