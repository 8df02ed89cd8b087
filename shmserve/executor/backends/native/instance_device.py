"""Instance device: gives a native model its tensors on the instance's GPU."""

from __future__ import annotations

import threading
from typing import Any

from shmserve.core.device_names import ordinal_of
from shmserve.executor.backend import Context, Request
from shmserve.tensor.dtypes import DATATYPES


class InstanceDevice:
    """GPU of the instance, for any thread of the model."""

    def __init__(self, context: Context) -> None:
        ordinal = ordinal_of(context.device)
        assert ordinal is not None
        self._cuda = context.xp.cuda
        self._empty = context.xp.empty
        self._ordinal = ordinal
        self._threads = threading.local()

    def input(self, request: Request, name: str) -> Any:
        """Return a numeric input as a CuPy array."""
        self._choose()
        return request.inputs[name].on_device()

    def output(self, request: Request, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        """Return a CuPy array for an output. Outputs that were not requested get device memory,
        too."""
        self._choose()
        if name in request.requested:
            return request.offer_on_device(name, datatype, shape)
        return self._empty(shape, DATATYPES[datatype].numpy)

    def _choose(self) -> None:
        """Make the instance's GPU current in this thread. New threads begin on CUDA's first
        device."""
        if not hasattr(self._threads, "chosen"):
            self._cuda.Device(self._ordinal).use()
            self._threads.chosen = True
