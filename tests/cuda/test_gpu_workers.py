"""The shipped workers for GPUs answer alike on a GPU and on the CPU."""

from typing import Any

import numpy as np
import pytest

from shmserve.errors import InvalidArgument
from tests.backend_runner import FakeBackendRequest, arrays, ask, failure, load

RANDOM = np.random.default_rng(5)


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_gpu_add_sub(cupy: Any, device: str, size: int) -> None:
    a, b = RANDOM.random((2, size), np.float32)
    backend, _ = load("workers/gpu_add_sub", device)
    assert backend.reads_on_device == (device != "cpu")
    request = FakeBackendRequest(("OUTPUT0", "OUTPUT1"), INPUT0=a, INPUT1=b)
    got = arrays(backend.execute([request])[0])
    assert all(got[name] is request.offered[name] for name in got)
    assert got["OUTPUT0"].tolist() == (a + b).tolist()
    assert got["OUTPUT1"].tolist() == (a - b).tolist()


def test_gpu_add_sub_wants_vectors_of_one_length() -> None:
    backend, spec = load("workers/gpu_add_sub")
    error = failure(ask(backend, spec, INPUT0=np.ones(2, np.float32), INPUT1=np.ones(1, "f4")))
    assert isinstance(error, InvalidArgument)
    assert error.message == "INPUT0 has 2 elements, INPUT1 has 1"


def test_gpu_classifier(cupy: Any) -> None:
    """On both devices, from the host and from a GPU's memory: the same probabilities."""
    image = RANDOM.random((3, 224, 224), np.float32)
    backend, spec = load("workers/gpu_classifier")
    expected = arrays(ask(backend, spec, image=image))["probabilities"]
    assert isinstance(expected, np.ndarray)
    assert expected.sum() == pytest.approx(1, abs=1e-4)
    assert expected.std() > 1e-4  # the model tells the classes apart
    other = arrays(ask(backend, spec, image=image[:, ::-1]))["probabilities"]
    assert not np.allclose(other, expected, rtol=1e-2)
    backend, spec = load("workers/gpu_classifier", "cuda:0")
    for given in (image, cupy.asarray(image)):
        got = arrays(ask(backend, spec, image=given))["probabilities"]
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_allclose(got.get(), expected, rtol=1e-3, atol=1e-6)
