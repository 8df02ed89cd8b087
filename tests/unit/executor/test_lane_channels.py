"""An executor's side of lanes, beside the channels of frontends."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.caller import UNKNOWN_CALLER, Caller, caller_number
from shmserve.core.registry import Region, Snapshot
from shmserve.errors import InvalidArgument, NotFound
from shmserve.executor.backend import Output, Request, Response
from shmserve.executor.peers.lane_gate import LaneGate
from shmserve.protocol.control.client_messages import LaneOpened
from shmserve.protocol.control.data_messages import OutputPlace, RegionRef
from shmserve.protocol.control.lane_messages import (
    LaneCancel,
    LaneOutput,
    LaneRequest,
    LaneTensor,
    LaneWindow,
    encode,
)
from shmserve.protocol.control.link_messages import LaneOffered
from shmserve.shm.counter_page import OwnCounterPage
from shmserve.tensor.spec import TensorSpec
from shmserve.transport import deferred_close
from tests.integration.lane_client import RawLane, floats, in_region, request
from tests.running_server import wait_until
from tests.stray_descriptors import lingering, pass_on
from tests.unit.rig import SPEC, Rig


class Model:
    """Doubles the input; the first request waits for `go`."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.seen: list[float] = []

    def __call__(self, request: Request) -> Response:
        x = request.inputs["IN"].numpy()
        self.seen.append(float(x[0]))
        self.begun.set()
        assert self.go.wait(30)
        return Response((Output("OUT", "FP32", x * 2),))


def lane_to(rig: Rig) -> RawLane:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rig.executors[0].channels.offer_lane(LaneOffered(7, 1, 1), theirs.detach())
    return RawLane(ours, LaneOpened("1", "m/1/0", False, 0))


def test_requests_wait_within_bounds_and_end_each_in_its_way(rig: Rig) -> None:
    model = Model()
    rig.serve(model)
    with lane_to(rig) as lane, lane_to(rig) as gone:
        lane.send(request(1, floats(1)))
        assert model.begun.wait(30)
        for number in range(2, 60):
            lane.send(request(number, floats(number)))
        gone.send(request(1, floats(1000)))
        gone.close()
        model.go.set()
        answers = [lane.receive() for _ in range(59)]
        assert [a.number for a in answers] == list(range(1, 60))
        assert [a.outputs[0].at for a in answers] == [
            np.float32(2 * n).tobytes() for n in range(1, 60)
        ]
        model.go.clear()
        model.begun.clear()
        lane.send(request(1, floats(1)))
        assert model.begun.wait(30)
        lane.send(request(2, floats(2), timeout_ns=1))
        lane.send(LaneCancel(1))
        lane.send(LaneCancel(1000))
        model.go.set()
        codes = {a.number: a.code for a in (lane.receive(), lane.receive())}
        assert codes == {1: "", 2: "DEADLINE_EXCEEDED"}


def test_two_requests_of_one_number_end_a_lane_alone(rig: Rig) -> None:
    model = Model()
    rig.serve(model)
    with lane_to(rig) as lane, lane_to(rig) as other, lane_to(rig) as third:
        other.send(request(1, floats(1)))
        assert model.begun.wait(30)
        third.send(request(1, floats(3)))
        for _ in range(2):
            lane.send(request(1, floats(2)))
        model.go.set()
        assert lane.ended()
        assert other.receive().status == third.receive().status == 200


def test_descriptors_end_a_lane_alone(rig: Rig) -> None:
    """As on kernels whose sockets cannot refuse descriptors."""
    model = Model()
    model.go.set()
    rig.serve(model)
    with lane_to(rig) as lane, lane_to(rig) as other, lingering(3) as strays:
        assert lane.ask(request(1, floats(1))).status == 200
        pass_on(lane.sock, encode(request(2, floats(2))), strays[:2])
        with contextlib.suppress(BrokenPipeError):
            pass_on(lane.sock, encode(request(3, floats(2))), strays[2:])
        assert lane.ended()
        assert other.ask(request(1, floats(1))).status == 200


@pytest.fixture
def stuck(monkeypatch) -> Iterator[set[threading.Thread]]:
    """Have no descriptor of a stranger closed before the test ends. The set has the threads that
    wait."""
    threads: set[threading.Thread] = set()
    may_close = threading.Event()

    def slow_close(fd: int) -> None:
        threads.add(threading.current_thread())
        assert may_close.wait(60)
        os.close(fd)

    monkeypatch.setattr(deferred_close, "_close", slow_close)
    yield threads
    may_close.set()
    for thread in list(threads):
        thread.join(60)


