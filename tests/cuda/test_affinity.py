"""Requests go to the GPU that has their memory, if that GPU has an instance."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shmserve.core.region_kinds import CUDA
from shmserve.core.registry import ModelEntry, Region, Snapshot
from shmserve.dispatch.pool.executor_connection import ExecutorConnection
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.errors import QueueFull
from shmserve.protocol.control.data_messages import Execute, OutputPlace, RegionRef, WireTensor
from tests.unit.rig import SPEC, Rig

DEVICES = ("cpu", "cuda:0", "cuda:1", "cuda:1")


def region(number: int, device: int) -> Region:
    kind = CUDA if device >= 0 else "system"
    return Region(f"r{number}", number, "", 0, 1 << 20, 0, kind=kind, device_id=max(device, 0))


def asking(inputs: tuple[tuple[int, int], ...] = (), output: int = 0) -> Execute:
    """A request; `inputs` are region and bytes, `output` is a region."""
    tensors = tuple(
        WireTensor(f"IN{i}", "UINT8", (nbytes,), RegionRef(number, 0, nbytes))
        for i, (number, nbytes) in enumerate(inputs)
    )
    places = (OutputPlace("OUT", RegionRef(output, 0, 64)),) if output else ()
    return Execute(1, "", tensors, (), {}, 0, 0, places=places)


class Instances:
    """Instances, one on each of DEVICES, and their connections."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        entry = rig.serve(*[lambda request: None] * len(DEVICES))
        instances = tuple(
            msgspec.structs.replace(instance, device=device)
            for instance, device in zip(entry.instances, DEVICES, strict=True)
        )
        self.entry = msgspec.structs.replace(entry, instances=instances)
        self.taken: list[tuple[ExecutorPool, ExecutorConnection]] = []
        self.publish(region(1, -1), region(2, 0), region(3, 1), region(4, 5))

    def publish(self, *regions: Region) -> None:
        models: dict[str, dict[str, ModelEntry]] = {SPEC.name: {"1": self.entry}}
        known = {f"0/{region.name}": region for region in regions}
        self.rig.writer.publish(Snapshot("cafe0123", 0, models, complete=True, regions=known))

    def device(self, message: Execute) -> str:
        """Return the device that a request is sent to; the connection stays taken."""
        pool, connection, _ = self.rig.dispatcher.executors.connect(self.entry, set(), message)
        self.taken.append((pool, connection))
        return pool.instance.device

    def give_back(self) -> None:
        for pool, connection in self.taken:
            pool.give(connection)
        self.taken = []


@pytest.fixture
def instances(tmp_path: Path) -> Iterator[Instances]:
    rig = Rig(tmp_path, max_queue=2)
    made = Instances(rig)
    yield made
    made.give_back()
    rig.close()


def test_the_device_with_the_memory_is_preferred(instances: Instances) -> None:
    for message, device in (
        (asking(((2, 64),)), "cuda:0"),
        (asking(((3, 64),)), "cuda:1"),
        (asking(output=3), "cuda:1"),
        (asking(((2, 65),), output=3), "cuda:0"),  # most of the data
        (asking(((2, 63),), output=3), "cuda:1"),
        (asking(((1, 1 << 20), (3, 1))), "cuda:1"),  # host memory is near to all
    ):
        assert instances.device(message) == device
        instances.give_back()


def test_the_least_loaded_of_that_device_is_taken_and_then_any(instances: Instances) -> None:
    message = asking(((3, 64),))
    assert [instances.device(message) for _ in range(4)] == ["cuda:1"] * 4
    assert len({peer for peer, _ in instances.taken}) == 2
    others = [instances.device(message) for _ in range(4)]
    assert sorted(others) == ["cpu", "cpu", "cuda:0", "cuda:0"]
    with pytest.raises(QueueFull):
        instances.device(message)


def test_other_requests_go_to_the_least_loaded(instances: Instances) -> None:
    for message in (asking(), asking(((1, 64),)), asking(((4, 64),)), asking(((9, 64),))):
        assert sorted(instances.device(message) for _ in DEVICES) == sorted(DEVICES)
        instances.give_back()


def test_a_new_registration_is_known(instances: Instances) -> None:
    assert instances.device(asking(((7, 64),))) == "cpu"  # the first, all being idle
    instances.give_back()
    instances.publish(region(7, 1))
    assert instances.device(asking(((7, 64),))) == "cuda:1"
