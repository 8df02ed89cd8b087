"""The client's memory: no block ever has two users, in whatever order arrays die."""

import gc
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.client.memory.block_pool import BlockPool, size_class
from shmserve.client.memory.host_blocks import HostBlocks
from shmserve.errors import ResourceExhausted, Unavailable

LIMIT = 512 * 1024


class FakeServer:
    """Server that records registered regions and refuses more than `quota`."""

    def __init__(self, quota: int = 1000) -> None:
        self.regions: dict[str, int] = {}
        self.quota = quota
        self.there = True

    def register(self, name: str, byte_size: int, fd: int) -> None:
        if not self.there:
            raise Unavailable("gone")
        if len(self.regions) >= self.quota:
            raise ResourceExhausted("too many")
        assert os.fstat(fd).st_size == byte_size
        self.regions[name] = byte_size

    def unregister(self, names: list[str]) -> None:
        for name in names:
            del self.regions[name]


steps = st.lists(
    st.tuples(st.sampled_from(["make", "view", "drop", "taint"]), st.integers(0, 100_000)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_what_is_referenced_stays_what_it_was(steps: list[tuple[str, int]]) -> None:
    server = FakeServer()
    check(BlockPool(HostBlocks(server), LIMIT), server.regions, steps, LIMIT)  # type: ignore[arg-type]


def check(
    memory: BlockPool, regions: Mapping[str, int], steps: list[tuple[str, int]], limit: int
) -> None:
    """Take steps and check all arrays after each. `regions`: bytes by name, as the server knows
    them."""
    live: list[tuple[Any, int]] = []
    for count, (what, number) in enumerate(steps):
        if what == "make":
            nbytes = number + 1
            block = memory.acquire(nbytes)
            if block is not None:
                array = memory.array(block, 0, nbytes)
                array[:] = count % 251
                live.append((array, count % 251))
                memory.release(block)
        elif live:
            array, value = live[number % len(live)]
            if what == "view":  # a user may keep a view instead of the array
                live[number % len(live)] = (array[len(array) // 2 :].view(np.int8)[:], value)
            elif what == "taint":
                found = memory.find(array)
                if found is not None:
                    memory.taint([found[0]])
            else:
                del live[number % len(live)]
            del array
        assert all(holds(kept, value) for kept, value in live)
        assert memory.total_bytes <= limit
        assert sum(regions.values()) == memory.total_bytes
    addresses = {found[0].address for kept, _ in live if (found := memory.find(kept))}
    assert len(addresses) == sum(1 for kept, _ in live if kept.nbytes)
    memory.close()
    assert not regions
    assert all(holds(kept, value) for kept, value in live)


def holds(array: Any, value: int) -> bool:
    """Return True if an array, numpy's or CuPy's, is full of one value."""
    host = array if isinstance(array, np.ndarray) else array.get()
    return bool((host.view(np.uint8) == value).all())


def test_memory_is_used_again() -> None:
    server = FakeServer()
    memory = BlockPool(HostBlocks(server), LIMIT)  # type: ignore[arg-type]
    seen = set()
    for _ in range(5):
        block = memory.acquire(20_000)
        assert block is not None
        array = memory.array(block, 0, 20_000)
        memory.release(block)
        seen.add(block.name)
        del array
        gc.collect()
    assert len(seen) == 1 == len(server.regions)
    memory.close()


def test_what_the_server_may_still_write_to_is_given_up() -> None:
    server = FakeServer()
    memory = BlockPool(HostBlocks(server), LIMIT)  # type: ignore[arg-type]
    block = memory.acquire(10)
    assert block is not None
    memory.taint([block])
    memory.release(block)
    other = memory.acquire(10)
    assert other is not None
    assert other.name != block.name
    assert list(server.regions) == [other.name]
    memory.close()


def test_blocks_are_tainted_at_any_moment() -> None:
    """`taint` must also work from a finalizer that runs while the pool holds its lock."""
    memory = BlockPool(HostBlocks(FakeServer()), LIMIT)  # type: ignore[arg-type]
    block = memory.acquire(10)
    assert block is not None
    with memory._lock:
        thread = threading.Thread(target=memory.taint, args=([block],))
        thread.start()
        thread.join(60)
        waits = thread.is_alive()
    thread.join()
    assert not waits
    memory.release(block)
    other = memory.acquire(10)
    assert other is not None
    assert other.name != block.name
    memory.close()


def test_unused_blocks_make_room_for_others() -> None:
    server = FakeServer()
    memory = BlockPool(HostBlocks(server), 100 * 1024)  # type: ignore[arg-type]
    first = memory.acquire(64 * 1024)
    assert first is not None
    assert memory.acquire(64 * 1024) is None, "there is no room for two"
    memory.release(first)
    second = memory.acquire(80 * 1024)
    assert second is not None
    assert list(server.regions) == [second.name]
    memory.close()
    assert memory.acquire(1) is None


def test_quota_of_the_server() -> None:
    server = FakeServer(quota=1)
    memory = BlockPool(HostBlocks(server), LIMIT)  # type: ignore[arg-type]
    first = memory.acquire(1)
    assert first is not None
    assert memory.acquire(1) is None
    memory.release(first)
    assert memory.acquire(100_000) is not None, "the unused block counted towards the quota"
    server.there = False
    assert memory.acquire(200_000) is None
    memory.close()


@pytest.mark.parametrize("nbytes", [1, 16384, 16385, 65536, 65537, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_size_classes_waste_at_most_a_quarter(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size
    assert size <= max(16384, nbytes * 1.25 + 1)
    assert size_class(size) == size


def test_blocks_cannot_change_their_size() -> None:
    memory = BlockPool(HostBlocks(FakeServer()), LIMIT)  # type: ignore[arg-type]
    block = memory.acquire(1)
    assert block is not None
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(block.fd, size)  # type: ignore[attr-defined]
    memory.close()
