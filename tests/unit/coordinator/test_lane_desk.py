"""Lanes: which clients get a lane, to which executor, and when a client is sent elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from shmserve.config import Settings
from shmserve.coordinator.programs.lane_desk import LaneDesk
from shmserve.coordinator.state.publication import Publication
from shmserve.core.caller import Caller
from shmserve.core.live_settings import TraceSettings
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, Snapshot
from shmserve.errors import (
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    TooLarge,
    Unavailable,
    Unimplemented,
)
from shmserve.protocol.control.client_messages import (
    DescribedTensor,
    DescribeModel,
    ModelDescribed,
    OpenLane,
)
from shmserve.protocol.control.link_messages import LaneOffered, LanesOpen, MoveLanes
from shmserve.tensor.spec import TensorSpec
from tests.unit.rig import SPEC

ME, YOU = Caller(1, 10, 100), Caller(2, 20, 200)


def entry(version: str, *processes: str, **changes: Any) -> ModelEntry:
    spec = msgspec.structs.replace(SPEC, version=version, **changes)
    instances = tuple(LiveInstance(f"m/{version}/{p}", p, f"{p}.sock", 1) for p in processes)
    return ModelEntry(spec, ModelState.READY, instances)


class Desk:
    """A desk with a record of the messages it has sent."""

    def __init__(self, *entries: ModelEntry, **settings: Any) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.publication = SimpleNamespace(latest=None)
        self.desk = LaneDesk(
            Settings(max_lanes=4, **settings), cast(Publication, self.publication), self._send
        )
        self.publish(*entries)

    def publish(self, *entries: ModelEntry) -> None:
        models = {"m": {e.spec.version: e for e in entries}} if entries else {}
        self.publication.latest = Snapshot("cafe0123", 1, models=models)
        self.desk.settle()

    def open(self, caller: Caller = ME, version: str = "") -> str:
        """Which process gets the other end."""
        _, lane = self.desk.open(caller, OpenLane("m", version))
        lane.close()
        process, message = self.sent.pop()
        assert message == LaneOffered(caller.uid, caller.pid, caller.started)
        return process

    def moved(self) -> set[str]:
        moved = {process for process, message in self.sent if message == MoveLanes()}
        self.sent.clear()
        return moved

    def _send(self, process: str, message: Any, fds: tuple[int, ...] = ()) -> None:
        assert len(fds) == isinstance(message, LaneOffered)
        self.sent.append((process, message))


@pytest.fixture
def desk():
    return Desk(entry("1", "a", "b"))


def test_lanes_are_spread_and_shared_out(desk: Desk) -> None:
    assert sorted(desk.open() for _ in range(6)) == ["a"] * 3 + ["b"] * 3
    with pytest.raises(ResourceExhausted, match="3 of them this user's"):
        desk.open()
    assert {desk.open(YOU), desk.open(YOU)} == {"a", "b"}
    with pytest.raises(ResourceExhausted):
        desk.open(YOU)
    desk.desk.told("a", LanesOpen((1, 1, 2), ended=True))
    assert [desk.open(YOU), desk.open()] == ["a", "a"]
    desk.desk.gone("b")  # and comes back with another executor's lanes
    assert desk.open() == "b"
    desk.desk.told("b", LanesOpen((1, 1, 1)))
    assert desk.open() == "a"
    with pytest.raises(ResourceExhausted):
        desk.open()


def test_lanes_move_with_what_is_published(desk: Desk) -> None:
    assert {desk.open(), desk.open(YOU)} == {"a", "b"}
    desk.publish(entry("1", "a", "b"))
    assert desk.moved() == set()
    desk.publish(entry("1", "a", "b"), entry("2", "c"))
    assert desk.moved() == {"a", "b"}
    assert desk.open() == "c"
    assert desk.open(version="1") in "ab"
    desk.publish(entry("1", "b"), entry("2", "c"), entry("3", "d"))
    assert "c" in desk.moved()


def test_lanes_from_before_a_restart_move_as_well(desk: Desk) -> None:
    desk.desk.told("a", LanesOpen((1, 1)))
    desk.publish(entry("1", "a", "b"))
    assert desk.moved() == set()
    traced = msgspec.structs.replace(entry("1", "a", "b"), trace=TraceSettings())
    desk.publish(traced)
    assert desk.moved() == {"a"}
    with pytest.raises(Unimplemented, match="traced"):
        desk.open()


def test_models_are_described(desk: Desk) -> None:
    desk.publish(entry("1", "a"), entry("2", "b", decoupled=True))
    ends = ((DescribedTensor("IN", "FP32", (-1,)),), (DescribedTensor("OUT", "FP32", (-1,)),))
    assert desk.desk.describe(DescribeModel("m")) == ModelDescribed("2", *ends, decoupled=True)
    first = desk.desk.describe(DescribeModel("m", "1"))
    assert first == ModelDescribed("1", *ends, decoupled=False)
    with pytest.raises(Unavailable, match="not known yet"):
        desk.desk.describe(DescribeModel("n"))
    desk.publication.latest = msgspec.structs.replace(desk.publication.latest, complete=True)
    with pytest.raises(NotFound, match="'m' version 3 is not found"):
        desk.desk.describe(DescribeModel("m", "3"))
    desk.publish(entry("1", steps=("x",)))
    assert desk.desk.describe(DescribeModel("m")) == first, "although it has no lanes"
    many = (TensorSpec("x" * 250, "FP32", (-1,)),) * 300
    desk.publish(entry("1", "a", inputs=many))
    with pytest.raises(TooLarge, match="the 301 tensors of model 'm' do not fit"):
        desk.desk.describe(DescribeModel("m"))


def test_who_has_none() -> None:
    with pytest.raises(Unimplemented):
        Desk(entry("1", "a", steps=("x",))).open()
    assert Desk(entry("1", "a", decoupled=True)).open() == "a"
    with pytest.raises(PermissionDenied):
        Desk(entry("1", "a"), http_restricted_api=("health,inference:key=x",)).open()
    with pytest.raises(Unavailable):
        Desk(entry("1")).open()
