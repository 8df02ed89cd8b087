"""Remembered JSON parts: checks made once, and checks made for each request."""

import json
from typing import Any

import msgspec
import pytest

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, NotFound
from shmserve.frontends.http.routes.inference.infer_body import KnownRequests
from shmserve.protocol.control.data_messages import RegionRef
from shmserve.protocol.oip.model_signature import make_signature
from shmserve.protocol.oip.request import RegionWindow
from shmserve.tensor.spec import ModelSpec
from tests.fake_models import spec
from tests.unit.http_client import BINARY, VALUES, Client, as_binary, as_json

IDENTITY = make_signature(spec("identity", "FP32", (-1,)))


class Regions:
    """Registered regions by name, and the number of look-ups."""

    def __init__(self, **numbers: int) -> None:
        self.numbers = numbers
        self.asked = 0

    def find(self, _: ModelSpec, window: RegionWindow) -> RegionRef:
        self.asked += 1
        if window.region not in self.numbers:
            raise NotFound(f"Unable to find shared memory region: '{window.region}'")
        return RegionRef(self.numbers[window.region], window.offset, window.nbytes)

    def as_of(self) -> object:
        return self.numbers


def encoded(**document: Any) -> bytes:
    return json.dumps(document).encode()


@pytest.fixture
def known():
    return KnownRequests(Settings())


def test_the_same_bytes_are_read_and_checked_once(known: KnownRequests) -> None:
    text = encoded(inputs=[as_binary(16, [4])])
    first = known.check(IDENTITY, text, Regions())
    assert known.check(IDENTITY, bytes(bytearray(text)), Regions()) is first
    assert first.binary_bytes == 16


def test_another_revision_of_the_model_checks_anew(known: KnownRequests) -> None:
    text = encoded(inputs=[as_binary(16, [4])])
    known.check(IDENTITY, text, Regions())
    tensor = msgspec.structs.replace(IDENTITY.spec.inputs[0], shape=(3,))
    narrow = make_signature(msgspec.structs.replace(IDENTITY.spec, inputs=(tensor,)))
    with pytest.raises(InvalidArgument, match=r"Expected \[3\], got \[4\]"):
        known.check(narrow, text, Regions())


def test_regions_are_looked_up_whenever_they_may_be_others(known: KnownRequests) -> None:
    window = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    source = {"name": "INPUT0", "shape": [4], "datatype": "FP32", "parameters": window}
    text = encoded(inputs=[source], outputs=[{"name": "OUTPUT0", "parameters": window}])
    for number in (7, 8):
        regions = Regions(r=number)
        found = known.check(IDENTITY, text, regions)
        at = RegionRef(number, 0, 16)
        assert (found.inputs[0].at, found.places[0].at, regions.asked) == (at, at, 2)
    same = Regions(r=8)
    assert known.check(IDENTITY, text, same) is known.check(IDENTITY, text, same)
    assert same.asked == 0
    with pytest.raises(NotFound, match="'r'"):
        known.check(IDENTITY, text, Regions())


def test_what_will_not_come_again_is_not_kept(known: KnownRequests) -> None:
    long = "x" * 5000
    for text in (
        encoded(id="7", inputs=[as_binary(16, [4])]),
        encoded(inputs=[as_json([1, 2, 3, 4])]),
        encoded(inputs=[as_binary(16, [4])], parameters={"long": long}),
    ):
        first = known.check(IDENTITY, text, Regions())
        assert known.check(IDENTITY, text, Regions()) is not first


def test_their_number_is_bounded(known: KnownRequests) -> None:
    first, *_ = [
        known.check(IDENTITY, encoded(inputs=[as_binary(4 * n, [n])]), Regions())
        for n in range(1, 2000)
    ]
    assert known.check(IDENTITY, encoded(inputs=[as_binary(4, [1])]), Regions()) is not first


def test_a_body_that_is_too_short_for_a_known_request_is_refused() -> None:
    client = Client()
    assert client.infer(BINARY, tail=VALUES).status == 200
    for tail, message in ((VALUES[:12], "additional bytes"), (VALUES * 2, "additional input")):
        answer = client.infer(BINARY, tail=tail)
        assert answer.status == 400
        assert message in answer.json["error"]


def test_forwarded_headers_stay_with_their_request() -> None:
    client = Client(Settings(http_header_forward_pattern="^x-user"))
    client.infer(BINARY, tail=VALUES, headers={"X-User": "ann"})
    client.infer(BINARY, tail=VALUES)
    ann, nobody = [call.options.parameters for call in client.dispatcher.calls]
    assert "ann" in ann.values()
    assert nobody == {}
