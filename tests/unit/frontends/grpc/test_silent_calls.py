"""Calls that send nothing, and their cost for other callers."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from shmserve.frontends.grpc import call_pools, handlers
from shmserve.frontends.grpc.call_pools import AwaitedRequests, ClientDeadlines
from tests.grpc_client import Client, Rig, Sender, request
from tests.running_server import WATCHDOG_S, wait_until

INFER = "/inference.GRPCInferenceService/ModelInfer"
CHECK = "/grpc.health.v1.Health/Check"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def silent_calls(client: Client, rpc: str, count: int, sender: Sender) -> list[Any]:
    call = client.channel.stream_unary(rpc)
    return [call.future(iter(sender)) for _ in range(count)]


def test_silent_inferences_give_way_to_those_that_wait(monkeypatch) -> None:
    monkeypatch.setattr(call_pools, "SILENCE_S", 0.2)
    with Rig(grpc_threads=2) as rig:
        sender = Sender()
        silent = silent_calls(rig.client, INFER, 8, sender)
        wait_until(lambda: rig.served.busy == 8, "all are there")
        # MESSAGE_TIMEOUT_S is longer than this client waits
        assert rig.client.infer(timeout=WATCHDOG_S).outputs
        assert not any(call.done() for call in silent), "they have no thread that they could give"
        for call in silent:
            call.cancel()
            sender.close()


def test_places_of_the_longest_silent_go_to_others(monkeypatch) -> None:
    monkeypatch.setattr(call_pools, "SILENCE_S", 0.2)
    with Rig(grpc_max_calls=8, max_caller_share=1) as rig:
        sender = Sender()
        silent = silent_calls(rig.client, INFER, 8, sender)
        wait_until(lambda: rig.served.busy == 8, "all places are taken")

        def answered() -> bool:
            return rig.client.method("ModelInfer").future(request()).code() is grpc.StatusCode.OK

        wait_until(answered, "one gives way")
        wait_until(lambda: any(call.done() for call in silent), "its client is told")
        assert sum(call.done() for call in silent) < 8
        for call in silent:
            call.cancel()
            sender.close()


def test_silent_inferences_that_nobody_minds_are_left(monkeypatch) -> None:
    monkeypatch.setattr(call_pools, "SILENCE_S", 0.05)
    with Rig(grpc_threads=4) as rig:
        sender = Sender()
        (slow,) = silent_calls(rig.client, INFER, 1, sender)
        for _ in range(20):
            assert rig.client.infer().outputs
        threading.Event().wait(1.5)  # the deadlines are looked at meanwhile
        sender.send(request().SerializeToString())
        sender.close()
        assert slow.result(WATCHDOG_S)


def test_a_caller_at_its_share_costs_others_nothing(tmp_path) -> None:
    gate = threading.Event()
    address = f"unix:{tmp_path}/grpc.sock"
    limits: dict[str, Any] = {"grpc_threads": 2, "grpc_max_calls": 8, "max_caller_share": 0.5}
    with Rig(also=address, max_model_share=1, **limits) as rig, Client(address) as other:
        model = rig.dispatcher.functions["identity"]

        def wait(given: Any) -> Any:
            assert gate.wait(WATCHDOG_S)
            return model(given)

        rig.dispatcher.functions["identity"] = wait
        running = [rig.threads.submit(rig.client.infer) for _ in range(4)]
        wait_until(lambda: rig.served.busy == 4 and len(rig.dispatcher.calls) == 1, "one runs")
        code, details = rig.client.error("ModelInfer", request())
        assert (code, "max_caller_share" in details) == ("RESOURCE_EXHAUSTED", True)
        rig.dispatcher.functions["identity"] = model
        assert other.infer().outputs  # a place and a thread are free for the call
        assert not any(call.done() for call in running)
        gate.set()
        assert all(call.result(WATCHDOG_S).outputs for call in running)


def test_silent_health_checks_do_not_keep_out_a_probe(tmp_path) -> None:
    address = f"unix:{tmp_path}/grpc.sock"
    with (
        Rig(also=address, head_timeout_s=300) as rig,
        Client(address) as other,
        Client(rig.target) as neighbour,
    ):
        sender = Sender()
        silent = silent_calls(rig.client, CHECK, 512, sender)
        assert other.method(CHECK)(b"", timeout=WATCHDOG_S)

        # even from the address of the silent calls, because silent calls give way
        def answered() -> bool:
            call = neighbour.method(CHECK).future(b"", timeout=WATCHDOG_S)
            return call.code() is grpc.StatusCode.OK

        wait_until(answered, "the probe has its answer")
        assert neighbour.infer().outputs
        for call in silent:
            call.cancel()
        for _ in silent:
            sender.close()


@pytest.mark.parametrize(
    ("rpc", "message"),
    [
        (STREAM, request().SerializeToString()),
        (REFLECTION, reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()),
    ],
    ids=["inferences", "reflection"],
)
def test_an_idle_stream_gives_its_place_to_a_new_one(rpc: str, message: bytes, monkeypatch) -> None:
    monkeypatch.setattr(call_pools, "STREAM_SILENCE_S", 0.3)
    monkeypatch.setattr(call_pools, "SMALL_SILENCE_S", 0.3)
    with Rig(max_caller_share=1, head_timeout_s=300, grpc_max_streams=16) as rig:
        senders = [Sender() for _ in range(16)]
        open_stream = rig.client.channel.stream_stream(rpc)
        idle = [open_stream(iter(sender), timeout=WATCHDOG_S) for sender in senders]
        for sender, call in zip(senders, idle, strict=True):
            sender.send(message)
            assert next(call)
        time.sleep(0.5)
        (late,) = open_stream(iter([message]), timeout=WATCHDOG_S)
        assert late
        wait_until(lambda: any(call.done() for call in idle), "one has ended")
        assert sum(call.done() for call in idle) == 1
        assert sum(call.done() for call in idle) == 1
        for sender, call in zip(senders, idle, strict=True):
            call.cancel()
            sender.close()


def test_a_stream_that_is_idle_for_very_long_ends(monkeypatch) -> None:
    monkeypatch.setattr(handlers, "STREAM_IDLE_S", 2)
    with Rig() as rig:
        sender = Sender()
        sender.send(request())
        call = rig.client.stream(sender)
        assert next(call).infer_response.outputs
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        sender.close()


def test_the_longest_silent_gives_way_first_and_only_beyond_the_grace() -> None:
    silent = ClientDeadlines(lambda *_: None).silent_calls(5.0)
    calls = [Mock(client_number=1) for _ in range(3)]
    for each in calls:
        silent.wait(each, 60.0)
    now = time.monotonic()
    assert not silent.make_room(now + 1.0)
    assert not silent.make_room(now + 6.0, caller=2)
    assert silent.make_room(now + 6.0)
    assert [each.give_up.called for each in calls] == [True, False, False]
    silent.heard(calls[1])
    silent.end_overdue(now + 30.0)
    assert not calls[2].give_up.called
    silent.end_overdue(now + 61.0)
    assert [each.give_up.called for each in calls] == [True, False, True]
    assert len(silent) == 0


def test_a_stream_that_works_is_not_silent() -> None:
    silent = ClientDeadlines(lambda *_: None).silent_calls(5.0)
    seen: list[int] = []

    def messages() -> Iterator[bytes]:
        seen.append(len(silent))
        yield b"1"
        with awaited.working():
            seen.append(len(silent))
        seen.append(len(silent))

    awaited = AwaitedRequests(messages(), Mock(), silent, 60.0)
    assert [*awaited] == [b"1"]
    assert (seen, len(silent)) == ([1, 0, 1], 0)


def test_deadlines_are_looked_at_once_a_tick_and_only_while_there_are_any() -> None:
    timers: list[Callable[[], object]] = []
    deadlines = ClientDeadlines(lambda _, look: timers.append(look))
    silent, calls = deadlines.silent_calls(5.0), [Mock(client_number=1) for _ in range(3)]
    for each in calls:
        deadlines.expect_taken(each, 0.0)
        silent.wait(each, 0.0)
    deadlines.met(calls[0])
    assert len(timers) == 1
    timers.pop()()
    assert all(each.give_up.called for each in calls)
    assert (len(deadlines), len(silent), timers) == (0, 0, [])
    deadlines.expect(calls[0], 60.0)
    timers.pop()()
    assert len(timers) == 1, "another look is due"
