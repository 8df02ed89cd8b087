"""Device arrays of `shmserve.client`; the server does not know this process's streams."""

import gc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmserve.client import Client
from tests.cuda.stub_server import (
    COUNT,
    NO_GPUS,
    NUMBERS,
    StubServer,
    check_without,
    connected,
    filled,
    warm,
)


def moved(cupy: Any) -> int:
    """Bytes copied to, from or on devices so far."""
    return sum(cupy._queues.copied.values())


def test_arrays_of_the_client_are_passed_in_place(
    fake_cupy: Any, stub: StubServer, stub_client: Client
) -> None:
    warm(stub_client)
    assert stub_client.device_memory()
    x = stub_client.empty(COUNT, np.float32, device=0)
    assert isinstance(x, fake_cupy.ndarray)
    source = fake_cupy.asarray(NUMBERS)
    fake_cupy.cuda.Stream.null.synchronize()
    with fake_cupy.cuda.Stream(non_blocking=True):
        fake_cupy.add(source, 0, out=x)
    before = moved(fake_cupy)
    result = stub_client.infer("double", {"IN": x}, device=0)
    y = result["OUT"]
    assert moved(fake_cupy) == before
    assert isinstance(y, fake_cupy.ndarray)
    np.testing.assert_array_equal(y.get(), NUMBERS * 2)
    part = stub_client.infer("double", {"IN": y[1000:]}, device=0)["OUT"]
    given = stub.documents[-1]["inputs"][0]["parameters"]
    assert given["shared_memory_offset"] == 4000, "results are inputs as they lie there"
    np.testing.assert_array_equal(part.get(), NUMBERS[1000:] * 4)


class OfAnotherLibrary:
    """GPU array of another library, with one of the two protocols."""

    def __init__(self, array: Any, dlpack: bool) -> None:
        if dlpack:
            self.__dlpack__ = array.__dlpack__
            self.__dlpack_device__ = array.__dlpack_device__
        else:
            told = array.__cuda_array_interface__
            self.__cuda_array_interface__ = {**told, "stream": None, "version": 2}


@pytest.mark.parametrize("kind", ["cupy", "strided", "dlpack", "interface"])
def test_other_arrays_are_copied_once(
    fake_cupy: Any, stub: StubServer, stub_client: Client, kind: str
) -> None:
    warm(stub_client)
    assert stub_client.device_memory()
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
    result = stub_client.infer("double", {"IN": value}, device=0)
    assert moved(fake_cupy) - before == 4 * COUNT
    assert "shared_memory_region" in stub.documents[-1]["inputs"][0]["parameters"]
    np.testing.assert_array_equal(result["OUT"].get(), NUMBERS * 2 + 2)


def test_kernels_of_an_earlier_user_end_first(fake_cupy: Any, stub_client: Client) -> None:
    warm(stub_client)
    stream = fake_cupy.cuda.Stream(non_blocking=True)
    for give_out in (
        lambda: stub_client.infer("double", {"IN": NUMBERS * 5}, device=0)["OUT"],
        lambda: stub_client.empty(COUNT, device=0),
    ):
        y = stub_client.infer("double", {"IN": NUMBERS}, device=0)["OUT"]
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


def test_hosts_and_devices_in_any_mixture(fake_cupy: Any, stub_client: Client) -> None:
    x = stub_client.empty(COUNT, device=0)
    filled(x)
    for given in (NUMBERS, x, fake_cupy.asarray(NUMBERS)):
        for _ in range(2):  # the first time the output's size is not known
            y = stub_client.infer("double", {"IN": given})["OUT"]
            assert isinstance(y, np.ndarray)
            np.testing.assert_array_equal(y, NUMBERS * 2)
            z = stub_client.infer("double", {"IN": given}, device=1)["OUT"]
            assert z.device.id == 1
            np.testing.assert_array_equal(z.get(), NUMBERS * 2)


def test_what_is_small_or_no_numbers(fake_cupy: Any, stub: StubServer, stub_client: Client) -> None:
    for dtype, datatype in ((np.int8, "INT8"), (np.bool_, "BOOL"), (ml_dtypes.bfloat16, "BF16")):
        for shape in ((3,), (), (0, 2), (70_000,)):
            x = np.ones(shape, dtype)
            for given in (x, fake_cupy.asarray(x)):
                for _ in range(2):
                    y = stub_client.infer("other", {"IN": given}, device=0)["OUT"]
                    assert isinstance(y, fake_cupy.ndarray)
                    assert (y.shape, y.dtype) == (x.shape, x.dtype)
                    np.testing.assert_array_equal(y.get(), x)
            assert stub.documents[-1]["inputs"][0]["datatype"] == datatype
    with fake_cupy.cuda.Stream(non_blocking=True):
        y = stub_client.infer("other", {"IN": np.ones(3, np.int8)}, device=0)["OUT"]
    assert y.tolist() == [1, 1, 1], "they are there, whatever stream one asks on"
    words = stub_client.infer("words", {"IN": [b"a", b"bc"]}, device=0)["OUT"]
    assert words.tolist() == [b"a", b"bc"], "BYTES stay on the host"


