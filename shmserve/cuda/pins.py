"""Pinned host memory, registered with the driver (cudaHostRegister) so that a copy is one DMA.
Where registering is not permitted, copies go through the driver's buffers, and a warning is
logged once."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from msgspec import Struct

from shmserve.cuda.runtime import text_of

_log = logging.getLogger(__name__)

_WORTH_IT = 64 * 1024  # bytes; smaller copies are as fast through the driver's own buffers
_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly


class MappedAgain(Protocol):
    """Used part of `shm.segment.WritableMapping`."""

    address: int


class PinnableMapping(Protocol):
    """Used part of `shm.mappings.Mapped`."""

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def again(self) -> Callable[[], MappedAgain] | None: ...


class MappingsApi(Protocol):
    """Used part of `shm.mappings.Mappings`."""

    def listen(self, listener: Callable[[Any], None], pins_writable_only: bool = False) -> None: ...

    def find(self, address: int, nbytes: int) -> PinnableMapping | None: ...


class _Pin(Struct):
    """Registered mapping.

    Attributes:
        address: registered address: of the mapping, or of its second mapping `again`.
        again: second, writable mapping, or None.
        used: start time of the last copy.
    """

    address: int
    again: MappedAgain | None
    used: float = 0.0

    def use(self) -> int:
        """Note the start of a copy, and return the registered address."""
        self.used = time.monotonic()
        return self.address


class Pins:
    """Registered mappings of this process; each is registered as a whole when a copy first needs
    it. Thread-safe.

    Attributes:
        nbytes: registered bytes.
    """

    def __init__(
        self, runtime: Any, current: Callable[[], Any], mappings: MappingsApi, read_only: bool
    ) -> None:
        """Set up; no mapping is registered yet.

        Args:
            read_only: True if the driver registers memory that this process must not write to.
                Otherwise such memory is mapped a second time, writable where possible.
        """
        self._runtime = runtime
        self._current = current
        self._mappings = mappings
        self._read_only = read_only
        self._lock = threading.Lock()
        self._pinned: dict[int, _Pin] = {}  # by address of the mapping
        self._refused: set[int] = set()  # addresses of mappings that the driver refused
        self._warned: set[bool] = set()  # kinds (writable or not) with a logged refusal
        self.nbytes = 0
        mappings.listen(self._unpin, pins_writable_only=not read_only)

    @contextlib.contextmanager
    def pinned(self, address: int, nbytes: int) -> Iterator[int]:
        """Yield the address for a copy of these bytes, which starts within the context. The
        mapping is registered if possible, and stays registered until the copy ends."""
        with self._lock:
            registered = self._pin(address, nbytes)
            if registered:
                yield registered
                return
        yield address

    def trim(self, idle_s: float) -> None:
        """Unregister mappings of peers without a copy for `idle_s` seconds. Memory that a peer
        frees returns to the system only after unpinning, and this process hears of the freeing
        only with the next request."""
        before = time.monotonic() - idle_s
        with self._lock:
            pinned = list(self._pinned.items())
        for address, pin in pinned:
            mapped = self._mappings.find(address, 1) if pin.used <= before else None
            if mapped is not None and not mapped.writable:
                self._unpin(mapped)

    def _pin(self, address: int, nbytes: int) -> int:
        """Register the mapping of the bytes if needed. Return the registered address of the bytes,
        or 0."""
        if nbytes < _WORTH_IT:
            return 0
        mapping = self._mappings.find(address, nbytes)
        if mapping is None or mapping.address in self._refused:
            return 0
        pin = self._pinned.get(mapping.address)
        if pin is None:
            pin = self._register(mapping)
            if pin is None:
                return 0
            self._pinned[mapping.address] = pin
            self.nbytes += mapping.size
        return pin.use() + address - mapping.address

    def _unpin(self, mapped: PinnableMapping) -> None:
        with self._lock:
            self._refused.discard(mapped.address)
            pin = self._pinned.pop(mapped.address, None)
            if pin is None:
                return
            self.nbytes -= mapped.size
            try:
                with self._current():
                    with contextlib.suppress(self._runtime.CUDARuntimeError):
                        self._runtime.deviceSynchronize()  # copies may be running
                    self._runtime.hostUnregister(pin.address)
            except self._runtime.CUDARuntimeError as ex:
                _log.warning("shared memory was not unpinned: %s", text_of(ex))

    def _register(self, mapped: PinnableMapping) -> _Pin | None:
        flags = _PORTABLE if mapped.writable or not self._read_only else _PORTABLE | _READ_ONLY
        try:
            with self._current():
                again = None
                if not mapped.writable and not self._read_only and mapped.again is not None:
                    again = mapped.again()
                pin = _Pin(mapped.address if again is None else again.address, again)
                self._runtime.hostRegister(pin.address, mapped.size, flags)
        except (OSError, self._runtime.CUDARuntimeError) as ex:
            self._refused.add(mapped.address)
            if mapped.writable not in self._warned:
                self._warned.add(mapped.writable)
                self._warn(mapped.writable, text_of(ex))
            return None
        return pin

    def _warn(self, writable: bool, why: str) -> None:
        _log.warning(
            "%s cannot be pinned, so copies to and from the GPU are slower: %s (see `shmserve"
            " doctor`; locked memory is limited by LimitMEMLOCK or ulimit -l)",
            "writable shared memory" if writable else "shared memory of frontends",
            why,
        )
