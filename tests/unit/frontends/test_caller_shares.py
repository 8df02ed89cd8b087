"""A caller's share of the pool, counted in requests over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shmserve.config import Settings
from shmserve.dispatch.caller_shares import FREE, CallerShares
from shmserve.dispatch.outcome import Outcome, OutputTensor
from shmserve.errors import ResourceExhausted, TooLarge
from shmserve.frontends.caller_numbers import of_host
from shmserve.frontends.http2.grpc_framing import prefix
from shmserve.testing import fake_models
from shmserve.testing.fake_dispatch import FakeRequest
from shmserve.testing.running_server import wait_until
from tests.grpc_client import Rig, request
from tests.raw_http2 import RawClient
from tests.unit.http_client import Client, as_binary

SIZE = 2 * FREE  # bytes of a tensor that counts
ARRAY = np.zeros(SIZE // 4, np.float32)
ROOMY = 100 * SIZE  # a pool


def body_of(size: int) -> tuple[dict[str, object], bytes]:
    binary = {"name": "OUTPUT0", "parameters": {"binary_data": True}}
    return {"inputs": [as_binary(size, [size // 4])], "outputs": [binary]}, bytes(size)


def test_one_request_may_have_the_share_and_several_a_processs_part_of_it() -> None:
    settings = Settings(max_caller_share=0.5, http_workers=3, grpc_processes=2)
    shares = CallerShares(settings, lambda: 1000)
    with pytest.raises(TooLarge, match=r"one caller may have 500 .*max_caller_share\)"):
        shares.of(1).hold(501)
    with pytest.raises(
        TooLarge, match=r"have 1001 bytes: the whole pool has 1000 \(setting pool_b"
    ):
        shares.of(1).hold(1001)
    first, second, other = shares.of(1), shares.of(1), shares.of(2)
    first.hold(500)
    with pytest.raises(ResourceExhausted, match=r"other requests 500: one caller may have 100 "):
        second.hold(1)
    other.hold(100)
    first.hold(60)
    second.hold(40)
    with pytest.raises(ResourceExhausted):
        second.hold(41)
    assert shares.held == {1: 100, 2: 100}, "what is refused changes nothing"
    for share in (first, second, other, other):
        share.close()
    assert not shares.held


@pytest.mark.parametrize(("share", "pool"), [(1.0, 1 << 40), (0.5, 0)])
def test_nobody_is_refused_where_all_may_have_all_or_the_pool_is_not_known(
    share: float, pool: int
) -> None:
    shares = CallerShares(Settings(max_caller_share=share), lambda: pool)
    for _ in range(2):
        shares.of(1).hold(1 << 40)


@pytest.mark.parametrize(
    ("pool", "limit"), [(SIZE, "max_caller_share)"), (SIZE - 1, "the whole pool has")]
)
def test_over_http_inputs_count_before_they_are_received(
    client: Client, pool: int, limit: str
) -> None:
    document, tail = body_of(SIZE)
    client.dispatcher.pool_bytes = pool
    answer = client.infer(document, tail=tail)
    assert answer.status == 413
    assert limit in answer.json["error"]
    assert f"have {SIZE} bytes" in answer.json["error"]
    assert "pool_bytes" in answer.json["error"]
    assert client.dispatcher.calls == []
    assert client.dispatcher.refusals == [("identity", "TooLarge")]
    assert not client.dispatcher.shares.held


def test_over_http_answers_count_until_they_are_sent(client: Client) -> None:
    document, tail = body_of(SIZE)
    client.dispatcher.pool_bytes = int(1.9 * SIZE)  # enough for the input
    assert client.infer(document, tail=tail).status == 413
    (call,) = client.dispatcher.calls
    assert (call.outcomes, call.closed) == (["TooLarge"], 1)
    assert not client.dispatcher.shares.held
    client.dispatcher.pool_bytes = ROOMY
    seen: list = []

    def app(environ: object, start: object) -> Iterator[bytes]:
        result = inner(environ, start)
        seen.append(dict(client.dispatcher.shares.held))
        return result

    inner, client.app = client.app, app
    assert client.infer(document, tail=tail, REMOTE_ADDR="192.0.2.1").status == 200
    assert seen == [{of_host("192.0.2.1"): 2 * SIZE}], "whatever server it came to"
    assert not client.dispatcher.shares.held


def test_an_answer_that_lies_in_its_input_counts_once() -> None:
    def same(asked: FakeRequest) -> Outcome:
        view = asked.inputs["INPUT0"].view
        return Outcome((OutputTensor("OUTPUT0", "FP32", (SIZE // 4,), view, aliased=True),))

    client = Client()
    client.dispatcher.functions["identity"] = same
    client.dispatcher.pool_bytes = int(1.9 * SIZE)
    document, tail = body_of(SIZE)
    assert client.infer(document, tail=tail).status == 200


def test_small_requests_do_not_count(client: Client) -> None:
    client.dispatcher.pool_bytes = 1
    document, tail = body_of(FREE // 2)
    assert client.infer(document, tail=tail).status == 200


def test_over_grpc_a_request_with_too_much_is_refused() -> None:
    with Rig() as rig:
        rig.dispatcher.pool_bytes = SIZE
        code, details = rig.client.error("ModelInfer", request(ARRAY))
        assert code == "INVALID_ARGUMENT"
        assert "max_caller_share" in details
        assert rig.dispatcher.calls == []
        assert rig.dispatcher.refusals == [("identity", "TooLarge")]
        rig.dispatcher.pool_bytes = ROOMY
        assert rig.client.infer(request(ARRAY)).outputs
        wait_until(lambda: not rig.dispatcher.shares.held, "the answer has been sent")


def test_over_grpc_announced_tensors_count_before_they_come() -> None:
    dispatcher = fake_models.dispatcher()
    dispatcher.pool_bytes = 4 * SIZE  # a caller's share of this pool has room for several requests
    with Rig(dispatcher) as rig:
        raws = begin_large(rig, 2)
        fields = raws[1].fields()
        assert fields["grpc-status"] == "8"
        assert "max_caller_share" in fields["grpc-message"]
        assert dispatcher.shares.held == {of_host("127.0.0.1"): SIZE}
        for raw in raws:
            raw.close()
        wait_until(lambda: not dispatcher.shares.held, "with the connection it is given up")


def begin_large(rig: Rig, count: int) -> list[RawClient]:
    """So many connections, on each the beginning of a large message."""
    message = request(ARRAY).SerializeToString()
    raws = []
    for _ in range(count):
        raw = RawClient(rig.target)
        raw.call(None)
        raw.send(0, 0, 1, (prefix(len(message)) + message)[:1000])
        raws.append(raw)
        wait_until(lambda: dict(rig.dispatcher.shares.held) != {}, "the first has its share")
    return raws
