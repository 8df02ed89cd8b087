"""``python -m shmserve.executor.process.template``: the process that CPU executors are forked from.

It has imported what all of them share and read the settings, which takes longer than the fork and
would be in memory once for each, and nothing that must not be forked: no CUDA, no model's library,
no thread. (numpy's BLAS stops its threads before a fork and starts them again where they are used.)
Its end of the socket is its only tie: the supervisor's end is its own.

The supervisor asks for each executor (`supervisor.processes.executor_template`), and takes the fork
as a child of its own (PR_SET_CHILD_SUBREAPER). When the template ends, the supervisor starts
another. Without a template, and for instances on a GPU, executors are exec'ed. Forks share what the
template has imported; what a fork imports or looks up itself is in memory once more. The template
logs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import socket
import sys

import numpy as np
from google.protobuf import descriptor_pb2  # noqa: F401 (protobuf's own, for configurations)
from setproctitle import setproctitle

from shmserve import config, extensions
from shmserve.executor.backends.native import dialect, stream_dialect  # noqa: F401

# For executors, as they come to need them
from shmserve.executor.backends.python import python_backend  # noqa: F401
from shmserve.executor.backends.triton import dialect as triton_dialect  # noqa: F401
from shmserve.executor.backends.triton import pb_utils  # noqa: F401
from shmserve.executor.process.__main__ import run_instance

_MESSAGE = 4096


def main() -> int:
    """Fork an executor for each message until the supervisor is gone; then, in each, run it."""
    parser = argparse.ArgumentParser(prog="shmserve.executor.process.template")
    parser.add_argument("--master-fd", type=int, required=True)
    parser.add_argument("--socket-fd", type=int, required=True)
    arguments = parser.parse_args()
    setproctitle("shmserve: template")
    settings = prepare()
    with socket.socket(fileno=arguments.socket_fd) as supervisor:
        process = _next_executor(supervisor)
    return run_instance(process, arguments.master_fd, settings) if process else 0


def prepare() -> config.Settings:
    """Read the settings, and have all else that executors would import one by one."""
    settings = config.load()
    for group in (extensions.FOLDER_READERS, extensions.NATIVE_REQUESTS):
        extensions.load_own(group)
    gc.collect()
    gc.freeze()  # so that looking for garbage does not write to every page that is shared
    return settings


def _next_executor(supervisor: socket.socket) -> str:
    """Returns in each executor, with its process id, and once here, with nothing: at the end."""
    supervisor.send(b"ready")
    while True:
        data, fds, _, _ = socket.recv_fds(supervisor, _MESSAGE, 2)
        if not data:
            return ""
        parent = os.fork()
        if parent == 0:
            # Nobody's child, so the supervisor's, which takes in orphans: it learns their status.
            executor = os.fork()
            if executor == 0:
                return _begin(data.decode(), *fds)
            with contextlib.suppress(OSError):  # nobody wants it, and it will see that itself
                supervisor.send(b"%d" % executor)
            os._exit(0)
        os.waitpid(parent, 0)
        for fd in fds:
            os.close(fd)


def _begin(process: str, instance_fd: int, wanted_fd: int) -> str:
    """In the executor: become a process of its own, if the supervisor has heard of it."""
    if not os.read(wanted_fd, 1):
        os._exit(1)  # it has given up, and started another
    os.close(wanted_fd)
    os.setpgid(0, 0)
    os.dup2(instance_fd, 0)
    os.close(instance_fd)
    if "numpy.random" in sys.modules:
        np.random.seed()  # else all executors would draw the same numbers
    return process


if __name__ == "__main__":
    os._exit(main())  # as executors end
