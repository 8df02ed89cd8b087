"""The Triton dialect: unmodified models, errors, nonsense, auto-completion, DLPack."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shmserve import repository
from shmserve.errors import Code, ShmserveError, Unimplemented
from shmserve.executor.backend import Context
from shmserve.executor.backends import create
from shmserve.executor.backends.pb_request import InferenceResponse
from shmserve.testing.backends import FakeRequest, arrays, ask, failure, load
from shmserve.testing.models import X_TO_Y as CONFIG
from shmserve.testing.models import Make, model_maker, triton

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return model_maker(tmp_path)


# ------------------------------------------------------------- Triton dialect

IDENTITY = (
    "return [pb.InferenceResponse([pb.Tensor('Y', r.inputs()[0].as_numpy())]) for r in requests]"
)


def test_triton_identity_is_an_alias(make: Make) -> None:
    backend, _ = load(make(triton(IDENTITY)))
    requests = [FakeRequest(("Y",), X=X), FakeRequest(("Y",), X=X + 1)]
    for request, response in zip(requests, backend.execute(requests), strict=True):
        assert np.shares_memory(arrays(response)["Y"], request.inputs["X"].memory)


def test_triton_initialize_and_finalize(make: Make, tmp_path: Path) -> None:
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


def test_triton_instance_kind_is_that_of_its_group(make: Make) -> None:
    groups = "instance_group [ { kind: KIND_MODEL }, { kind: KIND_CPU } ]"
    more = "\n    def initialize(self, args):\n        self.kind = args['model_instance_kind']\n"
    body = "return [pb.InferenceResponse([pb.Tensor('S', np.array([self.kind, ''], object))])]"
    directory = make(triton(body, more), CONFIG + groups)
    found = []
    for instance in repository.read_folder(directory).instances():
        backend = create(instance.spec)
        spec = backend.load(Context(instance.spec, directory, instance.name, instance.device))
        found.append(arrays(ask(backend, spec, ("S",), X=X))["S"][0])
    assert found == ["MODEL", "CPU"]


def test_triton_request_methods(make: Make) -> None:
    body = """
    r = requests[0]
    import json
    assert r.request_id() == "request-1" and r.requested_output_names() == ["Y"]
    assert r.correlation_id() == 9 and r.flags() == 3 and r.timeout() == 50 and r.priority() == 2
    assert json.loads(r.parameters()) == {"own": True}
    assert not r.is_cancelled()
    x = pb.get_input_tensor_by_name(r, "X")
    assert pb.get_input_tensor_by_name(r, "nope") is None
    assert x.name() == "X" and x.shape() == [4] and x.triton_dtype() == "FP32" and x.is_cpu()
    assert x.as_numpy() is x.as_numpy() and not x.as_numpy().flags.writeable
    pb.Logger.log_info("hello"); pb.Logger.log("x", pb.Logger.VERBOSE)
    response = pb.InferenceResponse([pb.Tensor("Y", x.as_numpy() + 1)], parameters={"k": 1})
    assert pb.get_output_tensor_by_name(response, "Y").shape() == [4]
    assert json.loads(response.parameters()) == {"k": 1} and not response.has_error()
    return [response]
    """
    backend, spec = load(make(triton(body)))
    parameters = {
        "sequence_id": 9,
        "sequence_start": True,
        "sequence_end": True,
        "timeout": 50,
        "priority": 2,
        "own": True,
    }
    response = ask(backend, spec, ("Y",), parameters, X=X)
    assert arrays(response)["Y"].tolist() == [1, 2, 3, 4]
    assert response.parameters == {"k": 1}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("UNKNOWN", Code.INTERNAL),
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
        ("return None", "list of 1 responses, got None"),
        ("return 5", "list of 1 responses, got int"),
        ("return []", "list of 1 responses, got 0"),
        ("return [None]", "InferenceResponse objects, got None"),
        ("return ['x']", "InferenceResponse objects, got str"),
        ("return [pb.InferenceResponse([])]", "gave no output 'Y'"),
        ("return [pb.InferenceResponse([pb.Tensor('Y', np.zeros(1))])]", "datatype FP32"),
        ("return [pb.InferenceResponse([pb.Tensor('Q', np.zeros(1))])]", "unknown output 'Q'"),
        (
            "t = pb.Tensor('Y', requests[0].inputs()[0].as_numpy())\n"
            "return [pb.InferenceResponse([t, t])]",
            "twice",
        ),
        ("return [pb.InferenceResponse([1])]", "list of Tensor"),
        ("pb.Tensor('Y', [1.0])", "needs a numpy array, got list"),
        ("pb.Tensor('Y', np.zeros(1, complex))", "no datatype for complex128"),
        ("requests[0].set_release_flags(pb.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)", "iterative"),
        ("raise pb.TritonModelException('mine')", "mine"),
        ("requests[0].inputs()[0].as_numpy()[0] = 1", "read-only"),
        ("pb.triton_string_to_numpy('TYPE_X')", "no data type 'TYPE_X'"),
        ("pb.InferenceResponse([], parameters={'a': None})", "must be a bool, int"),
    ],
)
def test_triton_nonsense(make: Make, body: str, reason: str) -> None:
    backend, spec = load(make(triton(body)))
    error = failure(ask(backend, spec, ("Y",), X=X))
    assert error.code is Code.INTERNAL
    assert reason in error.message


def test_one_bad_response_does_not_spoil_the_others(make: Make) -> None:
    backend, _ = load(make(triton(IDENTITY + "[:1] + [None]")))
    good, bad = backend.execute([FakeRequest(("Y",), X=X), FakeRequest(("Y",), X=X)])
    assert good.error is None
    assert bad.error is not None


def test_calling_other_models_is_refused(make: Make) -> None:
    backend, spec = load(make(triton("pb.InferenceRequest(model_name='other')")))
    assert isinstance(failure(ask(backend, spec, ("Y",), X=X)), Unimplemented)


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
    config = json.loads(spec.config_json)
    assert config["output"][0]["dims"] == [-1]
    assert config["max_batch_size"] == 4


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("config.set_dynamic_batching()", "dynamic_batching is not supported"),
        ("return None", "must return the configuration it got, got None"),
        ("config.add_input({'name': 'Q'})", "no 'data_type'"),
        ("config.add_input({'name': 'Q', 'data_type': 'x', 'dims': [1], 'z': 0})", "property 'z'"),
        ("config.add_output({'name': 'Q', 'data_type': 'TYPE_X', 'dims': [1]})", "TYPE_X"),
        ("config.add_input({'name': 'X', 'data_type': 'TYPE_FP32', 'dims': [2]})", r"dims \[-1\]"),
        ("config.set_max_batch_size(2)", "max_batch_size is 4"),
        ("config.set_model_transaction_policy({})", "exactly one property"),
    ],
)
def test_auto_complete_config_is_checked(make: Make, line: str, reason: str) -> None:
    with pytest.raises(ShmserveError, match=reason):
        load(make(triton(IDENTITY, AUTO % line), 'backend: "python"'))


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
    request = FakeRequest(("Y",), X=x)
    got = arrays(backend.execute([request])[0])["Y"]
    assert got.dtype == dtype
    assert got.ctypes.data == request.inputs["X"].memory.ctypes.data
    np.testing.assert_array_equal(got, x)


def test_response_type_is_the_models_own() -> None:
    load("workers/add_sub")
    import triton_python_backend_utils as pb  # type: ignore[import-not-found]

    assert pb.InferenceResponse is InferenceResponse
