"""ModelInfer over a real channel: tensors, parameters, errors, receipts."""

import json
import logging
import re
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.core.caller import Caller
from shmserve.core.live_settings import TraceSettings
from shmserve.core.registry import ModelState
from shmserve.dispatch.outcome import Outcome
from shmserve.errors import Code, ModelFailure
from shmserve.observe.logs import ACCESS_GRPC, JSON, _Line
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES
from tests import fake_models
from tests.fake_dispatch import FakeDispatcher
from tests.grpc_client import VALUES, Rig, put, request, tensor
from tests.log_lines import log_lines
from tests.running_server import wait_until

OUTPUT = pb.ModelInferRequest.InferRequestedOutputTensor


@pytest.fixture(scope="module")
def rig():
    with Rig() as rig:
        yield rig
        wait_until(lambda: all(call.closed == 1 for call in rig.dispatcher.calls), "all are")


def values(answer: pb.ModelInferResponse, index: int = 0) -> list[float]:
    return np.frombuffer(answer.raw_output_contents[index], np.float32).tolist()


def test_raw_tensors_there_and_back(rig: Rig) -> None:
    answer = rig.client.infer(request(id="7"))
    assert (answer.model_name, answer.model_version, answer.id) == ("identity", "1", "7")
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("OUTPUT0", "FP32", [4])
    assert not output.HasField("contents")
    assert values(answer) == VALUES.tolist()
    receipt = rig.dispatcher.calls[-1].receipt
    assert (receipt.copied_in, receipt.copied_out) == (16, 16)


@pytest.mark.parametrize("name", sorted(DATATYPES))
def test_every_datatype_raw(name: str) -> None:
    model = (fake_models.spec("m", name, (-1,)), fake_models.identity)
    kind = DATATYPES[name]
    data = np.arange(3).astype(kind.numpy).tobytes() if kind.itemsize else b""
    data = data or bytes_codec.encode([b"a", b"", b"xyz"])
    message = pb.ModelInferRequest(
        model_name="m", inputs=[tensor(np.zeros(3), datatype=name)], raw_input_contents=[data]
    )
    with Rig(FakeDispatcher([model])) as rig:
        answer = rig.client.infer(message)
    assert answer.raw_output_contents == [data]
    assert answer.outputs[0].datatype == name


@pytest.mark.parametrize(
    ("name", "field", "elements"),
    [
        ("BOOL", "bool_contents", [True, False, True]),
        ("INT8", "int_contents", [-1, 0, 5]),
        ("INT16", "int_contents", [-300, 0, 5]),
        ("INT32", "int_contents", [-70000, 0, 5]),
        ("INT64", "int64_contents", [-(1 << 40), 0, 5]),
        ("UINT8", "uint_contents", [255, 0, 5]),
        ("UINT16", "uint_contents", [60000, 0, 5]),
        ("UINT32", "uint_contents", [1 << 31, 0, 5]),
        ("UINT64", "uint64_contents", [1 << 63, 0, 5]),
        ("FP32", "fp32_contents", [1.5, -2, 0]),
        ("FP64", "fp64_contents", [1.5, -2, 0]),
        ("BYTES", "bytes_contents", [b"a", b"", b"xyz"]),
    ],
)
def test_every_typed_contents(name: str, field: str, elements: list[Any]) -> None:
    source = tensor(np.zeros(3), datatype=name)
    getattr(source.contents, field).extend(elements)
    model = (fake_models.spec("m", name, (-1,)), fake_models.identity)
    with Rig(FakeDispatcher([model])) as rig:
        answer = rig.client.infer(pb.ModelInferRequest(model_name="m", inputs=[source]))
    kind = DATATYPES[name]
    encode = (lambda e: np.array(e, kind.numpy).tobytes()) if kind.itemsize else bytes_codec.encode
    assert answer.raw_output_contents == [encode(elements)]


