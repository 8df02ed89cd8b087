"""Program of a GRPS user, written from GRPS's documentation: every payload over both protocols.

    python grps_client.py HTTP_ADDRESS GRPC_ADDRESS

Prints a line per check; ends with a traceback at the first failure.
"""

import base64
import json
import sys
import urllib.request
from typing import Any

import grpc
import numpy as np

from shmserve._generated import grps_pb2 as pb

STREAMED = "?streaming=true"


class Http:
    """Minimal substitute for `requests`."""

    def __init__(self, address: str) -> None:
        self._base = f"http://{address}/grps/v1"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self._base + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any, kind: str = "application/json") -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: bytes = answer.read()
            return found

    def predict(self, body: Any, query: str = "") -> Any:
        answer = json.loads(self.post(f"/infer/predict{query}", body))
        assert answer.pop("status") == {"code": 200, "msg": "OK", "status": "SUCCESS"}
        return answer


def http(address: str) -> None:
    client = Http(address)
    for action in ("live", "online", "ready"):
        assert client.get(f"/health/{action}")["status"]["code"] == 200, action
    text = {"str_data": "hello grps"}
    assert client.predict(text) == text
    assert client.predict(text, "?model=your_model-1.0.0") == text
    named = {"model": "your_model-1.0.0", **text}
    assert client.predict(named) == named
    assert json.loads(client.post("/infer/predict" + STREAMED, text))["str_data"] == "hello grps"
    tensors = [
        {"name": "in1", "dtype": "DT_INT32", "shape": [3, 2], "flat_int32": [1, 2, 3, 4, 5, 6]},
        {"name": "in2", "dtype": "DT_FLOAT64", "shape": [2], "flat_float64": [0.1, -2.0]},
        {"name": "in3", "dtype": "DT_STRING", "shape": [1], "flat_string": ["x"]},
    ]
    assert client.predict({"gtensors": {"tensors": tensors}})["gtensors"]["tensors"] == tensors
    gmap = {"s_s": {"a": "b"}, "s_b": {"a": base64.b64encode(b"\xff").decode()}, "s_i32": {"a": 1}}
    assert client.predict({"gmap": gmap}) == {"gmap": gmap}
    nested = np.arange(12, dtype=float).reshape(2, 2, 3).tolist()
    assert client.predict({"ndarray": nested}, "?return-ndarray=true") == {"ndarray": nested}
    assert client.predict({"ndarray": nested})["gtensors"]["tensors"][0]["shape"] == [2, 2, 3]
    data = bytes(range(256)) * 1000
    assert client.post("/infer/predict", data, "application/octet-stream") == data
    assert "your_model" in client.get("/metadata/server")["str_data"]
    model = json.loads(client.post("/metadata/model", {"str_data": "your_model"}))
    assert "version: 1.0.0" in model["str_data"]
    assert client.get("/health/offline")["status"]["code"] == 200
    print("http")


def rpc(address: str) -> None:
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options) as channel:

        def call(name: str, **fields: Any) -> Any:
            method = channel.unary_unary(
                f"/grps.protos.v1.GrpsService/{name}",
                pb.GrpsMessage.SerializeToString,
                pb.GrpsMessage.FromString,
            )
            return method(pb.GrpsMessage(**fields), timeout=30)

        for name in ("CheckLiveness", "Online", "CheckReadiness", "ServerMetadata"):
            assert call(name).status.code == 200, name
        tensor = pb.GenericTensor(name="x", dtype=7, shape=[3], flat_float32=[1, 2, 3])
        for fields in (
            {"str_data": "hello grps"},
            {"bin_data": b"\xff" * 100_000},
            {"gtensors": pb.GenericTensorData(tensors=[tensor])},
            {"gmap": pb.GenericMapData(s_d={"a": 0.5})},
        ):
            answer = call("Predict", **fields)
            assert answer.status.status == pb.Status.SUCCESS
            answer.ClearField("status")
            assert answer == pb.GrpsMessage(**fields)
        stream = channel.unary_stream(
            "/grps.protos.v1.GrpsService/PredictStreaming",
            pb.GrpsMessage.SerializeToString,
            pb.GrpsMessage.FromString,
        )
        answers = list(stream(pb.GrpsMessage(str_data="hello"), timeout=30))
        assert [a.str_data for a in answers] == ["hello"]
        assert "name: your_model" in call("ModelMetadata", str_data="your_model").str_data
        assert call("Predict", model="nobody-1", str_data="x").status.code == 404
        assert call("Offline").status.code == 200
        assert call("CheckReadiness").status.code == 503
    print("grpc")


if __name__ == "__main__":
    http(sys.argv[1])
    rpc(sys.argv[2])
