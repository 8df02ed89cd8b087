"""Calls that send nothing, whom they cost what."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from shmserve.errors import ResourceExhausted
from shmserve.frontends.grpc import client_deadlines
from shmserve.frontends.grpc.call_turns import PoolSize
from shmserve.frontends.grpc.client_deadlines import ClientDeadlines
from shmserve.frontends.grpc.silent_calls import AwaitedRequests, SilentCalls
from shmserve.frontends.grpc.thread_pools import BoundedPool, Refusals, check_admitted
from shmserve.testing.running_server import WATCHDOG_S, wait_until
from tests.grpc_client import Client, Rig, Sender, request

INFER = "/inference.GRPCInferenceService/ModelInfer"
CHECK = "/grpc.health.v1.Health/Check"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def silent_calls(client: Client, rpc: str, count: int, sender: Sender) -> list[Any]:
    call = client.channel.stream_unary(rpc)
    return [call.future(iter(sender)) for _ in range(count)]


def test_silent_inferences_give_way_to_those_that_wait() -> None:
    with Rig(grpc_threads=2, grpc_silence_s=0.2) as rig:
        sender = Sender()
        silent = silent_calls(rig.client, INFER, 8, sender)
        wait_until(lambda: rig.served.busy == 8, "all are there")
        # grpc_message_timeout_s is longer than this client waits
        assert rig.client.infer(timeout=WATCHDOG_S).outputs
        if rig.engine == "grpcio":
            assert silent[0].code() is grpc.StatusCode.CANCELLED
        else:  # they have no thread that they could give
            assert not any(call.done() for call in silent)
        for call in silent:
            call.cancel()
            sender.close()


def test_places_of_the_longest_silent_go_to_others() -> None:
    with Rig(grpc_max_calls=8, max_caller_share=1, grpc_silence_s=0.2) as rig:
        sender = Sender()
        silent = silent_calls(rig.client, INFER, 8, sender)
        wait_until(lambda: rig.served.busy == 8, "all places are taken")

        def answered() -> bool:
            return rig.client.method("ModelInfer").future(request()).code() is grpc.StatusCode.OK

        wait_until(answered, "one gives way")
        assert 0 < sum(call.done() for call in silent) < 8
        for call in silent:
            call.cancel()
            sender.close()


def test_silent_inferences_that_nobody_minds_are_left() -> None:
    with Rig(grpc_threads=4, grpc_silence_s=0.05) as rig:
        sender = Sender()
        (slow,) = silent_calls(rig.client, INFER, 1, sender)
        for _ in range(20):
            assert rig.client.infer().outputs
        threading.Event().wait(1.5)  # the deadlines are looked at meanwhile
        sender.send(request().SerializeToString())
        sender.close()
        assert slow.result(WATCHDOG_S)


def test_a_caller_at_its_share_costs_others_nothing(tmp_path: Path) -> None:
    gate = threading.Event()
    address = f"unix:{tmp_path}/grpc.sock"
    limits = {"grpc_threads": 2, "grpc_max_calls": 8, "max_caller_share": 0.5}
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
        assert other.infer().outputs  # there are a place and a thread for it
        assert not any(call.done() for call in running)
        gate.set()
        assert all(call.result(WATCHDOG_S).outputs for call in running)


def test_silent_health_checks_do_not_keep_out_a_probe(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/grpc.sock"
    with (
        Rig(also=address, head_timeout_s=300) as rig,
        Client(address) as other,
        Client(rig.target) as neighbour,
    ):
        sender = Sender()
        silent = silent_calls(rig.client, CHECK, 512, sender)
        assert other.method(CHECK)(b"", timeout=WATCHDOG_S)

        def answered() -> bool:  # even the silent ones' own address: they give way
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
def test_an_idle_stream_gives_its_place_to_a_new_one(rpc: str, message: bytes) -> None:
    limits = {"grpc_max_streams": 16, "grpc_stream_silence_s": 0.3, "grpc_small_silence_s": 0.3}
    with Rig(max_caller_share=1, head_timeout_s=300, **limits) as rig:
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


def test_a_stream_that_is_idle_for_very_long_ends() -> None:
    with Rig(grpc_stream_idle_s=0.3) as rig:
        sender = Sender()
        call = rig.client.stream(sender)
        sender.send(request())
        assert next(call).infer_response.outputs
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        sender.close()


class Call:
    """As the book sees one."""

    client_number = 1

    def __init__(self) -> None:
        self.cancelled = False

    def peer(self) -> str:
        return "somebody"

    def cancel(self) -> None:
        self.cancelled = True


def test_the_longest_silent_give_way_first_and_only_beyond_the_grace() -> None:
    silent = SilentCalls(5.0)
    calls = [Call() for _ in range(3)]
    for call in calls:
        silent.wait(call, 60.0)
    now = time.monotonic()
    assert silent.end_overdue(now + 4.0, wanted=3) == 0
    assert silent.end_overdue(now + 6.0, wanted=2) == 2
    assert [call.cancelled for call in calls] == [True, True, False]
    assert silent.end_overdue(now + 61.0, wanted=0) == 1
    assert len(silent) == 0


def test_a_stream_that_works_is_not_silent() -> None:
    silent = SilentCalls(5.0)
    seen: list[int] = []

    def messages() -> Iterator[bytes]:
        seen.append(len(silent))
        yield b"1"
        with awaited.working():
            seen.append(len(silent))
        seen.append(len(silent))

    awaited = AwaitedRequests(messages(), Call(), silent, 60.0)
    assert [*awaited] == [b"1"]
    assert (seen, len(silent)) == ([1, 0, 1], 0)


class Event:
    """What grpcio hands a pool beside the function."""

    def __init__(self, peer: str) -> None:
        self.call = self
        self._peer = peer

    def peer(self) -> bytes:
        return self._peer.encode()


def test_connections_take_turns() -> None:
    refusals = Refusals()
    pool = BoundedPool("p", PoolSize(1, 100), refusals, "full")
    gate, order = threading.Event(), []

    def run(_: object, event: Event) -> None:
        check_admitted()
        assert gate.wait(WATCHDOG_S)
        order.append(event.peer().decode())

    first = pool.submit(run, None, Event("ipv4:1:1"))
    rest = [pool.submit(run, None, Event(f"ipv4:1:{n}")) for n in (1, 1, 1, 2, 2, 3)]
    gate.set()
    for future in (first, *rest):
        future.result(WATCHDOG_S)
    wait_until(lambda: pool.count == 0, "all places are free")
    assert [peer[-1] for peer in order] == ["1", "1", "2", "3", "1", "2", "1"]
    pool.shutdown()
    refusals.shutdown()


def test_addresses_of_one_network_have_one_share() -> None:
    refusals = Refusals()
    pool = BoundedPool("p", PoolSize(4, 4, share=0.5), refusals, "full")
    gate = threading.Event()

    def run(_: object, event: Event) -> None:
        check_admitted()
        assert gate.wait(WATCHDOG_S)

    network, other = "ipv6:%5B2001:db8::{}%5D:1", "ipv6:%5B2001:db8:0:1::1%5D:1"
    calls = [pool.submit(run, None, Event(network.format(n))) for n in (1, 2, 3)]
    calls.append(pool.submit(run, None, Event(other)))
    with pytest.raises(ResourceExhausted, match="max_caller_share"):
        calls.pop(2).result(WATCHDOG_S)
    gate.set()
    for call in calls:
        call.result(WATCHDOG_S)
    pool.shutdown()
    refusals.shutdown()


def test_who_was_free_last_is_next_and_nobody_is_started_in_vain() -> None:
    refusals = Refusals()
    pool = BoundedPool("p", PoolSize(3, 100), refusals, "full")
    both = threading.Barrier(2)

    def together() -> int:
        both.wait(WATCHDOG_S)
        return threading.get_ident()

    pair = [pool.submit(together) for _ in range(2)]
    threads = {future.result(WATCHDOG_S) for future in pair}
    wait_until(lambda: pool.count == 0, "both are free")
    later = []
    for _ in range(20):
        later.append(pool.submit(threading.get_ident).result(WATCHDOG_S))
        wait_until(lambda: pool.count == 0, "it is free")
    assert len(threads) == 2
    assert len(set(later)) == 1
    assert set(later) < threads
    pool.shutdown()
    with pytest.raises(ResourceExhausted, match="is stopping"):
        pool.submit(check_admitted).result(WATCHDOG_S)
    refusals.shutdown()


def test_what_waits_when_a_pool_closes_is_cancelled() -> None:
    refusals = Refusals()
    pool = BoundedPool("p", PoolSize(1, 2), refusals, "full")
    gate = threading.Event()
    running = pool.submit(gate.wait, WATCHDOG_S)
    waiting = pool.submit(gate.wait, WATCHDOG_S)
    refused = pool.submit(check_admitted)
    with pytest.raises(ResourceExhausted, match="full"):
        refused.result(WATCHDOG_S)
    pool.shutdown(wait=False, cancel_futures=True)
    gate.set()
    assert running.result(WATCHDOG_S)
    assert waiting.cancelled()
    refusals.shutdown()


class HeardWhenCancelled:
    """A call at whose end the message of another arrives."""

    client_number = 1

    def __init__(self, book: SilentCalls, other: HeardWhenCancelled | None = None) -> None:
        self.cancelled = False
        self._book = book
        self._other = other

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def cancel(self) -> None:
        self.cancelled = True
        if self._other is not None:
            self._book.heard(self._other)


def test_a_call_that_is_heard_while_others_are_ended_goes_on() -> None:
    book = SilentCalls(0.0)
    heard = HeardWhenCancelled(book)
    first, last = HeardWhenCancelled(book, heard), HeardWhenCancelled(book)
    for call in (first, heard):
        book.wait(call, 60.0)
    assert book.end_overdue(time.monotonic(), 2) == 1
    assert (first.cancelled, heard.cancelled) == (True, False)
    book.heard(first)
    book.wait(last, 60.0)
    assert book.end_overdue(time.monotonic(), 1) == 1, "nobody is thought to be ending still"


class FailsOnce:
    """A pool with a defect."""

    pressed = True
    starved = False

    def __init__(self) -> None:
        self.silent = SilentCalls(0.1)
        self.looks = 0
        self.looked_again = threading.Event()

    def look(self) -> None:
        self.looks += 1
        if self.looks == 1:
            raise RuntimeError("a defect")
        self.looked_again.set()


def test_a_defect_does_not_end_the_look_for_calls_that_are_overdue() -> None:
    pool: Any = FailsOnce()
    deadlines = ClientDeadlines()
    deadlines.start([pool])
    try:
        assert pool.looked_again.wait(30)
    finally:
        deadlines.close()


def test_calls_one_after_the_other_wake_nobody_each() -> None:
    """Whoever looks for those that are overdue looks once a tick while there are calls."""

    class Pool(BoundedPool):
        looks = 0

        def look(self) -> None:
            self.looks += 1
            super().look()

    class Call:
        def add_callback(self, _: Any) -> bool:
            return True

    refusals = Refusals()
    pool = Pool("calls", PoolSize(1, 1), refusals, "busy")
    overdue = ClientDeadlines()
    overdue.start([pool])
    wait_until(lambda: overdue._resting, "nobody is waited for")
    looked, began = pool.looks, time.monotonic()
    for _ in range(100):
        call: Any = Call()
        overdue.expect_taken(call, 30)
        time.sleep(0.001)
        overdue.met(call)
        time.sleep(0.001)
    ticks = (time.monotonic() - began) / client_deadlines._TICK_S
    assert pool.looks - looked <= 2 + 2 * ticks
    overdue.close()
    pool.shutdown()
    refusals.shutdown()
