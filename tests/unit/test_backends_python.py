"""The python backend: loading, both dialects, models that misbehave."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import ml_dtypes
import numpy as np
import pytest

from shmserve.errors import Code, ConfigError, Internal, ModelFailure, ShmserveError, Unimplemented
from shmserve.executor.backend import Response
from shmserve.executor.backends import create
from shmserve.executor.backends.failure import MAX_TEXT, describe, sanitised
from shmserve.executor.backends.pb_request import InferenceResponse
from shmserve.testing.backends import FakeRequest, arrays, ask, load

Make = Callable[..., str]

CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] },
         { name: "S" data_type: TYPE_STRING dims: [ 2 ] } ]
"""
X = np.arange(4, dtype=np.float32)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a model's folder, returns its path."""

    def write(code: str, config: str = CONFIG, name: str = "m") -> str:
        version = tmp_path / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        (version / "model.py").write_text(dedent(code))
        return str(version.parent)

    return write


def native(body: str) -> str:
    lines = "\n".join(f"        {line}" for line in dedent(body).strip().splitlines())
    return f"import numpy as np\nclass Model:\n    def infer(self, request):\n{lines}\n"


def triton(body: str, more: str = "") -> str:
    lines = "\n".join(f"        {line}" for line in dedent(body).strip().splitlines())
    return (
        "import numpy as np, triton_python_backend_utils as pb\n"
        f"class TritonPythonModel:\n    def execute(self, requests):\n{lines}\n{more}"
    )


def failure(response: Response) -> ShmserveError:
    assert response.error is not None
    return response.error


# ------------------------------------------------------------------- loading


def test_shipped_python_workers() -> None:
    backend, spec = load("workers/add_sub")
    a, b = np.arange(16, dtype=np.int32), np.full(16, 3, np.int32)
    got = arrays(ask(backend, spec, INPUT0=a, INPUT1=b))
    np.testing.assert_array_equal(got["OUTPUT0"], a + b)
    np.testing.assert_array_equal(got["OUTPUT1"], a - b)
    backend, spec = load("workers/identity")
    request = FakeRequest(("OUTPUT0",), INPUT0=X)
    (response,) = backend.execute([request])
    assert arrays(response)["OUTPUT0"] is request.offered["OUTPUT0"]
    np.testing.assert_array_equal(request.offered["OUTPUT0"], X)
    backend, spec = load("workers/identity_bytes")
    texts = np.array([b"a", b"", "ä".encode()], np.object_)
    np.testing.assert_array_equal(arrays(ask(backend, spec, INPUT0=texts))["OUTPUT0"], texts)
    backend, spec = load("workers/noop")
    assert arrays(ask(backend, spec, INPUT0=X))["OUTPUT0"].tolist() == [0.0]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = 1", "neither a class TritonPythonModel nor a class Model"),
        ("class Model: pass", "has no method infer"),
        ("class TritonPythonModel: pass", "has no execute"),
        ("import no_such_module_xyz", "No module named 'no_such_module_xyz'"),
        ("raise ValueError('see /etc/passwd')", "see <path>"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def (", "invalid syntax"),
        (
            "class Model:\n  def __init__(self, c): raise KeyError('k')\n  def infer(self, r): 0",
            "KeyErr",
        ),
        (
            "class TritonPythonModel:\n  def initialize(self, a): 1/0\n  def execute(self, r): 0",
            "zero",
        ),
    ],
)
def test_models_that_do_not_load(make: Make, code: str, reason: str) -> None:
    with pytest.raises(ShmserveError, match=reason) as caught:
        load(make(code))
    assert "/" not in caught.value.message


def test_no_inputs_and_no_auto_complete(make: Make) -> None:
    for name, code in (("a", native("pass")), ("b", triton("pass"))):
        with pytest.raises(ConfigError, match="input and output"):
            load(make(code, 'backend: "python"', name))


def test_native_cannot_be_decoupled(make: Make) -> None:
    with pytest.raises(ConfigError, match="decoupled"):
        load(make(native("pass"), CONFIG + "model_transaction_policy { decoupled: true }"))


