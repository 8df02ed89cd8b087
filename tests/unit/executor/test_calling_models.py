"""Models of both dialects that call other models, and the answers they get."""

from __future__ import annotations

import numpy as np
import pytest

from shmserve.errors import Code, DeadlineExceeded, ModelFailure, NotFound, Unavailable
from shmserve.executor.calling import CallAnswer
from tests.backend_runner import FakeBackendRequest, arrays, ask, ask_stream, failure
from tests.backend_runner import load as load_model
from tests.model_files import X_TO_Y, Make, native, triton
from tests.unit.executor.called_models import FakeOtherModels, answer

X = np.arange(4, dtype=np.float32)
DECOUPLED = X_TO_Y + "\nmodel_transaction_policy { decoupled: true }"
MADE = """
made = pb.InferenceRequest(
    model_name="other", model_version=2, request_id="7", correlation_id=3, timeout=5, flags=1,
    inputs=[pb.Tensor("A", np.float32([1])), pb.Tensor("B", np.array([b"x", "y", 5], object))],
    requested_output_names=["Y"],
    preferred_memory=pb.PreferredMemory(pb.TRITONSERVER_MEMORY_CPU, 0),
    trace=requests[0].trace(), parameters={"k": "v"},
)
"""
PASS_ON = "return [pb.InferenceResponse([pb.get_output_tensor_by_name(got, 'Y')])]"
CALLS = {
    "exec": "got = made.exec()",
    "decoupled": "[got] = made.exec(decoupled=True)",
    "async": "import asyncio; got = asyncio.run(made.async_exec())",
}


def test_names_may_be_bytes(make: Make) -> None:
    models = FakeOtherModels(answer(7, 8))
    body = """
made = pb.InferenceRequest(
    request_id=b"7", model_name=np.array([b"other"], object)[0], requested_output_names=[b"Y"],
    inputs=requests[0].inputs(),
)
try:
    pb.InferenceRequest(model_name=b"\xff", inputs=[], requested_output_names=[])
except TypeError as ex:
    assert "is no UTF-8" in str(ex)
else:
    raise AssertionError
got = made.exec()
"""
    backend, _ = load_model(make(triton(body.replace("\xff", "\\xff") + PASS_ON)), models=models)
    assert arrays(backend.execute([FakeBackendRequest(("Y",), X=X)])[0])["Y"].tolist() == [7, 8]
    [asked] = models.asked
    assert (asked.model, asked.id, asked.outputs) == ("other", "7", ("Y",))


@pytest.mark.parametrize("way", CALLS)
def test_a_triton_model_calls_another(make: Make, way: str) -> None:
    models = FakeOtherModels(answer(7, 8))
    checks = """
assert made.request_id() == "7" and made.correlation_id() == 3 and made.timeout() == 5
assert made.flags() == 1 and made.requested_output_names() == {"Y"}
assert made.parameters() == '{"k":"v"}' and made.inputs()[0].name() == "A"
made.set_flags(2)
assert made.flags() == 2 and made.model_name() == "other" and made.model_version() == 2
"""
    body = MADE + checks + CALLS[way] + "\nassert not got.has_error()\n" + PASS_ON
    backend, _ = load_model(make(triton(body)), models=models)
    request = FakeBackendRequest(("Y",), X=X)
    assert arrays(backend.execute([request])[0])["Y"].tolist() == [7, 8]
    [asked] = models.asked
    assert (asked.model, asked.version, asked.id, asked.outputs) == ("other", "2", "7", ("Y",))
    assert asked.parameters == {"k": "v", "sequence_id": 3, "timeout": 5, "sequence_end": True}
    assert asked.stream == (way == "decoupled")
    first, second = asked.inputs
    assert (first.name, first.datatype, first.array.tolist()) == ("A", "FP32", [1])
    assert (second.name, second.datatype) == ("B", "BYTES")
    assert second.array.tolist() == [b"x", "y", "5"]
    assert list(models.calling[0]) == [request]
    assert models.settled


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFound("no such model"), 2),
        (ModelFailure("its own", Code.INTERNAL), 1),
        (Unavailable("not now"), 4),
        (DeadlineExceeded("too late"), 4),
        (ModelFailure("cancelled", Code.CANCELLED), 7),
    ],
)
def test_an_error_is_the_responses(make: Make, way: str, error: NotFound, code: int) -> None:
    body = MADE + CALLS[way] + "\n"
    body += "assert got.has_error() and got.output_tensors() == []\n"
    body += f"assert got.error().code() == {code}, got.error().code()\n"
    body += "raise pb.TritonModelException(got.error().message())"
    backend, spec = load_model(make(triton(body)), models=FakeOtherModels(error))
    assert error.message in failure(ask(backend, spec, ("Y",), X=X)).message