def passing(lane: RawLane, fd: int, count: int) -> None:
    """Send a request with descriptors, and wait for the lane's end."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd] * count))]
    lane.sock.sendmsg([encode(request(1, floats(1)))], rights)
    assert lane.ended()


def test_a_user_whose_descriptors_are_stuck_has_one_thread(rig: Rig, stuck, tmp_path) -> None:
    rig.serve(Model())
    with open(tmp_path / "file", "wb") as file:
        for _ in range(3):
            with lane_to(rig) as lane:
                passing(lane, file.fileno(), 1)
                wait_until(lambda: stuck, "a descriptor is being closed")
        assert len(stuck) == 1


def test_lanes_bring_no_more_descriptors_while_many_wait(
    rig: Rig, stuck, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(deferred_close, "_MANY", 4)
    rig.serve(Model())
    with open(tmp_path / "file", "wb") as file, lane_to(rig) as lane, lane_to(rig) as other:
        passing(lane, file.fileno(), 10)
        passing(other, file.fileno(), 100)
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        taken = [link for link in links if os.path.realpath(link) == file.name]
        assert len(taken) == 1 + 10


def test_an_executor_that_ends_answers_what_it_was_sent(rig: Rig) -> None:
    model = Model()
    rig.serve(model)
    (executor,) = rig.executors
    with lane_to(rig) as lane, lane_to(rig) as idle:
        lane.send(request(1, floats(1)))
        assert model.begun.wait(30)
        for number in range(2, 30):
            lane.send(request(number, floats(number)))
        executor.channels.move_lanes()
        model.go.set()
        assert [lane.receive().number for _ in range(29)] == list(range(1, 30))
        assert lane.ended()
        assert idle.ended()
        with lane_to(rig) as later:
            later.send(request(1, floats(1)))
            assert later.receive().status == 200, "it has been told to move, not to end"


def test_a_lane_that_finds_no_descriptor_is_refused_alone(rig: Rig, monkeypatch) -> None:
    model = Model()
    model.go.set()
    rig.serve(model)

    def full(_: OwnCounterPage) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(OwnCounterPage, "reader_fd", full)
        with lane_to(rig) as lane:
            assert lane.ended()
    with lane_to(rig) as lane:
        lane.send(request(1, floats(1)))
        assert lane.receive().status == 200


def test_users_have_their_own_regions_only() -> None:
    settings = Settings()
    mine = Region("mine", 5, "", 0, 4096, uid=1, sealed=True)
    snapshot = Snapshot("cafe0123", 1, regions={"1/mine": mine})
    gate = LaneGate(SPEC, settings, lambda: snapshot, server_uid=0)
    asked = request(1, in_region("mine", 1024))
    execute, _ = gate.admit(Caller(1), asked, 0)
    assert execute.inputs[0].at == RegionRef(5, 0, 4096)
    for uid in (0, 2, -1):
        with pytest.raises(NotFound, match="'mine'"):
            gate.admit(Caller(uid), asked, 0)


def test_sequences_belong_to_the_lanes_user() -> None:
    asked = replace(request(1, floats(1)), parameters={"sequence_id": 5})
    snapshot = Snapshot("cafe0123", 1)
    owners = {}
    for shared in (False, True):
        gate = LaneGate(SPEC, Settings(shared_sequences=shared), lambda: snapshot, server_uid=0)
        execute, _ = gate.admit(Caller(1), asked, 0)
        assert execute.sequence is not None
        owners[shared] = execute.sequence.owner
        execute, _ = gate.admit(Caller(1), request(1, floats(1)), 0)
        assert execute.sequence is None
    assert owners == {False: caller_number("user", "1"), True: UNKNOWN_CALLER}


def test_requests_like_an_earlier_one_are_looked_at_all_the_same() -> None:
    texts = TensorSpec("TEXT", "BYTES", (-1,))
    spec = replace(SPEC, inputs=(*SPEC.inputs, texts))
    mine = Region("mine", 5, "", 0, 4096, uid=1, sealed=True)
    snapshot = Snapshot("cafe0123", 1, regions={"1/mine": mine})
    published = [snapshot]
    gate = LaneGate(spec, Settings(), lambda: published[-1], server_uid=0)
    place = (LaneOutput("OUT", LaneWindow("mine", 0, 4)),)

    def ask(at: object = b"\1\0\0\0a", uid: int = 1, timeout_ns: int = 0, name: str = "OUT") -> Any:
        inputs = (floats(1), LaneTensor("TEXT", "BYTES", (1,), at))  # type: ignore[arg-type]
        outputs = (*place, LaneOutput(name)) if name != "OUT" else place
        asked = LaneRequest(3, inputs, outputs, timeout_ns=timeout_ns)
        return gate.admit(Caller(uid), asked, 0)

    for _ in range(2):
        execute, call = ask()
        assert execute.places == (OutputPlace("OUT", RegionRef(5, 0, 4)),)
        assert [tensor.at.slot for tensor in execute.inputs] == [0, 1]
        assert (len(call.inline), call.copied_in) == (2, 9)
        with pytest.raises(NotFound, match="'mine'"):
            ask(uid=2)
        with pytest.raises(InvalidArgument, match="TEXT"):
            ask(b"\2\0\0\0a")
        with pytest.raises(InvalidArgument, match="'TEXT' has no bytes"):
            ask(None)
        with pytest.raises(InvalidArgument, match="'TEXT' has 4096 bytes"):
            ask(bytes(4096))
        with pytest.raises(InvalidArgument, match="'NONE'"):
            ask(name="NONE")
        with pytest.raises(InvalidArgument, match="timeout_ns: -1"):
            ask(timeout_ns=-1)
    published.append(Snapshot("cafe0123", 2))
    with pytest.raises(NotFound, match="'mine'"):
        ask()


def test_a_lane_that_was_offered_before_the_end_is_served(rig: Rig) -> None:
    model = Model()
    rig.serve(model)
    with lane_to(rig) as first:
        first.send(request(1, floats(1)))
        assert model.begun.wait(30)
        with lane_to(rig) as late:
            late.send(request(1, floats(2)))
            rig.executors[0].loop.stop()
            model.go.set()
            assert late.receive().status == 200
            assert late.ended()
        assert first.receive().status == 200
