"""Process that exports device memory: FP32 numbers counting from `first`."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers import beside

_PROGRAM = """
import sys
import numpy as np
import cupy
device, count, first = map(int, sys.argv[1:])
cuda = cupy.cuda.runtime
cuda.setDevice(device)
pointer = cuda.malloc(4 * count)
values = np.arange(first, first + count, dtype=np.float32)
cuda.memcpy(pointer, values.ctypes.data, values.nbytes, cuda.memcpyHostToDevice)
cuda.deviceSynchronize()
print(cuda.ipcGetMemHandle(pointer).hex(), flush=True)
sys.stdin.readline()
"""


@contextmanager
def exported(
    environment: dict[str, str], count: int = 1024, device: int = 0, first: int = 0
) -> Iterator[tuple[bytes, subprocess.Popen[str]]]:
    """Yield the handle, and the process that owns the memory."""
    words = ("-c", _PROGRAM, str(device), str(count), str(first))
    with beside(*words, environ=os.environ | environment) as (handle, process):
        yield bytes.fromhex(handle), process
