"""ModelInfer messages: pairing of raw parts, refusals and errors, copies."""

import mmap
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.errors import InvalidArgument
from shmserve.protocol import bounds
from shmserve.protocol.protobuf.infer_parameters import Uint64
from shmserve.protocol.protobuf.infer_wire import (
    check_data,
    encode_stream_response,
    parse_request,
    response_parts,
)
from shmserve.protocol.protobuf.wire import encode_field

MIB = 1 << 20


def request(
    inputs: str = "", raw: tuple[bytes, ...] = (), change: Callable[[Any], object] | None = None
) -> bytes:
    """A request to model m; each letter of `inputs` is one: r(egion), c(ontents), n(either)."""
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=raw)
    for index, kind in enumerate(inputs):
        tensor = message.inputs.add(name=f"IN{index}", datatype="FP32", shape=[1])
        if kind in "cR":
            tensor.contents.fp32_contents.append(1.0)
        if kind in "rR":
            tensor.parameters["shared_memory_region"].string_param = "region"
    if change is not None:
        change(message)
    return message.SerializeToString()


def test_raw_parts_go_to_the_inputs_outside_regions_in_order() -> None:
    parsed = parse_request(request("nrn", (b"abcd", b"efgh")))
    assert [source.raw for source in parsed.inputs] == [b"abcd", None, b"efgh"]
    check_data(parsed)


def test_raw_parts_that_come_before_the_inputs_are_paired_too() -> None:
    late = request("nn")
    parsed = parse_request(request("", (b"abcd", b"efgh")) + late)
    assert [source.raw for source in parsed.inputs] == [b"abcd", b"efgh"]


@pytest.mark.parametrize(
    ("inputs", "raw", "message"),
    [
        (
            "nc",
            (b"abcd",),
            "contents field must not be specified when using raw_input_contents for 'IN1' for"
            " model 'm'",
        ),
        ("cn", (), "unable to find data for input tensor 'IN1' for model 'm' in request."),
        ("nn", (b"abcd",), "unable to find data for input tensor 'IN1' for model 'm' in request."),
        (
            "cR",
            (),
            "unexpected 'content' provided when using shared memory for input tensor 'IN1' for"
            " model 'm'",
        ),
        (
            "nr",
            (b"abcd", b"efgh"),
            "raw_input_contents has 2 entries, but only 1 inputs take their data from it for"
            " model 'm'",
        ),
    ],
)
def test_data_in_no_way_or_in_two_is_refused(inputs, raw, message) -> None:
    parsed = parse_request(request(inputs, raw))
    with pytest.raises(InvalidArgument) as caught:
        check_data(parsed)
    assert caught.value.message == message


@pytest.mark.parametrize("inputs", ["", "c", "rc", "rr"])
def test_data_in_one_way_is_fine(inputs: str) -> None:
    check_data(parse_request(request(inputs)))


def test_only_the_kind_of_uint64_needs_a_type_of_its_own() -> None:
    def fill(message: Any) -> None:
        message.parameters["a"].int64_param = -7
        message.parameters["b"].uint64_param = 7
        message.parameters["c"].bool_param = False
        message.parameters["d"].double_param = 7.0
        message.parameters["e"].string_param = ""

    found = parse_request(request(change=fill)).parameters
    assert found == {"a": -7, "b": 7, "c": False, "d": 7.0, "e": ""}
    assert [type(found[key]) for key in "abcde"] == [int, Uint64, bool, float, str]


def test_a_parameter_without_a_value_is_refused() -> None:
    data = request(change=lambda message: message.parameters["k"].SetInParent())
    with pytest.raises(InvalidArgument, match="parameter 'k' has no value"):
        parse_request(data)


def test_values_of_one_entry_are_merged() -> None:
    value = encode_field(0x12, b"\x08\x01")
    data = encode_field(0x22, encode_field(0x0A, b"k") + value + encode_field(0x12, b""))
    assert pb.ModelInferRequest.FromString(data).parameters["k"].bool_param
    assert parse_request(data).parameters == {"k": True}


