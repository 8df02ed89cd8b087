"""Device arrays of `shmserve.client`, against a server that knows no streams of this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import shmserve.client
from shmserve.client import Client, InferenceError, api
from tests.cuda.stub_server import NO_GPUS, StubServer

COUNT = 100_000
NUMBERS = np.arange(COUNT, dtype=np.float32)
MIB = 1 << 20


@pytest.fixture
def server(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> StubServer:
    stub = StubServer(fake_cupy)
    monkeypatch.setattr(api, "Transport", lambda *_: stub)
    return stub


def connected(**options: Any) -> Client:
    return shmserve.client.connect("unix:/nowhere", **options)


@pytest.fixture
def client(server: StubServer) -> Iterator[Client]:
    with connected() as client:
        yield client
    assert server.regions == {}


def warm(client: Client) -> None:
    """Let it learn the output's size for inputs like NUMBERS."""
    client.infer("double", {"IN": NUMBERS})


def filled(array: Any) -> Any:
    array.set(NUMBERS)
    return array


def moved(cupy: Any) -> int:
    """Bytes copied to, from or on devices so far."""
    return sum(cupy._queues.copied.values())


def test_arrays_of_the_client_are_passed_in_place(
    fake_cupy: Any, server: StubServer, client: Client
) -> None:
    warm(client)
    assert client.device_memory()
    x = client.empty(COUNT, np.float32, device=0)
    assert isinstance(x, fake_cupy.ndarray)
    source = fake_cupy.asarray(NUMBERS)
    fake_cupy.cuda.Stream.null.synchronize()
    with fake_cupy.cuda.Stream(non_blocking=True):
        x[:] = source
    before = moved(fake_cupy)
    result = client.infer("double", {"IN": x}, device=0)
    y = result["OUT"]
    assert moved(fake_cupy) == before
    assert isinstance(y, fake_cupy.ndarray)
    np.testing.assert_array_equal(y.get(), NUMBERS * 2)
    part = client.infer("double", {"IN": y[1000:]}, device=0)["OUT"]
    given = server.documents[-1]["inputs"][0]["parameters"]
    assert given["shared_memory_offset"] == 4000, "results are inputs as they lie there"
    np.testing.assert_array_equal(part.get(), NUMBERS[1000:] * 4)


class OfAnotherLibrary:
    """An array on a GPU with one of the two protocols."""

    def __init__(self, array: Any, dlpack: bool) -> None:
        if dlpack:
            self.__dlpack__ = array.__dlpack__
            self.__dlpack_device__ = array.__dlpack_device__
        else:
            told = array.__cuda_array_interface__
            self.__cuda_array_interface__ = {**told, "stream": None, "version": 2}


@pytest.mark.parametrize("kind", ["cupy", "strided", "dlpack", "interface"])
def test_other_arrays_are_copied_once(
    fake_cupy: Any, server: StubServer, client: Client, kind: str
) -> None:
    warm(client)
    assert client.device_memory()
    stream = fake_cupy.cuda.Stream(non_blocking=True)
    wide = fake_cupy.empty((COUNT, 2) if kind == "strided" else (COUNT,), np.float32)
    with stream:
        x = wide[:, 1] if kind == "strided" else wide
        x[:] = fake_cupy.asarray(NUMBERS)
    value = OfAnotherLibrary(x, kind == "dlpack") if kind in ("dlpack", "interface") else x
    stream.synchronize()
    before = moved(fake_cupy)
    with stream:
        x += 1
    result = client.infer("double", {"IN": value}, device=0)
    assert moved(fake_cupy) - before == 4 * COUNT
    assert "shared_memory_region" in server.documents[-1]["inputs"][0]["parameters"]
    np.testing.assert_array_equal(result["OUT"].get(), NUMBERS * 2 + 2)


def test_kernels_of_an_earlier_user_end_first(fake_cupy: Any, client: Client) -> None:
    warm(client)
    stream = fake_cupy.cuda.Stream(non_blocking=True)
    for give_out in (
        lambda: client.infer("double", {"IN": NUMBERS * 5}, device=0)["OUT"],
        lambda: client.empty(COUNT, device=0),
    ):
        y = client.infer("double", {"IN": NUMBERS}, device=0)["OUT"]
        address = y.data.ptr
        with stream:
            later = y + 1
        del y
        gc.collect()
        again = give_out()
        assert again.data.ptr == address
        again.fill(7)
        fake_cupy.cuda.Stream.null.synchronize()
        with stream:
            np.testing.assert_array_equal(later.get(), NUMBERS * 2 + 1)


