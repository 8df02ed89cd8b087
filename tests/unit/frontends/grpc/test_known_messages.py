"""Repeated heads of messages: which parts the server remembers."""

import threading

import numpy as np
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.frontends.grpc.inference import model_infer
from tests.grpc_client import VALUES, Rig, request
from tests.running_server import WATCHDOG_S


@pytest.fixture
def read(monkeypatch):
    """A list with an item for each message whose fields were read."""
    seen: list[int] = []
    parse = model_infer.parse_request  # type: ignore[attr-defined]

    def counted(*args: object) -> object:
        seen.append(1)
        return parse(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(model_infer, "parse_request", counted)
    return seen


def answered(rig: Rig, message: pb.ModelInferRequest) -> bytes:
    (raw,) = rig.client.infer(message).raw_output_contents
    return bytes(raw)


@pytest.mark.parametrize("count", [4, 1 << 16])
def test_each_has_its_own_tensor(rig: Rig, read: list[int], count: int) -> None:
    for n in range(5):
        values = np.full(count, n, np.float32)
        assert answered(rig, request(values)) == values.tobytes()
    assert len(read) == 1
    assert answered(rig, request(np.zeros(2 * count, np.float32))) == bytes(8 * count)
    assert len(read) == 2


def test_what_is_not_alike_is_read(rig: Rig, read: list[int]) -> None:
    assert answered(rig, request()) == VALUES.tobytes()
    other = request()
    other.inputs[0].shape[:] = [2]  # as long as the first
    code, details = rig.client.error("ModelInfer", other)
    assert (code, "INPUT0" in details) == ("INVALID_ARGUMENT", True)
    for _ in range(2):
        assert answered(rig, request(id="1")) == VALUES.tobytes()
    assert len(read) == 4
    # A field behind the tensor may be another the next time
    first, last = request(), pb.ModelInferRequest(model_name="identity")
    for _ in range(2):
        first.ClearField("model_name")
        data = first.SerializeToString() + last.SerializeToString()
        assert rig.client.infer(data).raw_output_contents[0] == VALUES.tobytes()
    assert len(read) == 6


def test_large_messages_on_the_heap_leave_the_loop_to_others(rig: Rig) -> None:
    """Other calls, health among them, go on."""
    gate, entered = threading.Event(), threading.Event()
    function = rig.dispatcher.functions["identity"]

    def wait(given: object) -> object:
        entered.set()
        assert gate.wait(WATCHDOG_S)
        return function(given)  # type: ignore[arg-type]

    rig.dispatcher.functions["identity"] = wait  # type: ignore[assignment]
    typed = pb.ModelInferRequest(model_name="identity")
    typed.inputs.add(name="INPUT0", datatype="FP32", shape=[1 << 16])
    typed.inputs[0].contents.fp32_contents.extend([1.0] * (1 << 16))
    running = rig.threads.submit(rig.client.infer, typed)
    assert entered.wait(WATCHDOG_S)
    assert rig.client.call("ServerReady").ready
    rig.dispatcher.functions["identity"] = function
    assert rig.client.infer().outputs
    gate.set()
    assert running.result(WATCHDOG_S).outputs