def test_files_beside_the_model_can_be_imported(make: Make) -> None:
    directory = make("from helper_of_m import VALUE\n" + native("return {'Y': np.full(2, VALUE)}"))
    (Path(directory) / "1" / "helper_of_m.py").write_text("import numpy\nVALUE = numpy.float32(7)")
    backend, spec = load(directory)
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [7, 7]


def test_two_models_do_not_share_a_module(make: Make) -> None:
    one = load(make(native("return {'Y': np.zeros(1, np.float32)}"), name="one"))
    two = load(make(native("return {'Y': np.ones(1, np.float32)}"), name="two"))
    assert arrays(ask(*one, ("Y",), X=X))["Y"][0] == 0
    assert arrays(ask(*two, ("Y",), X=X))["Y"][0] == 1


def test_an_unknown_backend(make: Make) -> None:
    _, spec = load("workers/identity")
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    with pytest.raises(ConfigError, match="backend 'other'"):
        create(type(spec)(**{**fields, "backend": "other"}))


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
    request = FakeRequest(("S",), X=X)
    got = arrays(backend.execute([request])[0])
    assert request.offered == {}
    assert got["S"].dtype == object
    assert got["S"].tolist() == [b"a", b"b"]


def test_a_returned_input_is_passed_through(make: Make) -> None:
    backend, _spec = load(make(native("return {'Y': request.input('X')}")))
    request = FakeRequest(("Y",), X=X)
    got = arrays(backend.execute([request])[0])
    assert np.shares_memory(got["Y"], request.inputs["X"].memory)


def test_offered_array_may_be_returned_too(make: Make) -> None:
    backend, spec = load(make(native("y = request.output('Y', (1,)); y[0] = 3; return {'Y': y}")))
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [3]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return None", "gave no output 'Y'"),
        ("return [1]", "None or a dict, got list"),
        ("return {'Z': np.zeros(1, np.float32)}", "unknown output 'Z'"),
        ("return {'Y': [1.0]}", "must be a numpy array, got list"),
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


def test_model_errors_show_no_inside(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    code = native("raise ValueError(f'bad /etc/shadow in {__file__} at 0x7f00deadbeef\\nmore')")
    backend, spec = load(make(code))
    with caplog.at_level(logging.ERROR):
        error = failure(ask(backend, spec, ("Y",), X=X))
    assert isinstance(error, ModelFailure)
    assert error.code is Code.INTERNAL
    assert error.message == "bad <path> in <path> at <address> more"
    assert "Traceback" in caplog.text
    code = native("from shmserve.errors import InvalidArgument; raise InvalidArgument('mine')")
    backend, spec = load(make(code, name="n"))
    assert failure(ask(backend, spec, ("Y",), X=X)).code is Code.INVALID_ARGUMENT
    code = native("raise SystemExit(4)")
    backend, spec = load(make(code, name="o"))
    assert failure(ask(backend, spec, ("Y",), X=X)).message == "SystemExit: 4"


def test_sanitised_texts() -> None:
    assert sanitised("and/or 3 / 4 = N/A; 2.5/s") == "and/or 3 / 4 = N/A; 2.5/s"
    assert sanitised("open ~/x, ./y/z.txt and ../w") == "open <path>, <path> and <path>"
    assert sanitised("'/a/b.py', line 3 (core/session.cc:12)") == "'<path>', line 3 (core/<file>)"
    assert sanitised(r"C:\secret\x.txt failed") == "<path> failed"
    assert sanitised("a\tb\x00c\n\nd") == "a b c d"
    assert len(sanitised("x" * 10**6)) == MAX_TEXT
    trace = 'Traceback (most recent call last):\n  File "/a.py", line 1\nValueError: last'
    assert sanitised(trace) == "ValueError: last"
    assert sanitised("mask 0xff") == "mask 0xff"
    assert describe(MemoryError()) == "MemoryError"
    assert describe(KeyError("k")) == "KeyError: 'k'"

    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe(Broken()) == "Broken"


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
        ("requests[0].get_response_sender()", "only decoupled models"),
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


def test_decoupled_models_load_but_need_a_stream(make: Make) -> None:
    backend, spec = load(
        make(triton("return None"), CONFIG + "model_transaction_policy { decoupled: true }")
    )
    assert spec.decoupled
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
