"""The fake's own traps: what goes wrong with a real device must go wrong with it."""

from __future__ import annotations

from typing import Any

import numpy as np

VALUES = np.arange(6, dtype=np.float32)


def test_nothing_has_happened_before_it_is_waited_for(fake_cupy: Any) -> None:
    runtime = fake_cupy.cuda.runtime
    memory = runtime.malloc(VALUES.nbytes)
    host = np.zeros_like(VALUES)
    stream = fake_cupy.cuda.Stream(non_blocking=True)
    runtime.memcpyAsync(memory, VALUES.ctypes.data, VALUES.nbytes, 1, stream.ptr)
    runtime.memcpyAsync(host.ctypes.data, memory, VALUES.nbytes, 2, stream.ptr)
    runtime.streamSynchronize(0)
    assert not host.any()
    stream.synchronize()
    np.testing.assert_array_equal(host, VALUES)