def test_requested_outputs_and_their_order(rig: Rig) -> None:
    message = pb.ModelInferRequest(
        model_name="add_sub",
        inputs=[tensor(np.zeros(16), name, "INT32") for name in ("INPUT0", "INPUT1")],
        outputs=[OUTPUT(name="OUTPUT1")],
        raw_input_contents=[np.full(16, n, np.int32).tobytes() for n in (5, 2)],
    )
    answer = rig.client.infer(message)
    assert [output.name for output in answer.outputs] == ["OUTPUT1"]
    assert np.frombuffer(answer.raw_output_contents[0], np.int32).tolist() == [3] * 16
    assert rig.dispatcher.calls[-1].request.requested == ("OUTPUT1",)


def test_classification(rig: Rig) -> None:
    message = request()
    message.outputs.append(OUTPUT(name="OUTPUT0"))
    message.outputs[0].parameters["classification"].int64_param = 2
    answer = rig.client.infer(message)
    (output,) = answer.outputs
    assert (output.datatype, list(output.shape)) == ("BYTES", [2])
    found = bytes_codec.decode(answer.raw_output_contents[0], 2, "", "")
    assert found == [b"4.500000:3", b"3.000000:2"]


def test_parameters_go_to_the_model_and_come_from_it() -> None:
    def tell(given: Any) -> Outcome:
        outcome = fake_models.identity(given)
        return Outcome(outcome.outputs, {"seen": str(sorted(given.parameters)), "n": 3})

    given: dict[str, Any] = {"custom": "x", "half": 0.5, "flag": True, "sequence_id": "s"}
    given |= {"priority": np.uint64(3), "timeout": 1000}
    ours: Any = {"binary_data_output": False, "triton_enable_empty_final_response": True}
    model = (fake_models.spec("identity", "FP32", (-1,)), tell)
    with Rig(FakeDispatcher([model])) as rig:
        answer = rig.client.infer(request(**given, **ours))
        parameters = rig.dispatcher.calls[-1].request.parameters
    assert parameters == given
    assert type(parameters["priority"]) is int  # a type that can be sent on
    assert answer.parameters["n"].int64_param == 3
    assert answer.parameters["seen"].string_param == str(sorted(parameters))


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"triton_x": 1}, "are allowed: triton_enable_empty_final_response"),
        ({"priority": "a"}, "'priority' parameter, expected int64_param or uint64_param"),
        ({"priority": -1}, "'priority'"),
        ({"timeout": np.uint64(5)}, "'timeout' parameter, expected int64_param"),
        ({"timeout": True}, "'timeout'"),
        ({"sequence_start": 1}, "'sequence_start' parameter, expected bool_param"),
        ({"sequence_id": 1.5}, "'sequence_id' parameter, expected int64_param or string_param"),
        ({"custom": np.uint64(1)}, "'custom' parameter"),
        ({"triton_enable_empty_final_response": 1}, "expected bool_param"),
    ],
)
def test_parameters_of_a_wrong_kind(rig: Rig, parameters: dict[str, Any], told: str) -> None:
    code, details = rig.client.error("ModelInfer", request(**parameters))
    assert code == "INVALID_ARGUMENT"
    assert told in details


def with_contents() -> pb.ModelInferRequest:
    message = request()
    message.inputs[0].contents.fp32_contents.extend(VALUES.tolist())
    return message


def without_data() -> pb.ModelInferRequest:
    message = request()
    del message.raw_input_contents[:]
    return message


def shaped(*shape: int) -> pb.ModelInferRequest:
    message = request()
    message.inputs[0].shape[:] = shape
    return message


def twice() -> pb.ModelInferRequest:
    message = request()
    message.inputs.append(message.inputs[0])
    message.raw_input_contents.append(message.raw_input_contents[0])
    return message


