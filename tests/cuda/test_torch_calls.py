"""Calls of the pytorch backend to a torch with CUDA whose tensors are CuPy's arrays.

This torch has only the functions that the backend calls. tests/torch checks the real torch on a
GPU.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmserve import repository
from shmserve.cuda import device_trials
from shmserve.errors import ConfigError
from shmserve.executor.backend import Context
from shmserve.executor.backends import create, cuda_errors
from shmserve.executor.backends.torch import arguments
from shmserve.grps.executor import torch_inferer
from shmserve.testing.backend_runner import arrays, ask

X = np.arange(4, dtype=np.float32)
CONFIG = """
backend: "pytorch"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] } ]
parameters { key: "ENABLE_CACHE_CLEANING" value { string_value: "true" } }
parameters { key: "DISABLE_CUDNN" value { string_value: "true" } }
"""


class Tensor:
    """On a CuPy array."""

    is_cuda = True

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__dlpack__ = array.__dlpack__
        self.__dlpack_device__ = array.__dlpack_device__

    def detach(self) -> Tensor:
        return self

    resolve_conj = resolve_neg = detach


class Torch:
    """Simulated torch.

    `usable`: it can use a GPU. `emptied`: number of calls that freed its cache.
    """

    __version__ = "2.0"
    version = SimpleNamespace(cuda="12.8")
    inference_mode = no_grad = contextlib.nullcontext
    Tensor = Tensor

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.usable = True
        self.emptied = 0
        self.cuda = SimpleNamespace(
            is_available=lambda: self.usable, empty_cache=self._empty, current_device=lambda: 1
        )
        self.backends = SimpleNamespace(cudnn=SimpleNamespace(enabled=True))
        self.jit = SimpleNamespace(load=self._load)
        self.loaded_on = ""

    def _empty(self) -> None:
        self.emptied += 1

    def _load(self, path: str, map_location: str) -> Any:
        self.loaded_on = map_location
        return Doubling()

    def from_dlpack(self, capsule: Any) -> Tensor:  # type: ignore[valid-type]
        return Tensor(self._cupy.from_dlpack(SimpleCapsule(capsule)))

    def set_num_threads(self, count: int) -> None:
        pass

    set_num_interop_threads = set_num_threads


class SimpleCapsule:
    """CuPy takes exporters, the backend gives a capsule."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


class Doubling:
    def eval(self) -> None:
        pass

    def __call__(self, x: Tensor) -> Tensor:
        return Tensor(x.array * np.float32(2))


@pytest.fixture
def torch(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Torch:
    module = Torch(cupy)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


@pytest.fixture
def context(tmp_path: Path) -> Context:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/1/model.pt").touch()
    (tmp_path / "m/config.pbtxt").write_text(CONFIG)
    spec = repository.read_folder(str(tmp_path / "m")).specs[-1]
    return Context(spec, str(tmp_path / "m"), "m/1/0", "cuda:0", False)


def test_a_model_computes_where_its_input_lies(
    torch: Torch, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = arguments.Signature({"x": 0}, False, {"OUTPUT__0": 0}, frozenset())
    monkeypatch.setattr(arguments, "signature", lambda *_: told)
    backend = create(context.spec)
    spec = backend.load(context)
    assert torch.loaded_on == "cuda:0"
    assert not torch.backends.cudnn.enabled
    array = arrays(ask(backend, spec, x=X))["OUTPUT__0"]
    assert np.array_equal(array.get(), X * 2)
    assert torch.emptied == 1, "after each run, as it was told"
    backend.close()


def test_a_torch_that_sees_no_gpu(torch: Torch, context: Context) -> None:
    torch.usable = False
    with pytest.raises(ConfigError, match="torch cannot use a GPU here"):
        create(context.spec).load(context)
    with pytest.raises(ConfigError, match="torch sees none here"):
        torch_inferer.device_of("cuda:0")
    assert device_trials.torch() == device_trials.LibraryFacts("2.0", "CUDA 12.8", False)


def test_the_device_of_an_error_where_torch_is_alone(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "cupy")
    error = cuda_errors.from_cuda(RuntimeError("CUDA out of memory. Tried to"), "request")
    assert "device 1 has no memory left" in str(error)
    assert torch.emptied == 1