def test_calls_are_made_in_initialize_and_finalize(make: Make) -> None:
    models = FakeOtherModels(answer(1))
    more = """
    def initialize(self, args):
        self.first = self.call("first")
    def finalize(self):
        self.call("last")
    def call(self, model):
        y = pb.InferenceRequest(model_name=model, inputs=[], requested_output_names=["Y"]).exec()
        return pb.get_output_tensor_by_name(y, "Y")
"""
    backend, spec = load_model(
        make(triton("return [pb.InferenceResponse([self.first])]", more)), models=models
    )
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [1]
    backend.close()
    assert [call.model for call in models.asked] == ["first", "last"]


@pytest.mark.parametrize("way", ["for _ in got: pass", "next(got)"])
def test_the_responses_of_a_call_can_be_read_once(make: Make, way: str) -> None:
    body = (
        MADE
        + f"""
got = made.exec(decoupled=True)
{way}
assert list(got) == []
return [pb.InferenceResponse([pb.Tensor("Y", np.float32([0]))])]
"""
    )
    backend, spec = load_model(make(triton(body)), models=FakeOtherModels(answer(1)))
    arrays(ask(backend, spec, ("Y",), X=X))


def test_a_decoupled_call_has_all_responses_in_order(make: Make) -> None:
    failed = CallAnswer(error=ModelFailure("one is bad"))
    models = FakeOtherModels(answer(1), failed, answer(2), ModelFailure("and that is all"))
    body = (
        MADE
        + """
got = [r.error().message() if r.has_error() else r.output_tensors()[0].as_numpy().tolist()
       for r in made.exec(decoupled=True)]
assert got == [[1.0], "one is bad", [2.0], "and that is all"], got
return [pb.InferenceResponse([pb.Tensor("Y", np.float32([0]))])]
"""
    )
    backend, spec = load_model(make(triton(body)), models=models)
    arrays(ask(backend, spec, ("Y",), X=X))


@pytest.mark.parametrize(
    ("leave", "ends"),
    [("del got", ["abandoned"]), ("got.cancel(); del got", ["cancelled", "abandoned"])],
)
def test_a_decoupled_call_that_is_left_ends(make: Make, leave: str, ends: list[str]) -> None:
    models = FakeOtherModels(answer(1), answer(2))
    body = MADE + "got = made.exec(decoupled=True)\nnext(got)\n" + leave
    backend, spec = load_model(make(triton(body)), models=models)
    ask(backend, spec, ("Y",), X=X)
    assert models.calls[0].ends == ends


def test_an_asynchronous_model_calls_several(make: Make) -> None:
    code = """
import asyncio
import numpy as np
import triton_python_backend_utils as pb
class TritonPythonModel:
    async def execute(self, requests):
        def made():
            return pb.InferenceRequest(
                model_name="other", inputs=requests[0].inputs(), requested_output_names=[]
            )
        got = await asyncio.gather(made().async_exec(), made().async_exec())
        values = [r.output_tensors()[0].as_numpy() for r in got]
        async for response in await made().async_exec(decoupled=True):
            values.append(response.output_tensors()[0].as_numpy())
        for responses in await asyncio.gather(made().async_exec(decoupled=True)):
            for response in responses:
                values.append(response.output_tensors()[0].as_numpy())
        sender = requests[0].get_response_sender()
        sender.send(pb.InferenceResponse([pb.Tensor("Y", np.concatenate(values))]), flags=1)
"""
    models = FakeOtherModels(answer(5))
    backend, spec = load_model(make(code, DECOUPLED), models=models)
    responses = ask_stream(backend, spec, X=X)
    assert responses.ended.wait(30)
    assert not responses.errors
    assert arrays(responses.sent[0])["Y"].tolist() == [5, 5, 5, 5]
    assert all(len(calling) == 1 for calling in models.calling)


def test_a_stream_that_was_awaited_has_its_first_response(make: Make) -> None:
    body = """
got = asyncio.run(made.async_exec(decoupled=True))
y = np.concatenate([r.output_tensors()[0].as_numpy() for r in got])
return [pb.InferenceResponse([pb.Tensor("Y", y)])]
"""
    models = FakeOtherModels(answer(1), answer(2))
    code = "import asyncio\n" + triton(MADE + body)
    backend, spec = load_model(make(code), models=models)
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [1, 2]
    assert models.calls[0].awaited == 1