@pytest.mark.parametrize(
    ("message", "code", "told"),
    [
        (b"\x0a\xff", "INVALID_ARGUMENT", ""),
        (b"", "NOT_FOUND", "unknown model"),
        (request(model="nosuch"), "NOT_FOUND", "Request for unknown model: 'nosuch'"),
        (request(model="decoupled"), "UNIMPLEMENTED", "ModelInfer RPC doesn't support"),
        (with_contents(), "INVALID_ARGUMENT", "contents field must not be specified"),
        (without_data(), "INVALID_ARGUMENT", "unable to find data for input tensor 'INPUT0'"),
        (shaped(-1), "INVALID_ARGUMENT", "inputs[0].shape"),
        (shaped(3), "INVALID_ARGUMENT", "[request id: <id_unknown>] input byte size mismatch"),
        (shaped(2, 2), "INVALID_ARGUMENT", "unexpected shape for input 'INPUT0'"),
        (twice(), "INVALID_ARGUMENT", "input 'INPUT0' already exists"),
    ],
)
def test_bad_requests(rig: Rig, message: Any, code: str, told: str) -> None:
    found = rig.client.error("ModelInfer", message)
    assert found[0] == code
    assert told in found[1]


@pytest.mark.parametrize("version", ["2", "abc", "-1", "0"])
def test_versions(rig: Rig, version: str) -> None:
    message = request()
    message.model_version = version
    code = "NOT_FOUND" if version == "2" else "INVALID_ARGUMENT"
    assert rig.client.error("ModelInfer", message)[0] == code
    message.model_version = "1"
    assert rig.client.infer(message).model_version == "1"


@pytest.mark.parametrize("where", ["inputs", "outputs"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"shared_memory_region": "r"},
        {"shared_memory_byte_size": 16},
        {"shared_memory_offset": 0},
        {"shared_memory_region": 5, "shared_memory_byte_size": 16},
        {"shared_memory_region": "r", "shared_memory_byte_size": "16"},
        {"shared_memory_region": "r", "shared_memory_byte_size": -16},
        {"shared_memory_region": "r", "shared_memory_byte_size": 16, "shared_memory_offset": 1.0},
        {"shared_memory_region": "r", "shared_memory_byte_size": np.uint64(16)},
    ],
)
def test_bad_windows_of_regions(rig: Rig, where: str, parameters: dict[str, Any]) -> None:
    message = request()
    message.outputs.append(OUTPUT(name="OUTPUT0"))
    put(getattr(message, where)[0].parameters, parameters)
    if where == "inputs" and "shared_memory_region" in parameters:
        del message.raw_input_contents[:]
    code, details = rig.client.error("ModelInfer", message)
    assert code == "INVALID_ARGUMENT"
    assert f"{where}[0].parameters" in details


def test_regions_in_and_out(rig: Rig) -> None:
    rig.dispatcher.coordinator.register_region(Caller(1000), "r", "/k", 0, 4096)
    message = pb.ModelInferRequest(
        model_name="identity",
        inputs=[tensor(VALUES, shared_memory_region="r", shared_memory_byte_size=16)],
        outputs=[OUTPUT(name="OUTPUT0")],
    )
    window = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    put(message.outputs[0].parameters, window | {"shared_memory_offset": 64})
    answer = rig.client.infer(message)
    call = rig.dispatcher.calls[-1]
    assert answer.raw_output_contents == [b""]  # still an entry for each output
    assert list(answer.outputs[0].shape) == [4]
    assert (call.receipt.copied_in, call.receipt.copied_out, call.reserved) == (0, 0, [])
    assert [(place.name, place.at.offset) for place in call.options.places] == [("OUTPUT0", 64)]
    with Rig(rig.dispatcher, uid=1001) as stranger:
        assert stranger.client.error("ModelInfer", message)[0] == "NOT_FOUND"