def test_hosts_and_devices_in_any_mixture(fake_cupy: Any, client: Client) -> None:
    x = client.empty(COUNT, device=0)
    filled(x)
    for given in (NUMBERS, x, fake_cupy.asarray(NUMBERS)):
        for _ in range(2):  # the first time the output's size is not known
            y = client.infer("double", {"IN": given})["OUT"]
            assert isinstance(y, np.ndarray)
            np.testing.assert_array_equal(y, NUMBERS * 2)
            z = client.infer("double", {"IN": given}, device=1)["OUT"]
            assert z.device.id == 1
            np.testing.assert_array_equal(z.get(), NUMBERS * 2)


def test_what_is_small_or_no_numbers(fake_cupy: Any, server: StubServer, client: Client) -> None:
    for dtype, datatype in ((np.int8, "INT8"), (np.bool_, "BOOL"), (ml_dtypes.bfloat16, "BF16")):
        for shape in ((3,), (), (0, 2), (70_000,)):
            x = np.ones(shape, dtype)
            for given in (x, fake_cupy.asarray(x)):
                for _ in range(2):
                    y = client.infer("other", {"IN": given}, device=0)["OUT"]
                    assert isinstance(y, fake_cupy.ndarray)
                    assert (y.shape, y.dtype) == (x.shape, x.dtype)
                    np.testing.assert_array_equal(y.get(), x)
            assert server.documents[-1]["inputs"][0]["datatype"] == datatype
    words = client.infer("words", {"IN": [b"a", b"bc"]}, device=0)["OUT"]
    assert words.tolist() == [b"a", b"bc"], "BYTES stay on the host"


def check_without(fake_cupy: Any, client: Client) -> None:
    """No device memory: the same results all the same."""
    warm(client)
    x = filled(client.empty(COUNT, device=0))
    for _ in range(2):
        y = client.infer("double", {"IN": x}, device=0)["OUT"]
        assert isinstance(y, fake_cupy.ndarray)
        np.testing.assert_array_equal(y.get(), NUMBERS * 2)


@pytest.mark.parametrize("refusal", [(400, NO_GPUS), (403, "only over a Unix socket"), (501, "")])
def test_a_server_that_takes_no_device_memory(
    fake_cupy: Any, server: StubServer, client: Client, refusal: tuple[int, str]
) -> None:
    server.refuse = refusal
    assert not client.device_memory()
    check_without(fake_cupy, client)
    assert server.registered == 1, "it is not asked again and again"
    assert fake_cupy._fake.used(0) == fake_cupy.get_default_memory_pool().used_bytes()


def test_a_server_that_is_busy_is_asked_again(server: StubServer, client: Client) -> None:
    server.refuse = 503, "the coordinator gave no answer"
    assert not client.device_memory()
    server.refuse = None
    assert client.device_memory()


def test_without_shared_memory(fake_cupy: Any, server: StubServer) -> None:
    with connected(control="") as client:
        assert not client.device_memory()
        check_without(fake_cupy, client)
    assert server.registered == 0


def test_a_server_that_was_started_anew(fake_cupy: Any, server: StubServer, client: Client) -> None:
    warm(client)
    x = filled(client.empty(COUNT, device=0))
    for _ in range(2):
        server.regions.clear()
        y = client.infer("double", {"IN": x}, device=0)["OUT"]
        np.testing.assert_array_equal(y.get(), NUMBERS * 2)
        assert server.regions
    server.regions.clear()
    server.refuse = 400, NO_GPUS
    check_without(fake_cupy, client)
    np.testing.assert_array_equal(client.infer("double", {"IN": x})["OUT"], NUMBERS * 2)
    assert not server.regions
    assert not client.device_memory()


def test_a_model_that_cannot_reach_the_device(server: StubServer, client: Client) -> None:
    text = "CUDA shared memory region 'r' lies on device 0, which device 1 cannot reach"
    warm(client)
    server.failures = [(400, text)]
    x = filled(client.empty(COUNT, device=0))
    for _ in range(2):
        y = client.infer("double", {"IN": x}, device=0)["OUT"]
        np.testing.assert_array_equal(y.get(), NUMBERS * 2)
    assert len(server.documents) == 1 + 2 + 1, "that model is not sent device memory again"
    client.infer("other", {"IN": x})
    assert "shared_memory_region" in server.documents[-1]["inputs"][0]["parameters"]


def test_devices_that_are_not_there(
    fake_cupy: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for use in (client.device_memory, lambda d: client.empty(1, device=d)):
        for device in (2, -1):
            with pytest.raises(ValueError, match=f"CUDA device {device} is not there"):
                use(device)
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "none")
    with pytest.raises(ValueError, match="cannot be used: cudaErrorInsufficientDriver"):
        client.infer("double", {"IN": NUMBERS}, device=0)
