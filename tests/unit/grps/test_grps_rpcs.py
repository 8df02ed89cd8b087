"""GRPS over real gRPC against fake models."""

import contextlib
from typing import Any

import grpc
import numpy as np
import pytest

from shmserve._generated import grps_pb2 as pb
from shmserve.config import Settings
from shmserve.frontends.grpc.process.server import GrpcServer
from shmserve.tensor.spec import ModelSpec
from shmserve.transport.trust.peer_credentials import REMOTE
from tests.grpc_client import listen, one_caller
from tests.unit.grps import models_of_grps as models

SERVICE = "/grps.protos.v1.GrpsService/"
FP32 = models.spec("m", [("IN", "FP32", (-1,))], [("OUT", "FP32", (-1,))])
TEXT = models.spec("t", [("IN", "BYTES", (1,))], [("OUT", "BYTES", (1,))])


class Rpcs:
    """A server with fake models, and a client of it."""

    def __init__(self, *served: tuple[ModelSpec, Any], **settings: Any) -> None:
        self.fake = models.dispatcher(*served)
        made = Settings(**settings)
        self.server = GrpcServer(self.fake, made, one_caller(REMOTE))  # type: ignore[arg-type]
        target = listen(self.server, "127.0.0.1:0")
        self.server.start()
        self.channel = grpc.insecure_channel(target)

    def raw(self, name: str, data: bytes) -> pb.GrpsMessage:
        method = self.channel.unary_unary(SERVICE + name)
        return pb.GrpsMessage.FromString(method(data, timeout=30))

    def call(self, name: str, **fields: Any) -> pb.GrpsMessage:
        answer = self.raw(name, pb.GrpsMessage(**fields).SerializeToString())
        assert all(call.closed for call in self.fake.calls)
        return answer

    def stream(self, **fields: Any) -> list[pb.GrpsMessage]:
        method = self.channel.unary_stream(SERVICE + "PredictStreaming")
        data = pb.GrpsMessage(**fields).SerializeToString()
        return [pb.GrpsMessage.FromString(answer) for answer in method(data, timeout=30)]

    def close(self) -> None:
        self.channel.close()
        self.server.close()


@pytest.fixture
def start():
    with contextlib.ExitStack() as ends:
        yield lambda *served, **more: ends.enter_context(contextlib.closing(Rpcs(*served, **more)))


def refused(answer: pb.GrpsMessage, code: int, text: str = "") -> None:
    assert (answer.status.code, answer.status.status) == (code, pb.Status.FAILURE)
    assert text in answer.status.msg
    assert "Traceback" not in answer.status.msg


def succeeded(answer: pb.GrpsMessage) -> None:
    assert (answer.status.code, answer.status.msg) == (200, "OK")
    assert answer.status.status == pb.Status.SUCCESS


def test_every_payload_passes_through_a_model_that_takes_messages(start: Any) -> None:
    rpcs = start((models.message_spec(), models.echo))
    tensor = pb.GenericTensor(name="x", dtype=7, shape=[2], flat_float32=[1, 2])
    for fields in (
        {"str_data": "grüße"},
        {"bin_data": b"\xff"},
        {"gtensors": pb.GenericTensorData(tensors=[tensor])},
        {"gmap": pb.GenericMapData(s_b={"a": b"\xff"}, s_i64={"b": -1})},
        {"ndarray": pb.NDArrayData()},
        {},
    ):
        answer = rpcs.call("Predict", model="your_model-1.0.0", **fields)
        succeeded(answer)
        answer.ClearField("status")
        assert answer == pb.GrpsMessage(model="your_model-1.0.0", **fields)
        (streamed,) = rpcs.stream(**fields)
        succeeded(streamed)


def test_tensors_meet_tensor_models(start: Any) -> None:
    rpcs = start((FP32, models.echo))
    values = np.arange(1000, dtype=np.float32)
    tensor = pb.GenericTensor(name="IN", dtype=7, shape=[1000], flat_float32=values)
    answer = rpcs.call("Predict", gtensors=pb.GenericTensorData(tensors=[tensor]))
    succeeded(answer)
    (found,) = answer.gtensors.tensors
    assert (found.name, found.dtype, list(found.shape)) == ("OUT", 7, [1000])
    assert np.array_equal(np.array(found.flat_float32, np.float32), values)
    tensor.shape[0] = 999
    wrong = rpcs.call("Predict", gtensors=pb.GenericTensorData(tensors=[tensor]))
    refused(wrong, 400, "'IN'")


