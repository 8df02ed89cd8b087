"""State of executors right after the fork from the template."""

import socket
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


@pytest.mark.parametrize("early", [True, False])
def test_a_template_whose_supervisor_was_killed_ends_without_a_word(early: bool) -> None:
    supervisor, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "shmserve.executor.process.template"]
    command += ["--master-fd", "0", "--socket-fd", str(end.fileno())]
    if early:
        supervisor.close()
    pipe = subprocess.PIPE
    with subprocess.Popen(command, pass_fds=[end.fileno()], stderr=pipe) as process:
        end.close()
        if not early:
            supervisor.settimeout(60)
            assert supervisor.recv(10, socket.MSG_PEEK) == b"ready"  # stays unread: a reset
            supervisor.close()
        _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (0, b"")