@pytest.mark.parametrize("refusal", [(400, NO_GPUS), (403, "only over a Unix socket"), (501, "")])
def test_a_server_that_takes_no_device_memory(
    fake_cupy: Any, stub: StubServer, stub_client: Client, refusal: tuple[int, str]
) -> None:
    stub.refuse = refusal
    assert not stub_client.device_memory()
    check_without(fake_cupy, stub_client)
    assert stub.registered == 1, "it is not asked again and again"
    assert fake_cupy._fake.used(0) == fake_cupy.get_default_memory_pool().total_bytes()


def test_a_server_that_is_busy_is_asked_again(stub: StubServer, stub_client: Client) -> None:
    stub.refuse = 503, "the coordinator gave no answer"
    assert not stub_client.device_memory()
    stub.refuse, stub.mute = None, True
    assert not stub_client.device_memory()
    assert stub.regions == {}, "what may be registered is unregistered"
    stub.mute = False
    assert stub_client.device_memory()


def test_without_shared_memory(fake_cupy: Any, stub: StubServer) -> None:
    with connected(control="") as client:
        assert not client.device_memory()
        check_without(fake_cupy, client)
    assert stub.registered == 0


def test_a_server_that_has_lost_regions(
    fake_cupy: Any, stub: StubServer, stub_client: Client
) -> None:
    warm(stub_client)
    x = filled(stub_client.empty(COUNT, device=0))
    stub_client.infer("double", {"IN": x}, device=0)
    names = set(stub.regions)
    assert len(names) == 2
    for lost in (sorted(names), sorted(names)[:1]):
        for name in lost:
            del stub.regions[name]
        y = stub_client.infer("double", {"IN": x}, device=0)["OUT"].get()
        np.testing.assert_array_equal(y, NUMBERS * 2)
        assert set(stub.regions) == names, "it was told of them again"
    stub.regions.clear()
    stub.quota = 1
    np.testing.assert_array_equal(stub_client.infer("double", {"IN": x})["OUT"], NUMBERS * 2)
    assert not names & set(stub.regions), "all are given up if one is refused"
    stub.regions.clear()
    stub.quota = 0
    check_without(fake_cupy, stub_client)
    assert not stub_client.device_memory()


def test_a_model_that_cannot_reach_the_device(stub: StubServer, stub_client: Client) -> None:
    text = "CUDA shared memory region 'r' lies on device 0, which device 1 cannot reach"
    warm(stub_client)
    stub.failures = [(400, text)]
    x = filled(stub_client.empty(COUNT, device=0))
    for _ in range(2):
        y = stub_client.infer("double", {"IN": x}, device=0)["OUT"]
        np.testing.assert_array_equal(y.get(), NUMBERS * 2)
        assert "shared_memory_region" not in stub.documents[-1]["inputs"][0]["parameters"]
    stub_client.infer("other", {"IN": x})
    assert "shared_memory_region" in stub.documents[-1]["inputs"][0]["parameters"]


def test_devices_that_are_not_there(
    fake_cupy: Any, stub_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for use in (stub_client.device_memory, lambda d: stub_client.empty(1, device=d)):
        for device in (2, -1):
            with pytest.raises(ValueError, match=f"CUDA device {device} is not there"):
                use(device)
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "none")
    with pytest.raises(ValueError, match="cannot be used: cudaErrorInsufficientDriver"):
        stub_client.infer("double", {"IN": NUMBERS}, device=0)


def test_work_that_fails(
    fake_cupy: Any, stub_client: Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x = stub_client.empty(COUNT, device=0)
    monkeypatch.setenv("FAKE_CUDA_BROKEN", str(tmp_path))
    with pytest.raises(fake_cupy.cuda.runtime.CUDARuntimeError, match="IllegalAddress"):
        stub_client.infer("double", {"IN": x})
    np.testing.assert_array_equal(stub_client.infer("double", {"IN": NUMBERS})["OUT"], NUMBERS * 2)


class Refuses:
    """Array that refuses DLPack, as torch's tensors that require a gradient do."""

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("use tensor.detach()")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    @property
    def __cuda_array_interface__(self) -> object:
        raise RuntimeError("no AttributeError")


def test_arrays_that_cannot_be_passed_on(stub_client: Client) -> None:
    with pytest.raises(ValueError, match=r"input 'IN': use tensor.detach\(\)"):
        stub_client.infer("double", {"IN": Refuses()})
