"""Streams over lanes, on the executor's side: credit, deadlines, ends of every kind."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.core.registry import Region, Snapshot
from shmserve.core.stats import request_counters
from shmserve.core.stats.counter_pages import UNCOUNTED_WORD
from shmserve.core.stats.request_counters import Reason, RequestCounts
from shmserve.errors import InvalidArgument, ShmserveError, Unimplemented
from shmserve.executor.backend import Output, Request, Response
from shmserve.executor.peers.lane_gate import LaneGate
from shmserve.executor.tensors.request import ExecutorRequest
from shmserve.protocol.control.data_messages import Execute
from shmserve.protocol.control.lane_messages import (
    READ_AHEAD,
    LaneAnswer,
    LaneCancel,
    LaneCredit,
    LaneOutput,
    LaneWindow,
)
from tests.integration.lane_client import RawLane, floats, request
from tests.running_server import wait_until
from tests.unit.executor.test_lane_channels import lane_to
from tests.unit.rig import SPEC, Rig

DECOUPLED = replace(SPEC, decoupled=True)


class Teller:
    """Sends as many numbers as the input says, in a separate thread. Until the request is
    cancelled, input -1 sends nothing, and input -2 sends a number every 10 ms."""

    def __init__(self) -> None:
        self.sent = 0
        self.threads: list[threading.Thread] = []

    def __call__(self, request: Request) -> None:
        thread = threading.Thread(target=self._tell, args=(request,), daemon=True)
        thread.start()
        self.threads.append(thread)

    def _tell(self, request: Request) -> None:
        responses, count = request.responses, int(request.inputs["IN"].numpy()[0])
        while count < 0 and not request.cancelled:
            threading.Event().wait(0.01)
            if count == -2:
                responses.send(answer(0))
        for number in range(count):
            responses.send(answer(number))
            self.sent += 1
        responses.send(None, final=True)


def answer(number: int) -> Response:
    return Response((Output("OUT", "FP32", np.array([number], np.float32)),))


@pytest.fixture
def teller(rig):
    teller = Teller()
    rig.serve(teller, spec=DECOUPLED)
    yield teller
    for thread in teller.threads:
        thread.join(30)
    memory = rig.executors[0].memory
    wait_until(lambda: memory.stats().slots == memory.stats().free, "slots are held")


def numbers(answers: list[LaneAnswer]) -> list[float]:
    return [float(np.frombuffer(a.outputs[0].at, "<f4")[0]) for a in answers]  # type: ignore[arg-type]


def silent(lane: RawLane) -> bool:
    lane.sock.settimeout(0.3)
    try:
        lane.receive()
    except TimeoutError:
        return True
    finally:
        lane.sock.settimeout(30)
    return False


def counts(rig: Rig) -> RequestCounts:
    words = rig.executors[0].lanes._counting._page.words
    wait_until(lambda: not words[UNCOUNTED_WORD], "an answer is not counted")
    return request_counters.read(words).get(("m", "1"), RequestCounts())


def waiting(rig: Rig) -> int:
    """Return the number of requests of all users of lanes."""
    return sum(user.waiting for user in list(rig.executors[0].lanes._users.values()))


def test_answers_come_as_far_as_the_credit_goes(rig: Rig, teller: Teller) -> None:
    with lane_to(rig) as lane:
        lane.send(request(1, floats(7), credit=2))
        answers = [lane.receive() for _ in range(2)]
        assert silent(lane)
        wait_until(lambda: teller.sent == 2, "the model waits")
        lane.send(LaneCredit(1, 1))
        answers.append(lane.receive())
        assert silent(lane)
        for _ in range(4):
            lane.send(LaneCredit(1, 1))
            answers.append(lane.receive())
        assert numbers(answers) == list(range(7))
        assert not any(a.final for a in answers)
        last = lane.receive()
        assert (last.final, last.outputs, last.status, last.number) == (True, (), 200, 1)
        lane.send(LaneCredit(1, 1))  # crosses with the end of the stream
        lane.send(request(1, floats(0), credit=2))
        assert lane.receive().final, "the number is free again"
        found = counts(rig)
        assert (found.succeeded, sum(found.failures)) == (2, 0), "a stream is one request"
        receipts = [a.receipt for a in [*answers, last]]
        assert [r.copied_in for r in receipts] == [4, 0, 0, 0, 0, 0, 0, 0]
        assert found.copied[0] == 4 + 4  # of the second request
        assert found.copied[2] == sum(r.copied_out for r in receipts) > 0


@pytest.mark.parametrize("wrong", [2, 0, -1])
def test_credit_for_what_has_not_come_ends_the_lane_alone(rig, teller, wrong, caplog) -> None:
    with lane_to(rig) as lane, lane_to(rig) as other:
        other.send(request(1, floats(3), credit=1))
        lane.send(request(1, floats(3), credit=1))
        lane.receive()
        lane.send(LaneCredit(5, 100))  # credit for no stream
        lane.send(LaneCredit(1, wrong))
        assert lane.ended()
        assert numbers([other.receive()]) == [0]
        for number in range(1, 3):
            other.send(LaneCredit(1, 1))
            assert numbers([other.receive()]) == [number]
        assert other.receive().final
    if wrong > 0:  # only the stream knows how much was sent
        assert "closing a channel of pid 1: " in caplog.text


def test_a_lane_has_so_much_credit_in_all(rig: Rig, teller: Teller) -> None:
    with lane_to(rig) as lane:
        for number in range(READ_AHEAD):
            lane.send(request(number, floats(2), credit=1))
        lane.send(request(99, floats(2), credit=1))
        answers = [lane.receive() for _ in range(READ_AHEAD + 1)]
        (refused,) = [a for a in answers if a.number == 99]
        assert (refused.status, refused.moved, refused.final) == (503, False, True)
        assert refused.error.startswith("credit: 1 ")
        # The lane is read all the while: credit arrives, and the streams go on
        for number in range(READ_AHEAD):
            lane.send(LaneCredit(number, 1))
        last = [lane.receive() for _ in range(2 * READ_AHEAD)]
        assert sorted(a.number for a in last if a.final) == list(range(READ_AHEAD))
        lane.send(request(99, floats(1), credit=READ_AHEAD))
        assert [lane.receive().final, lane.receive().final] == [False, True]


def test_a_cancelled_stream_ends_and_its_lane_goes_on(rig: Rig, teller: Teller) -> None:
    with lane_to(rig) as lane:
        lane.send(request(1, floats(1000), credit=1))
        lane.receive()
        lane.send(LaneCancel(1))
        last = lane.receive()
        assert (last.code, last.final) == ("CANCELLED", True)
        lane.send(request(2, floats(1), credit=1))
        assert [lane.receive().final, lane.receive().final] == [False, True]
        assert counts(rig).failures[Reason.CANCELLED] == 1


def test_a_program_that_goes_ends_its_streams(rig: Rig, teller: Teller) -> None:
    with lane_to(rig) as lane:
        lane.send(request(1, floats(1000), credit=1))
        lane.receive()
        lane.send(request(2, floats(-1), credit=1))
    wait_until(lambda: counts(rig).failures[Reason.CANCELLED] == 2, "they are counted")


def test_streams_of_a_lane_that_has_ended_count_until_the_model_ends_them(rig_with) -> None:
    """Otherwise a program that opens lanes one after the other has any number of streams."""
    rig, over = rig_with(), threading.Event()
    begun: list[Request] = []

    def stubborn(request: Request) -> None:
        responses = request.responses
        assert over.wait(30)
        responses.send(None, final=True)

    def begin(request: Request) -> None:
        threading.Thread(target=stubborn, args=(request,), daemon=True).start()
        begun.append(request)

    rig.serve(begin, spec=DECOUPLED)
    (executor,) = rig.executors
    most = executor.lanes._limit = 2
    for count in range(most):
        with lane_to(rig) as lane:
            lane.send(request(1, floats(1), credit=1))
            wait_until(lambda: len(begun) > count, "the model does not have it")  # noqa: B023
    with lane_to(rig) as lane:
        wait_until(lambda: not executor.lanes._owners()[7] - 1, "lanes are left")
        lane.send(request(1, floats(1), credit=1))
        refused = lane.receive()
        assert (refused.status, refused.final) == (503, True)
        assert refused.error.startswith("2 requests of this user wait already")
        over.set()
        wait_until(lambda: not waiting(rig), "they count for ever")
        lane.send(request(1, floats(1), credit=1))
        assert lane.receive().status == 200
    wait_until(lambda: not waiting(rig), "it counts for ever")


def test_streams_have_deadlines_as_a_whole(rig: Rig, teller: Teller) -> None:
    with lane_to(rig) as lane:
        for number in (-1, -2):
            lane.send(request(1, floats(number), credit=1, timeout_ns=1_500_000_000))
            last = lane.receive()
            while not last.final:
                lane.send(LaneCredit(1, 1))
                last = lane.receive()
            assert last.code == "DEADLINE_EXCEEDED"
            assert "came too late" in last.error
        assert counts(rig).failures[Reason.DEADLINE] == 2


def test_a_lane_that_is_to_end_does_so_behind_its_streams(rig: Rig, teller: Teller) -> None:
    (executor,) = rig.executors
    with lane_to(rig) as lane, lane_to(rig) as idle:
        lane.send(request(1, floats(3), credit=1))
        assert numbers([lane.receive()]) == [0]
        executor.channels.move_lanes()
        assert idle.ended()
        lane.send(request(2, floats(1), credit=1))
        moved = lane.receive()
        assert (moved.number, moved.moved, moved.status) == (2, True, 503)
        for number in range(1, 3):
            lane.send(LaneCredit(1, 1))
            assert numbers([lane.receive()]) == [number]
        assert lane.receive().final
        assert lane.ended()
        found = counts(rig)
        assert (found.succeeded, sum(found.failures)) == (1, 0), "who moves has not failed"
        with lane_to(rig) as later:
            later.send(request(1, floats(1), credit=1))
            assert numbers([later.receive()]) == [0]


def test_an_executor_ends_behind_its_streams(rig: Rig, teller: Teller) -> None:
    (executor,) = rig.executors
    with lane_to(rig) as lane:
        lane.send(request(1, floats(3), credit=1))
        lane.receive()
        executor.loop.stop()
        for _ in range(2):
            lane.send(LaneCredit(1, 1))
            lane.receive()
        assert lane.receive().final
        assert lane.ended()
        executor.thread.join(30)
        assert not executor.thread.is_alive()


def test_errors_among_answers_and_at_the_end(rig: Rig) -> None:
    def model(request: Request) -> None:
        request.responses.send(answer(0))
        request.responses.send(Response((), error=InvalidArgument("not that one")))
        big = np.zeros(1024, np.float32)
        request.responses.send(Response((Output("OUT", "FP32", big),)))
        request.responses.send(answer(3))
        raise ShmserveError("no more")

    rig.serve(model, spec=DECOUPLED)
    with lane_to(rig) as lane:
        lane.send(request(1, floats(1), credit=READ_AHEAD))
        answers = [lane.receive() for _ in range(5)]
        assert [(a.status, a.final) for a in answers] == [
            *[(200, False), (400, False), (400, False), (200, False)],
            (500, True),
        ]
        assert "no window of shared memory" in answers[2].error
        assert sum(counts(rig).failures) == 1


def test_credit_that_does_not_fit_the_request() -> None:
    mine = Region("mine", 5, "", 0, 4096, uid=1, sealed=True)
    snapshot = Snapshot("cafe0123", 1, regions={"1/mine": mine})
    window = {"outputs": (LaneOutput("OUT", LaneWindow("mine", 0, 4)),)}

    def admit(spec: Any = DECOUPLED, **more: Any) -> tuple[Execute, Any]:
        gate = LaneGate(spec, Settings(stream_timeout_s=600), lambda: snapshot, server_uid=0)
        return gate.admit(Caller(1), request(1, floats(1), **more), 1000)

    for credit, more in ((-1, {}), (READ_AHEAD + 1, {}), (2, window)):
        with pytest.raises(InvalidArgument, match=f"credit: {credit} is not from 1 to"):
            admit(credit=credit, **more)
    with pytest.raises(Unimplemented, match="decoupled transaction policy"):
        admit()
    assert admit(credit=1, **window)[0].credit == 1
    assert admit(SPEC, credit=5)[0].credit == 0, "it has one answer"
    call = admit(credit=3, timeout_ns=5)[1]
    assert (call.credit, call.deadline_ns, call.ends_ns) == (3, 1005, 1005)
    call = admit(credit=3)[1]
    assert call.deadline_ns == 1000 + 60 * 10**9
    call.moved(10**12)
    assert call.deadline_ns == call.ends_ns == 1000 + 600 * 10**9


def test_a_stream_s_model_never_writes_where_its_client_may_read(rig: Rig) -> None:
    """An offered array is no alternative: the previous answer may still lie in the window."""
    offered: list[np.ndarray[Any, Any]] = []

    class Window:
        def offer(self, *_: object) -> None:
            raise AssertionError("the client's memory was offered")

    def model(request: Request) -> None:
        assert isinstance(request, ExecutorRequest)
        assert request.responses is not None
        request.places = {"OUT": Window()}  # type: ignore[dict-item]
        offered.append(request.offer("OUT", "FP32", (4,)))
        request.places = {}
        request.responses.send(None, final=True)

    rig.serve(model, spec=DECOUPLED)
    with lane_to(rig) as lane:
        lane.send(request(1, floats(1), credit=1))
        assert lane.receive().status == 200
    assert offered[0].shape == (4,)
    offered.clear()


def test_streams_go_on_while_another_request_is_read(rig: Rig, monkeypatch) -> None:
    reading, go_on, over = threading.Event(), threading.Event(), threading.Event()
    in_time: list[bool] = []

    def tell(request: Request) -> None:
        while not over.wait(0.1):
            request.responses.send(answer(0))
        request.responses.send(None, final=True)

    def model(request: Request) -> None:
        threading.Thread(target=tell, args=(request,), daemon=True).start()

    rig.serve(model, spec=DECOUPLED)
    workspace = rig.executors[0].loop._workspace
    read = workspace.read

    def slow(frontend: Any, message: Execute) -> Any:
        if message.request == 2:
            reading.set()
            in_time.append(go_on.wait(30))
        return read(frontend, message)

    monkeypatch.setattr(workspace, "read", slow)
    with lane_to(rig) as lane, lane_to(rig) as other:
        lane.send(request(1, floats(0), credit=2))
        lane.receive()
        other.send(request(2, floats(0), credit=1))
        assert reading.wait(30)
        for _ in range(5):  # more than the initial credit
            lane.send(LaneCredit(1, 1))
            lane.receive()
        go_on.set()
        assert other.receive().status == 200
        over.set()
        while not lane.receive().final:
            continue
    assert in_time == [True]
