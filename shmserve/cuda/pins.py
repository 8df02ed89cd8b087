"""Host memory registered with the driver (cudaHostRegister), so that copies are one DMA.

Copies of memory that is not registered work as well, through the driver's own buffers: that
is what happens where registering is not permitted, and it is told once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
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
        self._pinned: dict[int, float] = {}  # by address, when a copy was last begun
        self._refused: set[int] = set()  # addresses of those that the driver does not take
        self._told: set[bool] = set()  # kinds (writable or not) of which one was refused
        self.nbytes = 0
        mappings.listen(self._unpin)

    @contextlib.contextmanager
    def pinned(self, address: int, nbytes: int) -> Iterator[bool]:
        """Begin a copy from or to these bytes in here: the mapping that they lie in stays
        registered until the copy is over, if it can be; whether it is."""
        with self._lock:
            if self._pin(address, nbytes):
                yield True
                return
        yield False

    def trim(self, idle_s: float) -> None:
        """Let go of mappings of peers that were not copied from for so long. What a peer frees
        is the system's again once nobody has it pinned, and that it was freed is told with the
        next request only."""
        before = time.monotonic() - idle_s
        with self._lock:
            pinned = list(self._pinned.items())
        for address, used in pinned:
            mapped = self._mappings.find(address, 1) if used <= before else None
            if mapped is not None and not mapped.writable:
                self._unpin(mapped)

    def _pin(self, address: int, nbytes: int) -> bool:
        if nbytes < _WORTH_IT:
            return False
        found = self._mappings.find(address, nbytes)
        if found is None:
            return False
        if found.address not in self._pinned:
            if found.address in self._refused or not self._register(found):
                return False
            self.nbytes += found.size
        self._pinned[found.address] = time.monotonic()
        return True

    def _unpin(self, mapped: Mapped) -> None:
        with self._lock:
            self._refused.discard(mapped.address)
            if self._pinned.pop(mapped.address, None) is None:
                return
            self.nbytes -= mapped.size
            try:
                with self._current():
                    self._runtime.deviceSynchronize()  # copies may be under way
                    self._runtime.hostUnregister(mapped.address)
            except self._runtime.CUDARuntimeError as ex:
                _log.warning("shared memory was not unpinned: %s", text_of(ex))

    def _register(self, mapped: Mapped) -> bool:
        flags = _PORTABLE if mapped.writable or not self._read_only else _PORTABLE | _READ_ONLY
        try:
            with self._current():
                self._runtime.hostRegister(mapped.address, mapped.size, flags)
        except self._runtime.CUDARuntimeError as ex:
            self._refused.add(mapped.address)
            if mapped.writable not in self._told:
                self._told.add(mapped.writable)
                self._tell(mapped.writable, text_of(ex))
            return False
        return True

    def _tell(self, writable: bool, why: str) -> None:
        if not writable and not self._read_only:
            _log.info("the device pins no memory that may only be read, so the driver copies it")
            return
        _log.warning(
            "%s cannot be pinned, so copies to and from the GPU are slower: %s (see `shmserve"
            " doctor`; locked memory is limited by LimitMEMLOCK or ulimit -l)",
            "writable shared memory" if writable else "shared memory of frontends",
            why,
        )
