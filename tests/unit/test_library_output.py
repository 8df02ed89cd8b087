"""Libraries whose C code writes to standard error, past the log."""

import os
import subprocess
import sys

import pytest

from tests.running_server import WATCHDOG_S

# gRPC's core reports an address in use.
PROGRAM = """
import os, socket
from concurrent.futures import ThreadPoolExecutor
from shmserve import library_telemetry
library_telemetry.switch_off(os.environ)
import grpc
with socket.create_server(("127.0.0.1", 0)) as taken:
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    try:
        server.add_insecure_port("127.0.0.1:%d" % taken.getsockname()[1])
    except RuntimeError:
        print("refused")
"""


@pytest.mark.parametrize("permitted", [False, True])
def test_grpcs_core_writes_nothing_unless_it_is_permitted(permitted: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    if permitted:
        environ["GRPC_VERBOSITY"] = "ERROR"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, env=environ, timeout=WATCHDOG_S
    )
    assert ended.stdout == b"refused\n", ended.stderr
    assert (b"Failed to add port" in ended.stderr) == permitted
    assert bool(ended.stderr) == permitted
