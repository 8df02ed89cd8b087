"""``python -m shmserve.executor.process.template``: the process that CPU executors are forked
from.

The template has imported the modules that all executors share, and has read the settings. Both
take longer than a fork, and would take memory in each executor. The template loads nothing that
must not be forked: no CUDA, no model's library, no thread. (numpy's BLAS stops its threads before
a fork and starts them again on use.) A socket is the only tie to the supervisor, which alone has
the other end.

The supervisor asks for each executor (`supervisor.processes.executor_template`), and becomes the
parent of the fork (PR_SET_CHILD_SUBREAPER). When the template ends, the supervisor starts another.
Without a template, and for instances on a GPU, executors are exec'ed. Forks share the memory of
the template's imports. Modules that a fork imports take memory in each fork. The template logs
nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys
from contextlib import suppress

import numpy as np
from google.protobuf import descriptor_pb2  # noqa: F401 (protobuf's own, for configurations)
from setproctitle import setproctitle

from shmserve import config, extensions
from shmserve.executor.backends.native import dialect, stream_dialect  # noqa: F401

# Imported for the executors, which use these modules later.
from shmserve.executor.backends.python import python_backend  # noqa: F401
from shmserve.executor.backends.triton import dialect as triton_dialect  # noqa: F401
from shmserve.executor.backends.triton import pb_utils  # noqa: F401
from shmserve.executor.process.__main__ import run_instance

_MESSAGE = 4096


def main() -> int:
    """Fork an executor for each message until the supervisor is gone. In each fork, run the
    executor."""
    parser = argparse.ArgumentParser(prog="shmserve.executor.process.template")
    parser.add_argument("--master-fd", type=int, required=True)
    parser.add_argument("--socket-fd", type=int, required=True)
    arguments = parser.parse_args()
    setproctitle("shmserve: template")
    settings, process = prepare(), ""
    # a killed supervisor breaks or resets the connection
    with socket.socket(fileno=arguments.socket_fd) as supervisor, suppress(ConnectionError):
        process = _next_executor(supervisor)
    return run_instance(process, arguments.master_fd, settings) if process else 0


def prepare() -> config.Settings:
    """Read the settings, and import the extensions that executors would else import."""
    settings = config.load()
    for group in (extensions.FOLDER_READERS, extensions.NATIVE_REQUESTS):
        extensions.load_own(group)
    gc.collect()
    gc.freeze()  # else garbage collections would write to every shared page, and so copy it
    return settings


def _next_executor(supervisor: socket.socket) -> str:
    """Fork executors until the supervisor is gone. Return a process id in each executor, and at
    the end an empty string in the template."""
    supervisor.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(supervisor, _MESSAGE, 2)
        if not data:
            return ""
        parent = os.fork()
        if parent == 0:
            # An orphan becomes a child of the supervisor, which then learns the executor's exit
            # status.
            executor = os.fork()
            if executor == 0:
                return _begin(data.decode(), *fds)
            # the supervisor is gone, which the executor notices itself
            with suppress(OSError):
                supervisor.send(b"%d" % executor)
            os._exit(0)
        os.waitpid(parent, 0)
        for fd in fds:
            os.close(fd)


def _begin(process: str, instance_fd: int, wanted_fd: int) -> str:
    """Make this fork a process of its own, once the supervisor has confirmed its pid."""
    if not os.read(wanted_fd, 1):
        os._exit(1)  # the supervisor has given up, and started another executor
    os.close(wanted_fd)
    os.setpgid(0, 0)
    os.dup2(instance_fd, 0)
    os.close(instance_fd)
    if "numpy.random" in sys.modules:
        np.random.seed()  # else all executors would draw equal random numbers
    return process


if __name__ == "__main__":
    os._exit(main())  # as executors end
