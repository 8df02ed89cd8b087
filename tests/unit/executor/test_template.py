"""State of executors right after the fork from the template."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shmserve import repository

ROOT = Path(__file__).resolve().parents[3]

LOADED_IN_A_FORK = """
import os, sys
from shmserve.executor.process import template
from shmserve.executor.process import model_loading
from shmserve.executor.devices import Devices
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.shm.mappings import Mappings
template.prepare()
known = set(sys.modules)
assert not {"cupy", "onnxruntime", "torch"} & known
instance = msgpack_decoder(Instance)(sys.stdin.buffer.read())
sys.dont_write_bytecode = True
model_loading.load(instance, Devices.of(instance.device, Mappings()))
new = [name for name in sys.modules if name not in known]
own = [name for name in new if name.startswith(("shmserve", "google", "numpy"))]
assert not own, own
os._exit(0)
"""


@pytest.mark.parametrize("model", ["workers/identity", "workers/add_sub"])
def test_a_model_is_loaded_without_importing_more_of_the_server(model: str) -> None:
    """Each executor imports modules missing in the template, and has a copy in private memory."""
    folder = repository.read_folder(str(ROOT / model))
    (instance, *_) = folder.instances()
    subprocess.run(
        [sys.executable, "-c", LOADED_IN_A_FORK],
        input=msgspec.msgpack.encode(instance),
        check=True,
        timeout=60,
    )
