"""Host memory registered with the driver (cudaHostRegister), so that copies are one DMA.

Copies of memory that is not registered work as well, through the driver's own buffers: that
is what happens where registering is not permitted, and it is told once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from shmserve.cuda.runtime import text_of

_log = logging.getLogger(__name__)

_WORTH_IT = 64 * 1024  # bytes; smaller copies the driver makes itself as quickly
_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly


class Mapped(Protocol):
    """See `shm.mappings.Mapped`."""

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def writable(self) -> bool: ...


class Mappings(Protocol):
    """What this needs of `shm.mappings.Mappings`."""

    def listen(self, listener: Callable[[Any], None]) -> None: ...

    def find(self, address: int, nbytes: int) -> Mapped | None: ...


class Pins:
    """The mappings of this process, each registered as a whole when a copy first needs it.

    Any thread. `nbytes`: how much is registered.
    """

    def __init__(
        self,
        runtime: Any,
        current: Callable[[], Any],
        mappings: Mappings,
        read_only: bool,
    ) -> None:
        """`read_only`: the device can use memory that this process may not write to."""
        self._runtime = runtime
        self._current = current
        self._mappings = mappings
        self._read_only = read_only
        self._lock = threading.Lock()
        self._pinned: set[int] = set()
        self._refused: set[bool] = set()  # kinds (writable or not) that the driver does not take
        self.nbytes = 0
        mappings.listen(self._unpin)

    def pin(self, address: int, nbytes: int) -> bool:
        """Register the mapping that these bytes lie in; whether it is registered."""
        if nbytes < _WORTH_IT:
            return False
        with self._lock:
            found = self._mappings.find(address, nbytes)
            if found is None:
                return False
            if found.address not in self._pinned:
                if found.writable in self._refused or not self._register(found):
                    return False
                self._pinned.add(found.address)
                self.nbytes += found.size
            return True

    def _unpin(self, mapped: Mapped) -> None:
        with self._lock:
            if mapped.address not in self._pinned:
                return
            self._pinned.discard(mapped.address)
            self.nbytes -= mapped.size
        try:
            with self._current():
                self._runtime.deviceSynchronize()  # no copy is under way when it is given up
                self._runtime.hostUnregister(mapped.address)
        except self._runtime.CUDARuntimeError as ex:
            _log.warning("shared memory was not unpinned: %s", text_of(ex))

    def _register(self, mapped: Mapped) -> bool:
        flags = _PORTABLE if mapped.writable or not self._read_only else _PORTABLE | _READ_ONLY
        try:
            with self._current():
                self._runtime.hostRegister(mapped.address, mapped.size, flags)
        except self._runtime.CUDARuntimeError as ex:
            self._refused.add(mapped.writable)
            _log.warning(
                "%s cannot be pinned, so copies to and from the GPU are slower: %s"
                " (see `shmserve doctor`; locked memory is limited by LimitMEMLOCK or ulimit -l)",
                "writable shared memory" if mapped.writable else "shared memory of frontends",
                text_of(ex),
            )
            return False
        return True