def test_writable_inputs_are_those_of_responses_too(make: Make) -> None:
    lent = answer(1)
    lent.outputs[0].array.flags.writeable = False
    body = MADE + "got = made.exec()\ngot.output_tensors()[0].as_numpy()[0] = 9\n" + PASS_ON
    config = X_TO_Y + '\nparameters { key: "writable_inputs" value { string_value: "true" } }'
    backend, spec = load_model(make(triton(body), config), models=FakeOtherModels(lent))
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [9]
    assert lent.outputs[0].array.tolist() == [1]


def test_a_triton_model_manages_models(make: Make) -> None:
    body = """
    assert not pb.is_model_ready("other")
    pb.load_model("other", config="{}", files={"file:1/model.py": b"code"})
    assert pb.is_model_ready("other") and pb.is_model_ready("other", "1")
    assert not pb.is_model_ready(model_name="other", model_version="2")
    pb.load_model(model_name="more")
    pb.unload_model("more")
    for wrong in lambda: pb.load_model(""), lambda: pb.unload_model("more"):
        try:
            wrong()
        except pb.TritonModelException:
            continue
        assert False
    return [pb.InferenceResponse([pb.Tensor("Y", np.float32([0]))])]
    """
    models = FakeOtherModels()
    backend, spec = load_model(make(triton(body)), models=models)
    arrays(ask(backend, spec, ("Y",), X=X))
    assert models.loaded == {"other": {"config": "{}", "file:1/model.py": b"code"}}


# ------------------------------------------------------------------------ native


def test_a_native_model_calls_another(make: Make) -> None:
    body = """
    got = request.call(
        "other", {"A": request.input("X"), "B": np.array([b"x"], object)},
        outputs=("Y",), version=2, parameters={"k": "v"}, timeout_s=3,
    )
    return {"Y": got["Y"] + 1}
    """
    models = FakeOtherModels(answer(7, 8))
    backend, _ = load_model(make(native(body)), models=models)
    request = FakeBackendRequest(("Y",), X=X)
    assert arrays(backend.execute([request])[0])["Y"].tolist() == [8, 9]
    [asked] = models.asked
    assert (asked.model, asked.version, asked.outputs) == ("other", "2", ("Y",))
    assert (asked.parameters, asked.timeout_s, asked.stream) == ({"k": "v"}, 3, False)
    assert [(t.name, t.datatype) for t in asked.inputs] == [("A", "FP32"), ("B", "BYTES")]
    assert np.shares_memory(asked.inputs[0].array, request.inputs["X"].memory)
    assert models.calling == [[request]]


def test_a_native_model_calls_for_a_stream(make: Make) -> None:
    body = """
    values = [got["Y"][0] for got in request.call_stream("other", {"A": request.input("X")})]
    return {"Y": np.float32(values)}
    """
    models = FakeOtherModels(answer(1), answer(2))
    backend, spec = load_model(make(native(body)), models=models)
    assert arrays(ask(backend, spec, ("Y",), X=X))["Y"].tolist() == [1, 2]
    assert models.asked[0].stream
    assert models.calls[0].ends == ["abandoned"]


@pytest.mark.parametrize("call", ["request.call", "list(request.call_stream"])
def test_a_called_models_error_is_the_answer_unless_it_is_caught(make: Make, call: str) -> None:
    end = ")" if call.startswith("list") else ""
    body = call + "('other', {'A': request.input('X')})" + end
    models = FakeOtherModels(ModelFailure("no luck", Code.UNAVAILABLE))
    backend, spec = load_model(make(native(body)), models=models)
    error = failure(ask(backend, spec, ("Y",), X=X))
    assert (error.code, error.message) == (Code.UNAVAILABLE, "no luck")
    # frames would keep views of the inputs
    assert error.__traceback__ is error.__context__ is error.__cause__ is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [("5", "must be an array, got int"), ("np.zeros(1, complex)", "no datatype for complex128")],
)
def test_native_inputs_must_be_arrays(make: Make, value: str, reason: str) -> None:
    body = "return request.call('other', {'A': " + value + "})"
    backend, spec = load_model(make(native(body)), models=FakeOtherModels())
    assert "input 'A' for model 'other'" in failure(ask(backend, spec, ("Y",), X=X)).message
    assert reason in failure(ask(backend, spec, ("Y",), X=X)).message