def test_a_receipt_for_those_who_ask(rig: Rig) -> None:
    infer = rig.client.method("ModelInfer")
    _, plain = infer.with_call(request())
    assert "shmserve-receipt" not in dict(plain.trailing_metadata())
    _, call = infer.with_call(request(), metadata=(("shmserve-receipt", "1"),))
    told = json.loads(dict(call.trailing_metadata())["shmserve-receipt"])
    assert told["copied_bytes"] == {"in": 16, "batch": 0, "out": 16, "device": 0}
    assert all(told["ns"][stage] > 0 for stage in ("receive", "send"))


def test_failures_of_models(rig: Rig, caplog) -> None:
    def fail(kind: int) -> tuple[str, str]:
        return rig.client.error("ModelInfer", request(np.float32([kind]), "failing"))  # type: ignore[arg-type]

    assert fail(1) == ("INTERNAL", "ValueError: boom raised")
    assert fail(2) == ("INVALID_ARGUMENT", "boom returned")
    assert rig.client.infer(request(np.float32([3]), "failing")).outputs == []  # type: ignore[arg-type]
    with caplog.at_level(logging.CRITICAL):
        assert fail(5) == ("INTERNAL", "internal server error")  # a defect of ours
    lacking = "the server ran out of memory while it had the request"
    assert fail(6) == ("ABORTED", lacking)


def test_a_failure_is_one_line_with_an_id_that_the_client_has(rig: Rig, caplog) -> None:
    infer = rig.client.method("ModelInfer")
    message = request(np.float32([1]), "failing")  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError) as caught:
        infer(message, metadata=(("x-request-id", "mine-7"),))
    assert dict(caught.value.trailing_metadata())["x-request-id"] == "mine-7"
    line = "ModelInfer failed status=500 request=mine-7 error=ValueError: boom raised"
    assert [text for text in log_lines(caplog) if "mine-7" in text] == [line]
    with pytest.raises(grpc.RpcError) as caught:
        infer(message)
    made = dict(caught.value.trailing_metadata())["x-request-id"]
    assert f"request={made} " in log_lines(caplog)[-1]
    brought = (("x-request-id", "mine-8"), ("shmserve-receipt", "1"))
    _, call = infer.with_call(request(), metadata=brought)
    assert dict(call.trailing_metadata())["x-request-id"] == "mine-8"
    assert "shmserve-receipt" in dict(call.trailing_metadata())
    _, call = infer.with_call(request(), metadata=brought[:1])
    assert dict(call.trailing_metadata()) == {"x-request-id": "mine-8"}
    _, call = infer.with_call(request(), metadata=(("sec-fetch-site", "same-origin"), brought[0]))
    assert dict(call.trailing_metadata()) == {"x-request-id": "mine-8"}


def test_each_call_is_a_line_where_that_is_wanted(caplog) -> None:
    caplog.set_level("INFO", ACCESS_GRPC)
    with Rig(access_log=True) as rig:
        rig.client.infer(request())
        rig.client.error("ModelInfer", request(np.float32([1]), "failing"))  # type: ignore[arg-type]
        list(rig.client.stream([request()] * 3))
        said = [r.getMessage() for r in caplog.records if r.name == ACCESS_GRPC]
    assert '"ModelInfer" OK ' in said[0]
    assert '"ModelInfer" failed ' in said[1]
    assert re.search(r'"ModelStreamInfer" OK [1-9]\d* in 3 \d+ms', said[2])
    assert len(said) == 3


