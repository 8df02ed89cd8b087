"""The coordinator registers, distributes and closes CUDA regions; executors are simulated."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.config import Settings
from shmserve.coordinator.regions import cuda_regions, tombstones
from shmserve.coordinator.regions.owners import Owners
from shmserve.coordinator.regions.registrations import RegionRegistrations
from shmserve.coordinator.stats import admin_tables
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import InstanceRecord, Revision, VersionRecord
from shmserve.core.memory.budget import Ledger
from shmserve.core.regions import region_book
from shmserve.core.registry import Region, Snapshot
from shmserve.protocol.control import messages
from shmserve.protocol.control.region_messages import (
    NeedRegion,
    ProbeRegion,
    RegionAnswer,
    RegionGiven,
    RegionProbed,
    RegionsClosed,
    RegionsGone,
    RegisterCudaRegion,
    RegisterRegion,
    StoredRegions,
    UnregisterRegions,
)
from shmserve.shm import registry_page
from shmserve.tensor.spec import ModelSpec
from shmserve.transport.trust.process_identity import started_at

HANDLE = b"0123456789abcdef" * 4
SPEC = ModelSpec("m", "1", "", "python", 0, (), ())
UID = 1000
FAILED = "failed to register shared memory region 'r'"


class World:
    """Regions of a coordinator, one frontend, and an executor on each device."""

    def __init__(self, run_dir: Path, *devices: str, **settings: Any) -> None:
        names = [f"m/1/{index}" for index in range(len(devices))]
        records = [InstanceRecord(n, device=d) for n, d in zip(names, devices, strict=True)]
        self.reconciler = Reconciler(Ledger(1000, 0), 60.0, 60.0)
        self.reconciler.models.load("m", Revision(1, [VersionRecord(SPEC, records)]), 0.0)
        for index, name in enumerate(names):
            self.reconciler.hello(f"executor-{index}", "executor", 10 + index, 0, name, 1.0)
            self.reconciler.loaded(f"executor-{index}", SPEC, f"{index}.sock", 1.0)
        self.sent: list[tuple[str, Any]] = []
        self.published: Snapshot | None = None
        self.watched: list[tuple[int, int]] = []
        owners = Owners(lambda _, process: self.watched.append(process), lambda _: None, True)
        self.gpus = [2]  # results of counting; the last result repeats
        self.regions = RegionRegistrations(
            Settings(**settings), str(run_dir), self.reconciler, self._send, owners, self._count
        )
        self.counted = 0
        self.now = 10.0

    def _send(self, process: str, message: Any, fds: tuple[int, ...]) -> None:
        assert not fds
        message = messages.decode_from_coordinator(messages.encode(message))
        self.sent.append((process, message))

    def _count(self) -> int:
        self.counted += 1
        return self.gpus[min(self.counted, len(self.gpus)) - 1]

    def _publish(self) -> bool:
        book = self.regions.book
        snapshot = Snapshot("e", 1, regions=book.regions, next_region=book.next_number)
        self.published = registry_page._decode(registry_page._encode(snapshot))
        return True

    def say(self, message: Any, process: str = "http-1") -> list[tuple[str, Any]]:
        """Send a message to the coordinator and return its messages."""
        message = messages.decode_to_coordinator(messages.encode(message))
        assert self.regions.handle(process, process.split("-")[0], message, self.now)
        return self.turn()

    def turn(self, seconds: float = 0.0) -> list[tuple[str, Any]]:
        self.now += seconds
        self.regions.tick(self.now)
        self.regions.settle(self._publish, "")
        sent, self.sent = self.sent, []
        return sent

    def register(
        self,
        ticket: int = 1,
        device_id: int = 0,
        byte_size: int = 64,
        again: bool = False,
        name: str = "r",
        process: str = "http-1",
        owner: tuple[int, int] = (0, 0),
        uid: int = UID,
    ) -> list[tuple[str, Any]]:
        message = RegisterCudaRegion(
            ticket, name, HANDLE, device_id, byte_size, uid, *owner, again=again
        )
        return self.say(message, process)

    def names(self) -> list[str]:
        return [region.name for region in self.regions.book.regions.values()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, "cpu", "cuda:1", "cuda:0")
    yield made
    made.regions.close()


def test_an_executor_of_that_device_looks_first(world: World) -> None:
    ((executor, probe),) = world.register(7, device_id=0)
    assert executor == "executor-2"
    assert isinstance(probe, ProbeRegion)
    region = probe.region
    assert (region.handle, region.device_id, region.byte_size) == (HANDLE, 0, 64)
    assert (region.number, world.published, world.names()) == (0, None, [])
    assert world.regions.urgent
    answers = world.say(RegionProbed(probe.ticket, 64), executor)
    assert answers == [("http-1", RegionAnswer(7))]
    assert not world.regions.urgent
    assert world.published is not None
    (region,) = world.published.regions.values()
    assert (region.number, region.name, region.handle, region.kind) == (1, "r", HANDLE, "cuda")


def test_any_gpu_looks_if_that_one_has_no_executor(tmp_path: Path) -> None:
    world = World(tmp_path, "cpu", "cuda:1")
    ((executor, _),) = world.register(device_id=0)
    assert executor == "executor-1"


def test_an_instance_that_fell_back_to_the_cpu_is_not_asked(tmp_path: Path) -> None:
    world = World(tmp_path, "cuda:0", "cuda:0")
    world.reconciler.loaded("executor-0", SPEC, "0.sock", 2.0, device="cpu")
    live = world.reconciler.snapshot("e").models["m"]["1"].instances
    assert [instance.device for instance in live] == ["cpu", "cuda:0"]
    ((executor, _),) = world.register()
    assert executor == "executor-1"


def test_what_the_executor_found_decides(world: World) -> None:
    def probed(**found: Any) -> Any:
        ((executor, probe),) = world.register()
        ((_, answer),) = world.say(RegionProbed(probe.ticket, **found), executor)
        assert HANDLE.decode()[:8] not in str(answer)
        return answer

    told = f"{FAILED}: invalid args: byte_size 64, but the allocation has 63 bytes"
    assert probed(nbytes=63) == RegionAnswer(1, "INVALID_ARGUMENT", told)
    closed = "the handle cannot be opened (is the exporting process alive?)"
    refused = probed(error_code="INVALID_ARGUMENT", error=closed)
    assert refused == RegionAnswer(1, "INVALID_ARGUMENT", f"{FAILED}: invalid args: {closed}")
    assert world.names() == []
    # no executor knows
    assert probed(error_code="UNAVAILABLE", error="no device") == RegionAnswer(1)
    assert world.names() == ["r"]


def test_without_a_gpu_executor_it_is_unproved(tmp_path: Path) -> None:
    world = World(tmp_path, "cpu")
    assert world.register() == [("http-1", RegionAnswer(1))]
    assert world.names() == ["r"]


def test_no_answer_in_time_is_no_refusal(world: World) -> None:
    ((executor, probe),) = world.register()
    assert world.turn(cuda_regions._PROBE_S - 0.1) == []
    assert world.turn(0.2) == [("http-1", RegionAnswer(1))]
    assert world.names() == ["r"]
    late = RegionProbed(probe.ticket, 0, "INVALID_ARGUMENT", "too late")
    assert world.say(late, executor) == []
    assert world.names() == ["r"]


def test_an_executor_that_dies_gives_no_answer(world: World) -> None:
    ((executor, _),) = world.register()
    world.reconciler.gone(executor, world.now)
    world.regions.cuda.gone("executor-1")  # another executor
    assert world.turn() == []
    world.regions.cuda.gone(executor)
    assert world.regions.urgent
    assert world.turn() == [("http-1", RegionAnswer(1))]


def test_only_the_executor_that_was_asked_is_believed(world: World) -> None:
    ((_, probe),) = world.register()
    assert world.say(RegionProbed(probe.ticket, 0), "executor-0") == []
    assert world.names() == []


def test_a_question_that_is_asked_again_is_not_doubled(world: World) -> None:
    ((executor, probe),) = world.register(3)
    assert world.register(3, again=True) == []
    ((other, probe_of_other),) = world.register(3, process="http-2", name="other")
    assert world.say(RegionProbed(probe.ticket, 64), executor) == [("http-1", RegionAnswer(3))]
    answers = world.say(RegionProbed(probe_of_other.ticket, 64), other)
    assert answers == [("http-2", RegionAnswer(3))]
    # the region exists already
    assert world.register(4, again=True) == [("http-1", RegionAnswer(4))]
    ((_, refused),) = world.register(5)
    assert refused.error_code == "ALREADY_EXISTS"
    assert len(world.names()) == 2


def test_of_two_with_one_name_the_first_to_be_looked_at_wins(world: World) -> None:
    ((_, first),) = world.register(1, byte_size=64)
    ((executor, second),) = world.register(2, byte_size=32)
    assert world.say(RegionProbed(second.ticket, 64), executor) == [("http-1", RegionAnswer(2))]
    ((_, refused),) = world.say(RegionProbed(first.ticket, 64), executor)
    assert refused.error_code == "ALREADY_EXISTS"


def test_what_is_refused_before_anybody_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_book, "MAX_REGION_BYTES", 100)
    world = World(tmp_path, "cuda:0", client_shm_max_regions=2)

    def code(**arguments: Any) -> str:
        ((process, answer),) = world.register(**arguments)
        assert process == "http-1"
        return str(answer.error_code)

    assert code(device_id=2) == "INVALID_ARGUMENT"
    assert code(byte_size=101) == "INVALID_ARGUMENT"
    assert code(name="a/b") == "INVALID_ARGUMENT"
    assert code(uid=-1) == "PERMISSION_DENIED"
    for ticket, name in enumerate("ab"):
        ((executor, probe),) = world.register(ticket, name=name)
        world.say(RegionProbed(probe.ticket, 64), executor)
    assert code(name="c") == "RESOURCE_EXHAUSTED"
    assert code(name="a") == "ALREADY_EXISTS"
    off = World(tmp_path, client_shm_mode="off")
    ((_, answer),) = off.register()
    assert answer.error_code == "UNIMPLEMENTED"


def test_quotas_hold_for_those_who_waited(tmp_path: Path) -> None:
    world = World(tmp_path, "cuda:0", client_shm_max_regions=1)
    probes = [world.register(ticket, name=f"r{ticket}")[0] for ticket in (1, 2)]
    answers = [world.say(RegionProbed(p.ticket, 64), executor)[0][1] for executor, p in probes]
    assert [answer.error_code for answer in answers] == ["", "RESOURCE_EXHAUSTED"]


def test_not_everybody_may_wait_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_regions, "_MAX_PARKED", 2)
    for ticket in (1, 2):
        assert isinstance(world.register(ticket, name=f"r{ticket}")[0][1], ProbeRegion)
    ((_, answer),) = world.register(3, name="r3")
    assert answer.error_code == "RESOURCE_EXHAUSTED"
    assert world.turn(5) == [("http-1", RegionAnswer(1)), ("http-1", RegionAnswer(2))]


def test_gpus_are_counted_until_there_are_some(tmp_path: Path) -> None:
    world = World(tmp_path, "cpu")
    world.gpus = [0, 1, 0]
    ((_, answer),) = world.register()
    failed = "failed to register CUDA shared memory region: 'r'"
    assert answer.error == f"{failed}, GPUs not supported"
    for ticket in (2, 3):
        assert world.register(ticket, name=f"r{ticket}") == [("http-1", RegionAnswer(ticket))]
    assert world.counted == 2


@pytest.fixture
def unproved(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, "cpu")
    yield made
    made.regions.close()


def test_executors_get_the_handle_and_no_descriptor(unproved: World) -> None:
    unproved.register()
    ((process, given),) = unproved.say(NeedRegion(5, 1), "executor-0")
    assert (process, given.gone, given.region.handle) == ("executor-0", False, HANDLE)
    unregister = UnregisterRegions(6, "r", UID, "cuda")
    assert unproved.say(unregister) == [("executor-0", RegionsGone((1,)))]
    assert unproved.say(RegionsClosed((1,)), "executor-0") == [("http-1", RegionAnswer(6))]
    assert unproved.published is not None
    assert unproved.published.regions == {}
    ((_, late),) = unproved.say(NeedRegion(7, 1), "executor-0")
    assert (late.gone, late.region.handle) == (True, HANDLE)
    unproved.turn(tombstones._KEEP_S + 1)
    ((_, none),) = unproved.say(NeedRegion(8, 1), "executor-0")
    assert isinstance(none, RegionGiven)
    assert (none.region, none.error_code) == (None, "NOT_FOUND")


@pytest.fixture
def opened(unproved: World) -> World:
    """Two executors have a region open, and the region has been unregistered."""
    unproved.register()
    for name in ("executor-0", "executor-1"):
        unproved.say(NeedRegion(5, 1), name)
    told = unproved.say(UnregisterRegions(6, "r", UID, "cuda"))
    assert ("http-1", RegionAnswer(6)) not in told
    return unproved


def test_unregistering_waits_for_all_who_have_it_open(opened: World) -> None:
    assert opened.say(RegionsClosed((1, 2)), "executor-1") == []
    assert opened.say(RegionsClosed((7,)), "executor-0") == []
    assert opened.regions.urgent
    assert opened.say(RegionsClosed((1,)), "executor-0") == [("http-1", RegionAnswer(6))]
    assert not opened.regions.urgent


def test_unregistering_does_not_wait_for_those_who_could_not_open_it(unproved: World) -> None:
    unproved.register()
    unproved.say(NeedRegion(5, 1), "executor-0")
    unproved.say(RegionsClosed((1,)), "executor-0")
    assert ("http-1", RegionAnswer(6)) in unproved.say(UnregisterRegions(6, "r", UID, "cuda"))


def test_unregistering_does_not_wait_for_the_dead(opened: World) -> None:
    opened.say(RegionsClosed((1,)), "executor-1")
    opened.regions.gone("executor-0")
    assert opened.turn() == [("http-1", RegionAnswer(6))]


def test_unregistering_waits_for_a_second(opened: World) -> None:
    assert opened.turn(0.9) == []
    assert opened.turn(0.2) == [("http-1", RegionAnswer(6))]
    assert opened.say(RegionsClosed((1,)), "executor-0") == []


def test_kinds_are_unregistered_apart(unproved: World) -> None:
    unproved.register()
    assert unproved.say(UnregisterRegions(2, "r", UID)) == [("http-1", RegionAnswer(2))]
    assert unproved.say(UnregisterRegions(3, "", UID, "system")) == [("http-1", RegionAnswer(3))]
    assert unproved.names() == ["r"]
    refused = unproved.say(RegisterRegion(4, "r", "/nosuch", 0, 1, UID, 0, 0))[0][1]
    assert refused.error_code == "INVALID_ARGUMENT"
    unproved.say(UnregisterRegions(5, "", UID, "cuda"))
    assert unproved.names() == []


def test_its_owners_death_ends_it(unproved: World) -> None:
    pid = os.getpid()
    owner = (pid, started_at(pid))
    unproved.register(owner=owner)
    assert unproved.watched == [owner]
    unproved.regions.process_ended(*owner, unproved.now)
    assert unproved.turn() == [("executor-0", RegionsGone((1,)))]
    assert unproved.names() == []


def test_an_owner_that_has_ended_meanwhile_registers_nothing(world: World) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ((executor, probe),) = world.register(owner=(owner.pid, started_at(owner.pid)))
    owner.communicate(b"\n")
    (_, answer), *_ = world.say(RegionProbed(probe.ticket, 64), executor)
    assert "its process has ended" in answer.error
    assert world.names() == []


def test_the_next_coordinator_continues_it(unproved: World, tmp_path: Path) -> None:
    unproved.register()
    assert unproved.published is not None
    successor = World(tmp_path, "cpu")
    successor.regions.restore(unproved.published, successor.now)
    ((_, given),) = successor.say(NeedRegion(5, 1), "executor-0")  # nothing is waited for
    assert given.region.handle == HANDLE
    assert successor.regions.stored(StoredRegions(()), [], successor.now) == []
    assert successor.turn(60) == []
    assert successor.names() == ["r"]
    assert successor.register(1, again=True) == [("http-1", RegionAnswer(1))]
    assert successor.regions.book.next_number == 2


def test_an_executors_death_does_not_blame_it(unproved: World) -> None:
    unproved.register()
    unproved.regions.executor_ended()
    (region,) = unproved.regions.book.regions.values()
    assert region.quarantined == ""


def test_show_tells_kind_and_device_and_no_handle(unproved: World) -> None:
    unproved.register(device_id=1)
    (row,) = admin_tables.region_rows(unproved.regions.book)
    assert (row["kind"], row["device"], row["key"], row["bytes"]) == ("cuda", "cuda:1", "", 64)
    assert not any(isinstance(value, bytes) for value in row.values())
    (part,) = admin_tables.parts(1, [row])
    assert HANDLE not in messages.encode(part)


def test_many_regions_fit_the_registry_and_its_messages() -> None:
    regions = {
        f"{UID}/{number}": Region(
            "n" * 255, number, "", 0, 1 << 40, UID, 1 << 22, 1 << 40,
            kind="cuda", device_id=15, handle=b"\xff" * 64,
        )
        for number in range(1, 4097)
    }  # fmt: skip
    given = messages.encode(RegionGiven(1 << 40, regions[f"{UID}/1"]))
    assert len(given) < 4096
    snapshot = Snapshot("e", 1, regions=regions)
    data = registry_page._encode(snapshot)
    assert len(data) < 1024 * len(regions)
    assert registry_page._decode(data) == snapshot
