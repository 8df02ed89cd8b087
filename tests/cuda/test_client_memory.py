"""The client's memory on GPUs: users and lifetimes of blocks, on the fake of CUDA."""

import gc
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from shmserve.client import Client, InferenceError
from shmserve.client.memory.block_pool import BlockPool
from shmserve.client.memory.device_blocks import DeviceBlocks
from tests.cuda.stub_server import (
    COUNT,
    MIB,
    NUMBERS,
    StubServer,
    check_without,
    connected,
    filled,
    warm,
)
from tests.property.test_client_memory import check, steps


class Sizes(Mapping[str, int]):
    """Bytes of the regions that a server knows."""

    def __init__(self, stub: StubServer) -> None:
        self._stub = stub

    def __getitem__(self, name: str) -> int:
        return self._stub.regions[name][1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stub.regions)

    def __len__(self) -> int:
        return len(self._stub.regions)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps)
def test_what_is_referenced_stays_what_it_was(
    fake_cupy: Any, stub: StubServer, steps: list[tuple[str, int]]
) -> None:
    memory = BlockPool(DeviceBlocks(stub, 0), 12 * MIB)  # type: ignore[arg-type]
    check(memory, Sizes(stub), steps, 12 * MIB)
    gc.collect()
    assert fake_cupy._fake.used(0) == 0


def test_memory_is_used_again_with_the_last_reference(
    fake_cupy: Any, stub: StubServer, stub_client: Client
) -> None:
    warm(stub_client)
    kept = []
    for number in range(4):
        x = filled(stub_client.empty(COUNT, device=0))
        y = stub_client.infer("double", {"IN": x}, device=0)["OUT"]
        # a user that keeps none of our arrays
        kept.append(fake_cupy.from_dlpack(y[number : number + 1]))
        del x, y
        gc.collect()
    many = len(stub.regions)
    assert many == 1 + len(kept), "blocks of the results, and that of all inputs"
    assert [one.item() for one in kept] == [0, 2, 4, 6]
    kept.clear()
    gc.collect()
    for _ in range(5):
        stub_client.infer("double", {"IN": fake_cupy.asarray(NUMBERS)}, device=0)
    assert len(stub.regions) == many


def test_no_room(fake_cupy: Any, stub: StubServer) -> None:
    with connected(max_device_bytes=4 * MIB) as small:
        kept = [small.empty(MIB, np.uint8, device=0) for _ in range(5)]
        assert len(stub.regions) == 2
        check_without(fake_cupy, small)
        assert len({array.data.ptr for array in kept}) == 5


def test_what_a_late_answer_may_be_written_to_is_given_up(
    stub: StubServer, stub_client: Client
) -> None:
    warm(stub_client)
    x = stub_client.empty(COUNT, device=0)
    stub_client.infer("double", {"IN": x}, device=0)
    before = set(stub.regions)
    stub.failures = [(0, "the server did not answer in time")]
    with pytest.raises(InferenceError):
        stub_client.infer("double", {"IN": x}, device=0)
    del x
    gc.collect()
    y = stub_client.infer("double", {"IN": stub_client.empty(COUNT, device=0)}, device=0)["OUT"]
    assert not before & set(stub.regions)
    del y


def test_memory_goes_with_its_last_array(fake_cupy: Any, stub: StubServer) -> None:
    client = connected()
    warm(client)
    x = filled(client.empty(COUNT, device=0))
    y = client.infer("double", {"IN": x}, device=0)["OUT"]
    client.close()
    assert stub.regions == {}
    np.testing.assert_array_equal(y.get(), NUMBERS * 2)
    assert fake_cupy._fake.used(0) == 4 * MIB
    del x
    assert fake_cupy._fake.used(0) == 2 * MIB, "although the client is still referenced"
    del y, client
    assert fake_cupy._fake.used(0) == 0


def test_a_client_that_is_closed_meanwhile_gives_no_arrays_of_freed_memory(
    fake_cupy: Any, stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connected()
    warm(client)
    x = client.empty(COUNT, device=0)
    answer = stub._infer

    def closing(*request: Any) -> Any:
        reply = answer(*request)
        client.close()
        return reply

    monkeypatch.setattr(stub, "_infer", closing)
    with pytest.raises(InferenceError, match="given up its memory"):
        client.infer("double", {"IN": x}, device=0)
    del x
    assert fake_cupy._fake.used(0) == 0


def test_memory_of_a_device_is_exported_from_it(
    fake_cupy: Any, stub_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, seen = fake_cupy.cuda.runtime, list[int]()
    export = runtime.ipcGetMemHandle

    def observed(address: int) -> bytes:
        seen.append(runtime.getDevice())
        return bytes(export(address))

    with monkeypatch.context() as patched:
        patched.setattr(runtime, "ipcGetMemHandle", observed)
        stub_client.empty(COUNT, device=1)
    assert seen[0] == 1  # then the server is looked for


@pytest.mark.fake_only
def test_a_child_does_not_undo_its_parents_doing(
    fake_cupy: Any, stub: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connected()
    x = client.empty(COUNT, device=0)
    regions, own = dict(stub.regions), os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: own + 1)
        for use in (client.device_memory, lambda: client.empty(1, device=0)):
            with pytest.raises(RuntimeError, match="fork"):
                use()
        client.close()
        del x
    assert stub.regions == regions
    assert fake_cupy._fake.used(0) == 2 * MIB
