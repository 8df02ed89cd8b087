"""The client regions an executor has mapped: each once, on first use.

`forget` and `clear` come from the link's thread, everything else from the loop's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from shmserve.errors import Code, Unavailable, from_code
from shmserve.protocol.messages import FromCoordinator, ToCoordinator
from shmserve.protocol.region_messages import NeedRegion, RegionGiven, RegionShrunk
from shmserve.shm.client_region import ClientRegion, Shrunk
from shmserve.transport.questions import Make, close_all

_ASK_S = 2.0


class Asks(Protocol):
    """What this needs of `transport.link.Link`."""

    def ask(self, make: Make, timeout_s: float) -> tuple[FromCoordinator, list[int]]: ...

    def send(self, message: ToCoordinator) -> None: ...


class ClientRegions:
    """By number. `copy`: never map, always copy (`client_shm_mode`)."""

    def __init__(self, link: Asks, copy: bool = False) -> None:
        self._link = link
        self._copy = copy
        self._mapped: dict[int, ClientRegion] = {}
        self._gone: set[int] = set()  # while a question is under way
        self._lock = threading.Lock()

    def use(self, number: int) -> ClientRegion:
        """A region whose memory is all there, as far as one can know.

        Raises:
            InvalidArgument: its object has shrunk; the coordinator is told.
            NotFound: it was unregistered before it could be mapped here.
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
        """Have the region put into quarantine."""
        self._link.send(RegionShrunk(ex.number))

    def _map(self, number: int) -> ClientRegion:
        with self._lock:
            self._gone.clear()
        answer, fds = self._link.ask(lambda ticket, _: NeedRegion(ticket, number), _ASK_S)
        if not isinstance(answer, RegionGiven) or answer.region is None or len(fds) != 1:
            close_all(fds)
            if isinstance(answer, RegionGiven) and answer.error_code:
                raise from_code(Code(answer.error_code), answer.error)
            raise Unavailable("the coordinator gave no descriptor of a shared memory region")
        # What cannot be pulled away is mapped whatever the mode: copying would protect nobody.
        copy = (self._copy and not answer.region.sealed) or answer.region.copy
        region = ClientRegion(answer.region, fds[0], copy)
        with self._lock:
            if not answer.gone and number not in self._gone:
                self._mapped[number] = region
        return region

    def forget(self, numbers: Iterable[int]) -> None:
        """These are no more; requests that use them finish."""
        with self._lock:
            for number in numbers:
                self._gone.add(number)
                self._mapped.pop(number, None)

    def clear(self) -> None:
        """After a time without the coordinator nobody knows which are no more."""
        with self._lock:
            self._mapped.clear()

    def __len__(self) -> int:
        return len(self._mapped)