def _parameters(message: Any) -> None:
    for key in "abc":
        message.inputs[0].parameters[key].bool_param = True


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (request("ccc"), "more than 2 inputs"),
        (request("", (b"", b"", b"")), "more than 2 raw_input_contents"),
        (request("", (), lambda m: [m.outputs.add() for _ in "abc"]), "more than 2 outputs"),
        (request("c", (), _parameters), "more than 2 parameters"),
    ],
    ids=["inputs", "contents", "outputs", "parameters"],  # the order in a map differs each time
)
def test_more_than_max_inputs_of_anything_is_refused(data: bytes, what: str, monkeypatch) -> None:
    parse_request(data)
    monkeypatch.setattr(bounds, "MAX_INPUTS", 2)
    with pytest.raises(InvalidArgument, match=what):
        parse_request(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x58\x01" * 101,  # unknown fields
        b"\x5b" + b"\x58\x01" * 101 + b"\x5c",  # in a group
        request("c", (), lambda m: m.inputs[0].shape.extend([1] * 101)),
        request("c", (), lambda m: m.inputs[0].contents.bytes_contents.extend([b""] * 101)),
    ],
)
def test_more_than_max_fields_is_refused(data: bytes, monkeypatch) -> None:
    parse_request(data)
    monkeypatch.setattr(bounds, "MAX_FIELDS", 100)
    with pytest.raises(InvalidArgument, match="more than 100 fields"):
        parse_request(data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x0a\x05abc", "field 1 is truncated"),
        (b"\x0a", "it is truncated"),
        (b"\x58" + b"\x80" * 10 + b"\x01", "a varint of more than 10 bytes"),
        (b"\x0a\xff\xff\xff\xff\x1f", "a length of more than 32 bits"),
        (b"\x80\x80\x80\x80\x80\x00", "a tag of more than 32 bits"),
        (b"\x02\x00", "field number 0"),
        (b"\x5e", "unknown wire type 6"),
        (b"\x5b", "group 11 has no end"),
        (b"\x5c", "the end of group 11 has no start"),
        (b"\x5b\x64", "the end of group 12 has no start"),
        (b"\x5b" * 65 + b"\x5c" * 65, "more than 64 groups in each other"),
        (b"\x0a\x01\xff", "model_name is not valid UTF-8"),
        (b"\x2a\x03\x0a\x01\xff", "inputs.name is not valid UTF-8"),
        (b"\x2a\x02\x0a\x03\x5a\x01a", "field 1 is truncated"),  # longer than the enclosing field
        (b"\x2a\x04\x1a\x02\x80\x80", "it is truncated"),
        (b"\x2a\x05\x2a\x03\x12\x01\x80", "INT32 contents end within an element"),
        (b"\x2a\x06\x2a\x04\x32\x02ab", "FP32 contents end within an element"),
        (
            b"\x22\x08\x0a\x00\x12\x02\x08\x01\x18\x05",
            "a parameter's entry has the unknown field 3",
        ),
    ],
)
def test_malformed_bytes_are_refused_with_the_reason(data: bytes, problem: str) -> None:
    with pytest.raises(InvalidArgument, match="the request is not a valid protobuf message") as ex:
        parse_request(data)
    assert problem in ex.value.message


def _peak(action: Callable[[], object]) -> int:
    """Return the peak of bytes that `action` allocated."""
    tracemalloc.start()
    try:
        kept = action()
        return tracemalloc.get_traced_memory()[1] if kept is not None else -1
    finally:
        tracemalloc.stop()


def test_reading_a_request_copies_no_tensor() -> None:
    data = request("n", (bytes(16 * MIB),))
    assert 0 < _peak(lambda: parse_request(data)) < MIB
    raw = parse_request(data).inputs[0].raw
    assert raw.obj is data


@pytest.mark.parametrize("streamed", [False, True])
def test_writing_a_response_copies_a_tensor_once(streamed: bool) -> None:
    tensor = memoryview(bytearray(16 * MIB))
    answer: Any = ("m", "1", "", {}, [("OUT", "FP32", (4 * MIB,))], [tensor])

    def write() -> bytes:
        if streamed:
            return encode_stream_response("", response_parts(*answer))
        return b"".join(response_parts(*answer))

    assert 16 * MIB < _peak(write) < 17 * MIB


def test_a_response_no_grpc_message_can_hold_is_refused() -> None:
    refusal = (
        r"Response has byte size 21474836\d\d which exceeds gRPC's byte size limit 2147483647\."
    )
    rows = [("OUT", "BYTES", (1,))]
    with mmap.mmap(-1, 1 << 31) as big, memoryview(big) as tensor:
        parts = response_parts("m", "1", "", {}, rows, [tensor])
        with pytest.raises(InvalidArgument, match=refusal):
            encode_stream_response("", parts)
        parts.clear()


def test_outputs_in_regions_leave_their_raw_entry_empty() -> None:
    rows = [("A", "FP32", (1,)), ("B", "FP32", (1,))]
    data = b"".join(response_parts("m", "1", "7", {}, rows, [b"", memoryview(b"abcd")]))
    assert list(pb.ModelInferResponse.FromString(data).raw_output_contents) == [b"", b"abcd"]


def test_a_streamed_error_may_come_without_or_with_a_response() -> None:
    bare = pb.ModelStreamInferResponse.FromString(encode_stream_response("no", None))
    assert bare.error_message == "no"
    assert not bare.HasField("infer_response")
    answer = response_parts("", "", "7", {}, [], [])
    named = pb.ModelStreamInferResponse.FromString(encode_stream_response("no", answer))
    assert named.infer_response.id == "7"
