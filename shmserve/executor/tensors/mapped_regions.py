"""Client regions that an executor has mapped, each once, on first use.

The link's thread calls `forget` and `clear`. The loop's two threads and the model's threads call
the other methods.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from shmserve.core.registry import Region
from shmserve.errors import Code, ShmserveError, Unavailable, from_code
from shmserve.executor.devices import Devices
from shmserve.executor.tensors.cuda_region import CudaRegion
from shmserve.protocol.control import region_messages as wire
from shmserve.protocol.control.messages import FromCoordinator, ToCoordinator
from shmserve.shm.client_region import ClientRegion, Shrunk
from shmserve.transport.channel import close_all
from shmserve.transport.pending_requests import Make

_ASK_S = 2.0


class Asks(Protocol):
    """The methods of `transport.link.Link` that are used here."""

    def ask(self, make: Make, timeout_s: float) -> tuple[FromCoordinator, list[int]]: ...

    def send(self, message: ToCoordinator) -> None: ...


def _closed() -> None:
    """Report memory as closed for this region, though another region keeps the memory open."""


class ClientRegions:
    """Mapped regions, by number. `copy`: copy instead of mapping (`client_shm_mode`). `closing`:
    forgotten CUDA regions that may still be in use: for each number a function that returns the
    memory, or None once the memory is closed. `tell_closed` reports the closed regions."""

    def __init__(self, link: Asks, devices: Devices, copy: bool = False) -> None:
        self.devices = devices
        self._link = link
        self._copy = copy
        self._mapped: dict[int, ClientRegion | CudaRegion] = {}
        self._forgotten: set[int] = set()  # numbers forgotten while a question is under way
        self.closing: dict[int, Callable[[], object | None]] = {}
        self._lock = threading.Lock()

    def use(self, number: int) -> ClientRegion | CudaRegion:
        """Return a region whose memory is complete, as far as can be known.

        Raises:
            InvalidArgument: the region's object has shrunk, of which the coordinator is told; or
                GPU memory cannot be used from here.
            NotFound: the region was unregistered before it could be mapped here.
            Unavailable: the coordinator did not answer.
        """
        region = self._mapped.get(number)
        try:
            if region is None:
                return self._map(number)
            region.check()
            return region
        except Shrunk as ex:
            self.shrunk(ex)
            raise

    def shrunk(self, ex: Shrunk) -> None:
        """Have the coordinator put the region into quarantine."""
        self._link.send(wire.RegionShrunk(ex.number))

    def _map(self, number: int) -> ClientRegion | CudaRegion:
        with self._lock:
            self._forgotten.clear()
            self.closing.pop(number, None)  # left from before `clear`
        answer, fds = self._link.ask(lambda ticket, _: wire.NeedRegion(ticket, number), _ASK_S)
        if not isinstance(answer, wire.RegionGiven):
            close_all(fds)
            raise Unavailable("the coordinator gave no answer about a shared memory region")
        granted = answer.region
        if granted is None or len(fds) != int(granted.memory.has_descriptor):
            close_all(fds)
            if answer.error_code:
                raise from_code(Code(answer.error_code), answer.error)
            raise Unavailable("the coordinator gave no descriptor of a shared memory region")
        region = self._opened(granted, fds)
        with self._lock:
            if not answer.gone and number not in self._forgotten:
                self._mapped[number] = region
                if isinstance(region, ClientRegion) and region.size:
                    self.devices.mappings.mapped(region.address, region.size, writable=True)
            elif isinstance(region, CudaRegion):
                self.closing[number] = region.memory
        return region

    def _opened(self, region: Region, fds: list[int]) -> ClientRegion | CudaRegion:
        if not region.memory.has_descriptor:
            try:
                return CudaRegion(region, *self.devices.import_region(region))
            except ShmserveError:
                self._link.send(wire.RegionsClosed((region.number,)))
                raise
        # Memory of fixed size is mapped in any mode: no client can truncate it, so a copy would be
        # no safer.
        copy = (self._copy and not region.memory.keeps_size) or region.copy
        return ClientRegion(region, fds[0], copy)

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget unregistered regions. Requests that use them finish."""
        with self._lock:
            for number in numbers:
                self._forgotten.add(number)
                self._forget(number)
        self.tell_closed()

    def clear(self) -> None:
        """Forget all regions: some may have been unregistered while the coordinator was away."""
        with self._lock:
            for number in list(self._mapped):
                self._forget(number)

    def _forget(self, number: int) -> None:
        region = self._mapped.pop(number, None)
        if isinstance(region, ClientRegion):
            self.devices.mappings.unmapping(region.address)
        elif region is not None:
            self.closing[number] = _closed if self._is_shared(region) else region.memory

    def _is_shared(self, region: CudaRegion) -> bool:
        """Return True if another region is on the same memory and keeps that memory open."""
        memory = region.memory()
        others = self._mapped.values()
        return any(isinstance(o, CudaRegion) and o.memory() is memory for o in others)

    def tell_closed(self) -> None:
        """Tell the coordinator which forgotten regions are closed by now."""
        with self._lock:
            closed = [number for number, memory in self.closing.items() if memory() is None]
            for number in closed:
                del self.closing[number]
        if closed:
            self._link.send(wire.RegionsClosed(tuple(closed)))
