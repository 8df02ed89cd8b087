"""The client's memory on GPUs: who holds it how long, on the fake of CUDA."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmserve.client
from shmserve.client import Client, InferenceError
from shmserve.client.device_blocks import DeviceBlocks
from shmserve.client.memory import Memory
from tests.cuda.stub_server import StubServer
from tests.property.test_client_memory import check


def test_memory_is_used_again_with_the_last_reference(
    fake_cupy: Any, server: StubServer, client: Client
) -> None:
    warm(client)
    kept = []
    for number in range(4):
        x = filled(client.empty(COUNT, device=0))
        y = client.infer("double", {"IN": x}, device=0)["OUT"]
        kept.append(fake_cupy.from_dlpack(y[number : number + 1]))  # what keeps no array of ours
        del x, y
        gc.collect()
    many = len(server.regions)
    assert many == 1 + len(kept), "blocks of the results, and that of all inputs"
    assert [one.item() for one in kept] == [0, 2, 4, 6]
    kept.clear()
    gc.collect()
    for _ in range(5):
        client.infer("double", {"IN": fake_cupy.asarray(NUMBERS)}, device=0)
    assert len(server.regions) == many


def test_no_room(fake_cupy: Any, server: StubServer, client: Client) -> None:
    with connected(max_device_bytes=4 * MIB) as small:
        kept = [small.empty(MIB, np.uint8, device=0) for _ in range(5)]
        assert len(server.regions) == 2
        check_without(fake_cupy, small)
        assert len({array.data.ptr for array in kept}) == 5


def test_what_a_late_answer_may_be_written_to_is_given_up(
    server: StubServer, client: Client
) -> None:
    warm(client)
    x = client.empty(COUNT, device=0)
    client.infer("double", {"IN": x}, device=0)
    before = set(server.regions)
    server.failures = [(0, "the server did not answer in time")]
    with pytest.raises(InferenceError):
        client.infer("double", {"IN": x}, device=0)
    del x
    gc.collect()
    y = client.infer("double", {"IN": client.empty(COUNT, device=0)}, device=0)["OUT"]
    assert not before & set(server.regions)
    del y


def test_memory_goes_with_its_last_array(fake_cupy: Any, server: StubServer) -> None:
    client = connected()
    warm(client)
    x = filled(client.empty(COUNT, device=0))
    y = client.infer("double", {"IN": x}, device=0)["OUT"]
    client.close()
    assert server.regions == {}
    np.testing.assert_array_equal(y.get(), NUMBERS * 2)
    assert fake_cupy._fake.used(0) == 4 * MIB
    del x
    assert fake_cupy._fake.used(0) == 2 * MIB, "although the client is still referenced"
    del y, client
    assert fake_cupy._fake.used(0) == 0


def test_a_child_does_not_undo_its_parents_doing(
    fake_cupy: Any, server: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connected()
    x = client.empty(COUNT, device=0)
    regions, own = dict(server.regions), os.getpid()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: own + 1)
        for use in (client.device_memory, lambda: client.empty(1, device=0)):
            with pytest.raises(RuntimeError, match="fork"):
                use()
        client.close()
        del x
    assert server.regions == regions
    assert fake_cupy._fake.used(0) == 2 * MIB