def test_the_line_of_a_call_has_fields_where_lines_are_objects(caplog) -> None:
    caplog.set_level("INFO", ACCESS_GRPC)
    with Rig(access_log=True) as rig:
        named = [("x-request-id", "mine-7")]
        rig.client.infer(request(), metadata=named)
        rig.client.error("ModelInfer", request(model="nobody"))
        list(rig.client.stream([request()] * 3))
        records = [r for r in caplog.records if r.name == ACCESS_GRPC]
    lines = [json.loads(_Line("me", JSON).format(record)) for record in records]
    service = "/inference.GRPCInferenceService"
    told = [[line[key] for key in ("method", "path", "status")] for line in lines]
    assert told == [
        ["ModelInfer", f"{service}/ModelInfer", "OK"],
        ["ModelInfer", f"{service}/ModelInfer", "NOT_FOUND"],
        ["ModelStreamInfer", f"{service}/ModelStreamInfer", "OK"],
    ]
    assert [line["bytes"] > 0 for line in lines] == [True, False, True]
    assert all(line["duration_ms"] > 0 for line in lines)
    assert all(line["client"] in line["message"] for line in lines)
    assert [line.get("answers") for line in lines] == [None, None, 3]
    assert (lines[0]["request"], len(lines[1]["request"])) == ("mine-7", 16)
    assert "request" not in lines[2]
    assert "path=" not in _Line("me").format(records[0])


def test_what_a_call_is_part_of_is_asked_for_where_it_is_traced() -> None:
    with Rig() as rig:
        parent = [("traceparent", "00-1-2-01"), ("x-bin", b"\0")]
        rig.client.infer(request(), metadata=parent)
        entries = rig.dispatcher.entries["identity"]
        for version, entry in entries.items():
            entries[version] = replace(entry, trace=TraceSettings(on=True))
        rig.client.infer(request(), metadata=parent)
        list(rig.client.stream([request()], metadata=parent))
        rig.client.infer(request())
        found = [call.options.traceparent for call in rig.dispatcher.calls]
    assert found == ["", "00-1-2-01", "00-1-2-01", ""]


def test_long_details_reach_the_client() -> None:
    def fail(_: Any) -> Outcome:
        raise ModelFailure("ü" * 100_000, Code.INVALID_ARGUMENT)

    with Rig(FakeDispatcher([(fake_models.spec("identity", "FP32", (-1,)), fail)])) as rig:
        code, details = rig.client.error("ModelInfer", request())
    assert code == "INVALID_ARGUMENT"  # instead of an error about too much trailing metadata
    assert details.startswith("üüü")
    assert details.endswith("...")


def test_models_that_are_not_ready_and_pools_that_are_full(rig: Rig) -> None:
    spec = fake_models.spec("loading", "FP32", (-1,))
    rig.dispatcher.put(spec, ModelState.LOADING)
    assert rig.client.error("ModelInfer", request(model="loading"))[0] == "UNAVAILABLE"
    rig.dispatcher.budget = 8
    try:
        assert rig.client.error("ModelInfer", request())[0] == "RESOURCE_EXHAUSTED"
    finally:
        rig.dispatcher.budget = None
    assert rig.dispatcher.calls[-1].closed == 1


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests(rig: Rig, compression: grpc.Compression) -> None:
    array = np.zeros(100_000, np.float32)
    assert values(rig.client.infer(request(array), compression=compression)) == array.tolist()


def test_compressed_answers() -> None:
    array = np.zeros(100_000, np.float32)
    with Rig(grpc_compression="gzip") as rig:
        assert values(rig.client.infer(request(array))) == array.tolist()


def test_messages_have_a_limit() -> None:
    with Rig(max_request_bytes=1000) as rig:
        code, details = rig.client.error("ModelInfer", request(np.zeros(1000, np.float32)))
        assert code == "RESOURCE_EXHAUSTED"
        assert "larger than max" in details
        assert rig.client.infer().outputs


def test_the_clients_deadline_is_the_calls() -> None:
    dispatcher = fake_models.dispatcher()
    given: list[float | None] = []
    call = dispatcher.call
    dispatcher.call = lambda entry, options, _: (  # type: ignore[assignment, method-assign, misc]
        given.append(options.timeout_s) or call(entry, options)
    )
    with Rig(dispatcher, request_timeout_s=60) as rig:
        rig.client.infer(timeout=40)
        rig.client.infer(timeout=500)
    assert 0 < given[0] < 45  # gRPC rounds timeouts before sending
    assert given[1] == 60
