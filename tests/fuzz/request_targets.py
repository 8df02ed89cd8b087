"""Requests in protobuf and in GRPS's forms, and configurations of models."""

from __future__ import annotations

from typing import Any
from unittest import mock

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.errors import ConfigError, InvalidArgument
from shmserve.grps.protocol import json_reader, json_writer, message_wire
from shmserve.grps.protocol.grps_message import GenericMap, GenericTensor, GrpsMessage, GrpsStatus
from shmserve.protocol.protobuf import incoming_request
from shmserve.protocol.protobuf.infer_wire import WireInferRequest, parse_request
from shmserve.protocol.triton_config import model_config
from shmserve.tensor import bytes_codec
from tests.fuzz.http_targets import VALUES
from tests.property import wild_wire

LIMITS = Settings()


class _Place:
    def __init__(self, size: int) -> None:
        self.view = memoryview(bytearray(size))

    def take(self) -> Any:
        return self.view


def model_infer(data: bytes) -> None:
    """A ModelInferRequest: refused, or read as by protobuf's classes, and in pieces as whole."""
    try:
        whole = parse_request(data)
        for source in whole.inputs:
            wild_wire.elements(source.contents)
    except InvalidArgument:
        return
    wild_wire.assert_same(whole, data)
    with mock.patch.object(incoming_request, "LARGE_BYTES", 8):
        step = 1 + data[-1] if data else 1
        incoming = incoming_request.IncomingRequest(len(data), LIMITS, _Place)
        for at in range(0, len(data), step):
            incoming.feed(memoryview(data)[at : at + step])
    apart = parse_request(incoming.rest(), incoming.raw)
    assert _tensors(apart) == _tensors(whole)


def _tensors(request: WireInferRequest) -> list[Any]:
    raw = [None if tensor.raw is None else bytes(tensor.raw) for tensor in request.inputs]
    return [*((t.name, t.datatype, t.shape) for t in request.inputs), raw, request.raw_count]


def model_infer_seeds() -> list[bytes]:
    full = pb.ModelInferRequest(model_name="identity", model_version="1", id="né")
    full.parameters["sequence_id"].int64_param = -5
    full.parameters["priority"].uint64_param = 1 << 63
    full.parameters["sequence_start"].bool_param = True
    full.parameters["x"].double_param = 0.5
    region = full.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 300])
    region.parameters["shared_memory_region"].string_param = "r"
    region.parameters["shared_memory_byte_size"].int64_param = 1200
    full.inputs.add(name="INPUT1", datatype="FP16", shape=[2])
    full.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 3
    full.raw_input_contents.append(b"abcd" * 20)
    typed = pb.ModelInferRequest(model_name="identity")
    for name, values in (
        ("bool_contents", [True, False]),
        ("int_contents", [-1, 300, 1 << 30]),
        ("int64_contents", [-1, 1 << 40]),
        ("uint_contents", [1, 1 << 31]),
        ("uint64_contents", [1 << 63]),
        ("fp32_contents", [1.5, 2.5]),
        ("fp64_contents", [0.1]),
        ("bytes_contents", [b"", b"xyz"]),
    ):
        tensor = typed.inputs.add(name=name, datatype="INT32", shape=[len(values)])
        getattr(tensor.contents, name).extend(values)
    return [full.SerializeToString(), typed.SerializeToString()]


def grps_wire(data: bytes) -> None:
    """A GrpsMessage; writing and reading it again must not change the message."""
    try:
        message_wire.glance(data)
        message = message_wire.parse(data)
    except InvalidArgument:
        return
    once = message_wire.encode(message)
    assert message_wire.encode(message_wire.parse(once)) == once


def grps_json(data: bytes) -> None:
    """A GrpsMessage as JSON; writing and reading it again must not change the message."""
    try:
        message = json_reader.parse(data)
    except InvalidArgument:
        return
    once = json_writer.encode(message)
    assert json_writer.encode(json_reader.parse(once)) == once


def _grps() -> list[GrpsMessage]:
    maps = GenericMap({"a": "b"}, {"c": b"d"}, {"e": -1}, {"f": 1 << 40}, {"g": 0.5}, {"h": 0.1})
    tensors = [GenericTensor.of("t", VALUES), GenericTensor.of("u", VALUES.astype("i8"))]
    return [
        GrpsMessage(model="m", str_data="text"),
        GrpsMessage(model="m", gtensors=tensors, status=GrpsStatus(1, "no", 1)),
        GrpsMessage(gmap=maps),
        GrpsMessage(bin_data=b"\0\1"),
    ]


def grps_wire_seeds() -> list[bytes]:
    return [message_wire.encode(message) for message in _grps()]


def grps_json_seeds() -> list[bytes]:
    texts = [json_writer.encode(message) for message in _grps()]
    return [*texts, b'{"ndarray": [[1, 2.5], [3, 4]]}']


def bytes_tensor(data: bytes) -> None:
    """Elements of a BYTES tensor with length prefixes; the first byte gives their number."""
    try:
        elements = bytes_codec.decode(data[1:], data[0] if data else 0, "IN", "m")
    except InvalidArgument:
        return
    assert bytes_codec.encode(elements) == data[1:]


def bytes_tensor_seeds() -> list[bytes]:
    return [b"\3" + bytes_codec.encode([b"", b"abc", b"x" * 40])]


def config_pbtxt(data: bytes) -> None:
    """A config.pbtxt: refused, or writing and reading it again does not change the
    configuration."""
    try:
        _same_again(model_config.parse(data.decode(errors="replace"), "m", "python"))
    except ConfigError:
        return


def config_json(data: bytes) -> None:
    """A configuration in JSON, as in a client's request to load a model, checked like a
    config.pbtxt."""
    try:
        _same_again(model_config.parse_json(data.decode(errors="replace"), "m", "python"))
    except ConfigError:
        return


def _same_again(config: model_config.ModelConfig) -> None:
    spec = config.spec("1")
    assert model_config.of_spec(spec).spec("1") == spec


_CONFIG = """name: "m" backend: "python" max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1, 4 ] reshape { shape: [ 4, -1 ] } } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] } ]
%s
parameters { key: "k" value { string_value: "v" } }
"""


def config_pbtxt_seeds() -> list[bytes]:
    parts = (
        "dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 100 }",
        "instance_group [ { count: 2 kind: KIND_CPU } ]",
        "version_policy { latest { num_versions: 2 } }",
        'sequence_batching { oldest { } control_input [ { name: "S" control { kind:'
        " CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } ] }",
        'model_warmup [ { name: "w" batch_size: 1 inputs { key: "IN" value { data_type: TYPE_FP32'
        " dims: [ 4, 4 ] zero_data: true } } } ]",
        "model_transaction_policy { decoupled: true } response_cache { enable: true }",
    )
    ensemble = """platform: "ensemble" input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 1 ] } ]
ensemble_scheduling { step [ { model_name: "x" model_version: -1
input_map { key: "I" value: "A" } output_map { key: "O" value: "B" } } ] }"""
    return [(_CONFIG % part).encode() for part in parts] + [ensemble.encode()]


def config_json_seeds() -> list[bytes]:
    return [
        b'{"backend":"python","max_batch_size":4,"input":[{"name":"IN","data_type":"TYPE_FP32",'
        b'"dims":[-1]}],"output":[{"name":"OUT","data_type":"TYPE_FP32","dims":["2"]}],'
        b'"parameters":{"a":{"string_value":"b"}},"dynamic_batching":{}}'
    ]
