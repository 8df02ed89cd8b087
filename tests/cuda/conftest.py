"""CUDA for the tests: the fake; the stand-in below the real CuPy, if the session runs over it
(tests/cuda/standin.py); or the machine's CUDA with ``--real-cuda``."""

import ctypes
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.client import Client, api
from shmserve.observe import gpus, nvml
from tests.cuda import fake, standin
from tests.cuda.stub_server import StubServer, connected
from tests.servers import Server, only

MODELS = Path(__file__).parents[1] / "repositories" / "cuda"
OURS = ("cupy", "fake_devices", "pynvml")
FAKED = pytest.StashKey[int]()  # how many tests real devices are not asked for


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of the fake on real devices and over the stand-in.

    On real devices no test may load the fake, because its libcuda.so.1 would be found first. Over
    the stand-in, tests that reach into the fake cannot run.
    """
    if standin.active():
        faked = [item for item in items if item.get_closest_marker("fake_only") is not None]
    elif config.getoption("--real-cuda"):
        faked = [item for item in items if _needs_fake(item)]
    else:
        return
    config.stash[FAKED] = len(faked)
    config.hook.pytest_deselected(items=faked)
    items[:] = [item for item in items if item not in faked]


def _needs_fake(item: pytest.Item) -> bool:
    if item.get_closest_marker("fake_cuda") is not None:
        return True
    return bool({"fake_cupy", "compiled"} & set(getattr(item, "fixturenames", ())))


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if FAKED in config.stash:
        why = "need the fake of CUDA (faults, its inside): `make test` runs them"
        terminalreporter.write_line(f"{config.stash.get(FAKED, 0)} tests were left out: they {why}")
    if standin.active():
        why = "kernels that were compiled for devices cannot run here"
        terminalreporter.write_line(f"not run: torch and ONNX Runtime on CUDA, {why}")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Where the fake libcuda.so.1 is kept."""
    assert not request.config.getoption("--real-cuda"), "the test lacks the mark fake_cuda"
    return tmp_path_factory.mktemp("libcuda")


@pytest.fixture(scope="session")
def cuda_environment(request: pytest.FixtureRequest) -> dict[str, str]:
    """Variables for servers and programs that should see CUDA devices."""
    if request.config.getoption("--real-cuda"):
        return {}
    return fake.environment(request.getfixturevalue("compiled"))


def _forget() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in OURS]:
        del sys.modules[name]


@pytest.fixture
def fake_cupy(monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Iterator[Any]:
    """The fake package `cupy` in the test's own process, with a new driver for each test.

    Set FAKE_CUDA_* and CUDA_VISIBLE_DEVICES before requesting this fixture (``getfixturevalue``).
    """
    monkeypatch.setattr(nvml, "_library", nvml._Library())
    monkeypatch.setattr(nvml, "DEADLINE_S", 60.0)
    monkeypatch.setattr(gpus, "_cache", gpus._Cache())
    if standin.active():
        yield from _over_the_standin(monkeypatch)
        return
    # later loads find the library by its name, "libcuda.so.1"
    ctypes.CDLL(str(fake.libcuda(compiled)))
    monkeypatch.syspath_prepend(fake.FOLDER)
    _forget()
    cupy = importlib.import_module("cupy")
    yield cupy
    cupy._fake.shut_down()
    _forget()


@pytest.fixture
def fake_with(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Any]:
    """Return a function that sets FAKE_CUDA_* and returns `fake_cupy`: ``fake_with(PIN="no")``."""

    def make(**settings: object) -> Any:
        for name, value in settings.items():
            monkeypatch.setenv(f"FAKE_CUDA_{name}", str(value))
        return request.getfixturevalue("fake_cupy")

    return make


def _over_the_standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The real CuPy, shared by all tests of the process, with a new driver for each test."""
    books = standin.Books()
    books.reset()
    cupy = standin.imported()
    for name in ("_fake", "_queues"):
        monkeypatch.setattr(cupy, name, books, raising=False)
    monkeypatch.setattr(cupy.cuda, "_available", None)  # asked for once, too
    # Memory that an earlier test still holds must not return to this pool.
    cupy._default_memory_pool = cupy.cuda.MemoryPool()
    cupy.cuda.set_allocator(cupy._default_memory_pool.malloc)
    yield cupy
    monkeypatch.undo()  # faults must not affect the release of memory
    books.reset()
    gc.collect()
    cupy.get_default_pinned_memory_pool().free_all_blocks()


@pytest.fixture
def cupy(request: pytest.FixtureRequest) -> Any:
    """CuPy in the test's own process: the fake, or the installed CuPy with ``--real-cuda``."""
    if not request.config.getoption("--real-cuda"):
        return request.getfixturevalue("fake_cupy")
    module = importlib.import_module("cupy")
    gc.collect()  # arrays of earlier tests: all tests share a process and a device
    module.get_default_memory_pool().free_all_blocks()
    return module


@pytest.fixture(scope="session")
def gpu_server(
    cuda_environment: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[Server]:
    """Server with models on GPUs, shared by tests that do not damage it."""
    models = sorted(folder.name for folder in MODELS.iterdir())
    if request.config.getoption("--real-cuda"):  # the machine may have only one device
        models.remove("plus_one_far")
    with Server(MODELS, cuda_environment, http_workers=1, **only(",".join(models))) as server:
        yield server


@pytest.fixture
def stub(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> StubServer:
    """Server that clients in the test's own process connect to."""
    server = StubServer(fake_cupy)
    monkeypatch.setattr(api, "Transport", lambda *_: server)
    return server


@pytest.fixture
def stub_client(stub: StubServer) -> Iterator[Client]:
    with connected() as client:
        yield client
    assert stub.regions == {}
