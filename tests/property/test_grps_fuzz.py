"""No input from a GRPS client is answered as a fault of the server."""

import json
from typing import Any

import falcon.testing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve._generated import grps_pb2 as pb
from shmserve.config import Settings
from shmserve.errors import ShmserveError
from shmserve.frontends.http.routes.application import create_app
from shmserve.grps.frontend import answers
from shmserve.grps.frontend.exchange import options_of
from shmserve.grps.frontend.grps_service import Grps
from shmserve.grps.frontend.payloads import Payload
from shmserve.grps.protocol import message_wire
from tests.property.test_grps_json_properties import documents, messages
from tests.unit.grps import models_of_grps as models

SERVED = (
    (models.message_spec(), models.echo),
    (models.spec("f", [("IN", "FP32", (-1, -1))], [("OUT", "FP32", (-1, -1))]), models.echo),
    (models.spec("t", [("IN", "BYTES", (-1,))], [("OUT", "BYTES", (-1,))]), models.echo),
    (models.spec("u", [("IN", "UINT8", (-1,))], [("OUT", "UINT8", (-1,))]), models.echo),
    (models.spec("b", [("IN", "INT8", (-1, 2))], [("OUT", "INT8", (-1, 2))], batch=3), models.echo),
)
NAMES = ["your_model-1.0.0", "f-1", "t-1", "u-1", "b-1", "", "x-1"]
queries = st.sampled_from(["", "&return-ndarray=true", "&streaming=true"])
kinds = st.sampled_from(["application/json", "application/octet-stream", "text/plain"])


@pytest.fixture(scope="module")
def client() -> falcon.testing.TestClient:
    app = create_app(models.dispatcher(*SERVED), Settings())  # type: ignore[arg-type]
    return falcon.testing.TestClient(app, headers={"Host": "localhost"})


# An answer that cannot be an ndarray is reported as the model's fault, as in GRPS
ACCEPTED = (200, 400, 404, 413)
NO_NDARRAY = "Cannot convert to ndarray"


@settings(max_examples=400)
@given(
    documents.map(lambda d: json.dumps(d).encode()) | st.binary(max_size=30),
    st.sampled_from(NAMES),
    queries,
    kinds,
)
def test_http(
    client: falcon.testing.TestClient, body: bytes, name: str, query: str, kind: str
) -> None:
    answer = client.simulate_post(
        "/grps/v1/infer/predict",
        query_string=f"model={name}{query}",
        body=body,
        headers={"Content-Type": kind},
    )
    assert answer.status_code in ACCEPTED or NO_NDARRAY in answer.text, answer.text


mutations = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), max_size=3)


@settings(max_examples=400)
@given(messages, mutations, st.sampled_from(NAMES))
def test_wire(message: pb.GrpsMessage, changes: list[tuple[int, int]], name: str) -> None:
    data = bytearray(message.SerializeToString())
    for at, byte in changes:
        if at < len(data):
            data[at] = byte
    grps = Grps(models.dispatcher(*SERVED), Settings())  # type: ignore[arg-type]
    code = run(grps, bytes(data), name)
    assert code in ACCEPTED


def run(grps: Grps, data: bytes, name: str) -> int:
    try:
        entry = grps.models.ready(name)
        payload = Payload(message_wire.parse(data), data)
        exchange = grps.begin(payload, entry, options_of(entry.spec, name, False, None, 0))

        def make(outcome: Any, _: bool) -> bytes:
            return b"".join(answers.to_wire(exchange.signature, outcome, exchange.kind))

        pb.GrpsMessage.FromString(exchange.once(make))
    except ShmserveError as ex:
        return ex.http_status
    return 200
