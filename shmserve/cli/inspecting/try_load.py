"""Trial for ``shmserve check --load``: loads each model once in a separate process, without
serving.

Run as a program (``python -m shmserve.cli.inspecting.try_load``), the module loads the instance
given on standard input. On failure, the program prints the reason.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import msgspec

from shmserve.cli.inspecting import model_code
from shmserve.errors import ShmserveError
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import Instance
from shmserve.transport.processes import describe_status

_MARK = "not loaded: "


def problem(instance: Instance, timeout_s: float) -> str:
    """Return the reason why a model cannot be loaded, or ""."""
    command = [sys.executable, "-m", "shmserve.cli.inspecting.try_load"]
    try:
        done = subprocess.run(
            command, input=messages.encode(instance), capture_output=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return f"the model did not load within {timeout_s:g} s (load_timeout_s)"
    last = done.stdout.decode(errors="replace").rstrip().rpartition("\n")[2]
    if last.startswith(_MARK):
        return last.removeprefix(_MARK)
    if done.returncode:
        return f"the process ended while it loaded the model: {describe_status(done.returncode)}"
    return ""


def main() -> int:
    from shmserve.executor.backends.model_errors import from_load, sanitised
    from shmserve.executor.devices import Devices
    from shmserve.executor.process import model_loading
    from shmserve.observe import log_output, logs
    from shmserve.shm.mappings import Mappings

    logs.setup("check", "error")
    instance = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Instance)
    where = ""
    try:
        try:
            devices = Devices.of(instance.device, Mappings())
            backend, _ = model_loading.load(instance, devices)
            backend.close()
        except Exception as ex:
            where = model_code.place(ex, instance.directory)
            raise from_load(ex, logging.getLogger(__name__), instance.name) from ex
    except ShmserveError as ex:
        log_output.end()  # flushes the model's output first
        print(f"\n{_MARK}{where}{sanitised(ex.message)}", file=sys.__stdout__, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    os._exit(status)  # threads of a model's libraries must not keep the process alive
