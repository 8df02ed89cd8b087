"""Placement of instances on devices, from config.pbtxt to the current device of the model's code.

Only on the fake, which has several devices and MIG devices.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from shmserve import config, repository
from shmserve.cli.inspecting import try_load
from shmserve.errors import Internal
from shmserve.executor.devices import Devices
from shmserve.executor.process import model_loading
from shmserve.shm.mappings import Mappings
from tests.cuda import fake
from tests.model_files import model_maker
from tests.servers import run_shmserve

pytestmark = pytest.mark.fake_cuda

MIG = ["MIG-fa4ec0da-1111-1111-1111-111111110102", "MIG-fa4ec0da-1111-1111-1111-111111110203"]
CONFIG = """
backend: "python"
input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { %s } ]
model_warmup [
  { name: "w" inputs { key: "A" value { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } }
]
"""
# Fails to load, with the current device and the visible devices as error text
MODEL = """
import cupy

class Model:
    def __init__(self, context):
        cuda = cupy.cuda.runtime
        on = cuda.getDevice()
        uuid = cuda.getDeviceProperties(on)["uuid"].hex()[-3:]
        self.found = f"device {on} of {cuda.getDeviceCount()}, {uuid}"

    def infer(self, request):
        raise ValueError(self.found)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(model_maker(tmp_path)(MODEL))


def check(folder: Path, groups: str, environment: dict[str, str]) -> list[str]:
    """The lines of `shmserve check --load`."""
    (folder / "config.pbtxt").write_text(CONFIG % groups)
    environ = os.environ | environment | {"SHMSERVE_MODEL_REPOSITORY": str(folder.parent)}
    done = run_shmserve("check", "--load", environ=environ)
    return [line for line in done.stdout.splitlines() if " model m" in line]


def test_check_loads_a_model_on_its_device(folder: Path, compiled: Path) -> None:
    environment = fake.environment(compiled)
    (line,) = check(folder, "kind: KIND_GPU gpus: [1]", environment)
    assert line.endswith("device 1 of 2, 201")
    environment["CUDA_VISIBLE_DEVICES"] = "1"
    (line,) = check(folder, "kind: KIND_GPU", environment)
    assert line.endswith("device 0 of 1, 201")
    assert check(folder, "kind: KIND_GPU gpus: [1]", environment) == [
        f"FAIL  model m: model 'm': instance_group.gpus has 1, but there is 1 device (0) [{folder}]"
    ]


def test_an_instance_on_a_mig_device_sees_it_alone(
    folder: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fake.environment(compiled, mig="0,1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(MIG))
    (line,) = check(folder, "kind: KIND_GPU", {})
    assert line.endswith("device 0 of 1, 102")
    (folder / "config.pbtxt").write_text(CONFIG % "kind: KIND_CPU")
    (instance,) = repository.read_folder(str(folder)).instances()
    second = structs.replace(instance, device="cuda:1")
    assert try_load.problem(second, config.Settings())[0].endswith("device 0 of 1, 203")


def test_one_that_cannot_use_its_mig_device_copies_from_there(
    request: pytest.FixtureRequest, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fake.environment(compiled, mig="0,1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(MIG))
    devices = Devices.of("cuda:1", Mappings())
    request.getfixturevalue("fake_cupy")
    devices.ordinal = None  # as `loading` finds
    assert devices.open(1).ordinal == 0  # the process sees no other device


def test_a_host_without_devices(folder: Path, compiled: Path) -> None:
    none = fake.environment(compiled, devices="none")
    (line,) = check(folder, "kind: KIND_GPU", none)
    assert line.endswith(
        "instance_group.kind KIND_GPU needs a CUDA device, and none is visible to the server"
        f" [{folder}]"
    )


def test_a_warm_up_that_costs_the_device_is_a_failed_load(
    folder: Path, fake_with: Callable[..., object]
) -> None:
    broken = folder / "broken"
    fake_with(BROKEN=broken)
    (folder / "config.pbtxt").write_text(CONFIG % "kind: KIND_CPU")
    (folder / "1" / "model.py").write_text(
        "class Model:\n"
        "    def infer(self, request):\n"
        f"        open({str(broken)!r}, 'w').close()\n"
        "        return {'B': request.input('A')}\n"
    )
    (instance,) = repository.read_folder(str(folder)).instances()
    with pytest.raises(Internal, match="cudaErrorIllegalAddress"):
        model_loading.load(structs.replace(instance, device="cuda:0"), Devices(0, Mappings()))