@pytest.mark.parametrize(
    ("datatype", "dtype", "field", "values"),
    [
        ("UINT8", 1, "flat_uint8", [0, 255]),
        ("INT8", 2, "flat_int8", [-128, 127]),
        ("INT16", 3, "flat_int16", [-32768, 32767]),
        ("INT32", 4, "flat_int32", [-(1 << 31), 300]),
        ("INT64", 5, "flat_int64", [-(1 << 63), (1 << 63) - 1]),
        ("FP16", 6, "flat_float16", [0.5, 65504.0]),
        ("FP64", 8, "flat_float64", [0.1, 1e300]),
        ("BYTES", 9, "flat_string", ["", "grüße"]),
    ],
)
def test_every_datatype(start: Any, datatype, dtype, field, values) -> None:
    spec = models.spec("m", [("IN", datatype, (-1,))], [("OUT", datatype, (-1,))])
    rpcs = start((spec, models.echo))
    tensor = pb.GenericTensor(dtype=dtype, shape=[len(values)], **{field: values})
    answer = rpcs.call("Predict", gtensors=pb.GenericTensorData(tensors=[tensor]))
    succeeded(answer)
    assert list(getattr(answer.gtensors.tensors[0], field)) == values


def test_text_and_bytes(start: Any) -> None:
    rpcs = start((TEXT, models.echo))
    assert rpcs.call("Predict", str_data="x").str_data == "x"
    assert rpcs.call("Predict", bin_data=b"\xff").bin_data == b"\xff"
    refused(rpcs.call("Predict", ndarray=pb.NDArrayData()), 400, "ndarray")
    refused(rpcs.call("Predict"), 400, "no payload")


def test_failures_are_in_the_status(start: Any) -> None:
    rpcs = start((TEXT, models.refusing), (FP32, models.echo))
    refused(rpcs.call("Predict", model="t-1", str_data="x"), 500, "the model said no")
    refused(rpcs.call("Predict", model="other-1", str_data="x"), 404, "other-1")
    refused(rpcs.call("Predict", str_data="x"), 400, "no default model")
    refused(rpcs.raw("Predict", b"\xff\xff\xff"), 400)
    (answer,) = rpcs.stream(model="t-1", str_data="x")
    refused(answer, 500, "the model said no")
    (answer,) = rpcs.stream(model="other-1", str_data="x")
    refused(answer, 404)


def test_streams(start: Any) -> None:
    rpcs = start((models.message_spec(decoupled="true"), models.streaming))
    answers = rpcs.stream(str_data="x")
    for answer in answers:
        succeeded(answer)
    assert [a.str_data for a in answers] == ["stream data 1", "stream data 2", ""]
    assert answers[2].bin_data == b"\xff\x00"
    assert rpcs.call("Predict", str_data="x").str_data == "one answer"


def test_a_stream_that_breaks(start: Any) -> None:
    rpcs = start((models.message_spec(decoupled="true"), models.breaking))
    first, last = rpcs.stream(str_data="x")
    succeeded(first)
    refused(last, 500, "the model broke")


def test_health_and_metadata(start: Any) -> None:
    rpcs = start((models.message_spec(), models.echo))
    succeeded(rpcs.call("CheckLiveness"))
    refused(rpcs.call("CheckReadiness"), 503, "Service Unavailable")
    succeeded(rpcs.call("Online"))
    succeeded(rpcs.call("CheckReadiness"))
    succeeded(rpcs.call("Offline"))
    refused(rpcs.call("CheckReadiness"), 503)
    assert "models:" in rpcs.call("ServerMetadata").str_data
    assert "name: your_model" in rpcs.call("ModelMetadata", str_data="your_model").str_data
    refused(rpcs.call("ModelMetadata", str_data="other"), 404, "Model not found.")
    refused(rpcs.call("ModelMetadata", str_data=""), 400, "The model name is empty.")
    refused(rpcs.call("ModelMetadata"), 400, "No model name.")


def test_restricted_rpcs(start: Any) -> None:
    rpcs = start((TEXT, models.echo), grpc_restricted_protocol=("inference,health:key=secret",))
    for name in ("Predict", "Online", "CheckReadiness"):
        with pytest.raises(grpc.RpcError) as caught:
            rpcs.call(name, str_data="x")
        assert "restricted" in caught.value.details()
    with pytest.raises(grpc.RpcError, match="restricted"):
        rpcs.stream(str_data="x")
    succeeded(rpcs.call("ServerMetadata"))
    method = rpcs.channel.unary_unary(SERVICE + "Predict")
    data = pb.GrpsMessage(str_data="x").SerializeToString()
    secret = (("triton-grpc-protocol-key", "secret"),)
    succeeded(pb.GrpsMessage.FromString(method(data, metadata=secret, timeout=30)))


def test_models_that_take_http_only(start: Any) -> None:
    spec = models.spec("c", grps_http_path="/c", grps_http_body="true", decoupled="true")
    refused(start((spec, models.http_echo)).call("Predict", str_data="x"), 400, "HTTP")
