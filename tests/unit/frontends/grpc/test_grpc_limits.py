"""Limits of the gRPC server: number of calls, and time to wait for clients."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import numpy as np
import pytest

from shmserve.frontends.grpc import call_pools, handlers
from shmserve.protocol import bounds
from shmserve.testing.running_server import WATCHDOG_S, wait_until
from tests.grpc_client import Rig, Sender, request


def test_too_many_calls_are_refused_at_once_and_health_is_not() -> None:
    gate = threading.Event()
    with Rig(grpc_threads=2, grpc_max_calls=3) as rig:
        rig.hold(gate)
        running = [rig.threads.submit(rig.client.infer) for _ in range(3)]
        wait_until(lambda: rig.served.busy == 3, "two run and one waits")
        code, details = rig.client.error("ModelInfer", request())
        assert (code, "grpc_max_calls" in details) == ("RESOURCE_EXHAUSTED", True)
        infer = rig.client.method("ModelInfer")
        refused = infer.future(request(), metadata=(("x-request-id", "mine"),))
        assert dict(refused.trailing_metadata())["x-request-id"] == "mine"
        assert dict(infer.future(request()).trailing_metadata())["x-request-id"]
        assert rig.client.call("ServerReady").ready
        gate.set()
        assert all(call.result(WATCHDOG_S).outputs for call in running)
        wait_until(lambda: rig.served.busy == 0, "all are done")
        assert rig.client.infer().outputs


def test_a_cancelled_call_that_waits_for_a_thread_never_runs() -> None:
    gate = threading.Event()
    with Rig(grpc_threads=1) as rig:
        rig.hold(gate)
        running = rig.threads.submit(rig.client.infer)
        wait_until(lambda: rig.served.busy == 1, "one runs")
        waiting = rig.client.method("ModelInfer").future(request())
        wait_until(lambda: rig.served.busy == 2, "one waits")
        waiting.cancel()
        wait_until(lambda: rig.served.busy == 1, "its place is free")
        # On the same connection, so the answer proves that the server has read the cancellation
        rig.client.method("ServerLive")(b"", timeout=WATCHDOG_S)
        gate.set()
        assert running.result(WATCHDOG_S).outputs
        wait_until(lambda: rig.served.busy == 0, "nothing is left")
        assert len(rig.dispatcher.calls) == 1


def test_a_client_that_never_sends_its_message_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "MESSAGE_TIMEOUT_S", 0.5)
    with Rig(grpc_threads=1) as rig:
        sender = Sender()
        infer = rig.client.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        silent = infer.future(iter(sender))
        assert rig.client.infer().outputs  # despite the single thread
        assert silent.code() is grpc.StatusCode.CANCELLED
        sender.close()


def test_silent_clients_of_a_small_call_are_given_up_sooner() -> None:
    with Rig(head_timeout_s=0.5) as rig:
        sender = Sender()
        metadata = rig.client.channel.stream_unary("/inference.GRPCInferenceService/ModelMetadata")
        silent = [metadata.future(iter(sender)) for _ in range(20)]
        assert {call.code() for call in silent} == {grpc.StatusCode.CANCELLED}
        for _ in silent:
            sender.close()


def test_limits_of_requests_hold_within_streams_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_INPUTS", 1)
    with Rig() as rig:
        double = request()
        double.inputs.append(double.inputs[0])
        (answer,) = rig.client.stream([double])
        assert "more than 1 inputs" in answer.error_message
        assert "more than 1 inputs" in rig.client.error("ModelInfer", double)[1]


def test_a_client_that_does_not_take_its_answer_is_given_up() -> None:
    with Rig(send_timeout_s=0.5, min_bytes_per_s=1 << 30) as rig:
        sender = Sender()
        # As a stream of answers: the client reads only on request.
        infer = rig.client.channel.stream_stream("/inference.GRPCInferenceService/ModelInfer")
        sender.send(request(np.zeros(16 << 20, np.float32)).SerializeToString())
        call = infer(iter(sender), timeout=WATCHDOG_S)
        wait_until(lambda: bool(rig.dispatcher.calls), "it runs")
        wait_until(lambda: rig.served.busy == 0, "it is given up")
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        sender.close()


def test_messages_of_rpcs_without_tensors_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "MAX_SMALL_MESSAGE_BYTES", 100)
    with Rig() as rig:
        code, details = rig.client.error("ModelMetadata", bytes(101))
        assert (code, "101" in details) == ("RESOURCE_EXHAUSTED", True)
        for name in ("LogSettings", "TraceSetting"):
            assert rig.client.error(name, bytes(101))[0] == "RESOURCE_EXHAUSTED"
        watch = rig.client.channel.unary_stream("/grpc.health.v1.Health/Watch")
        assert watch(bytes(101)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert rig.client.call("ServerLive").live
        assert rig.client.infer(request(np.zeros(100, np.float32))).outputs


def test_max_request_bytes_bounds_messages_of_all_rpcs() -> None:
    with Rig(max_request_bytes=1000) as rig:
        for name in ("ModelInfer", "ModelMetadata", "LogSettings", "TraceSetting"):
            code, details = rig.client.error(name, bytes(1001))
            assert (code, "1001 vs. 1000" in details) == ("RESOURCE_EXHAUSTED", True)


def test_an_idle_stream_that_nobody_minds_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_pools, "STREAM_SILENCE_S", 0.1)
    with Rig() as rig:
        sender = Sender()
        call = rig.client.stream(sender)
        sender.send(request())
        assert next(call).infer_response.outputs
        threading.Event().wait(1.5)  # the deadlines are looked at meanwhile
        sender.send(request())
        assert next(call).infer_response.outputs
        sender.close()


def test_a_flooded_model_leaves_threads_to_others_and_has_a_bound() -> None:
    gate = threading.Event()
    limits: dict[str, Any] = {"grpc_threads": 4, "max_model_share": 0.5, "max_model_requests": 3}
    with Rig(max_caller_share=1, **limits) as rig:
        rig.hold(gate)
        running = [rig.threads.submit(rig.client.infer) for _ in range(3)]
        wait_until(lambda: rig.served.busy == 3 and len(rig.dispatcher.calls) == 2, "two run")
        code, details = rig.client.error("ModelInfer", request())
        assert code == "UNAVAILABLE"
        assert "model 'identity' has 3 requests" in details
        assert "max_model_requests" in details
        assert rig.dispatcher.refusals == [("identity", "QueueFull")]
        # On the same connection, and no thread is the flooded model's
        other = request(model="failing")
        assert rig.client.error("ModelInfer", other)[0] != "DEADLINE_EXCEEDED"
        assert len(rig.dispatcher.calls) == 3
        gate.set()
        assert all(call.result(WATCHDOG_S).outputs for call in running)
        wait_until(lambda: rig.served.busy == 0, "all are done")
        assert rig.client.infer().outputs


def test_a_cancelled_call_counts_for_its_model_no_more() -> None:
    gate = threading.Event()
    with Rig(grpc_threads=2, max_model_share=0.5, max_model_requests=2) as rig:
        rig.hold(gate)
        running = rig.threads.submit(rig.client.infer)
        wait_until(lambda: rig.served.busy == 1, "one runs")
        waiting = rig.client.method("ModelInfer").future(request())
        wait_until(lambda: rig.served.busy == 2, "one waits")
        waiting.cancel()
        wait_until(lambda: rig.served.busy == 1, "its place is free")
        again = rig.threads.submit(rig.client.infer)
        gate.set()
        assert running.result(WATCHDOG_S).outputs
        assert again.result(WATCHDOG_S).outputs
