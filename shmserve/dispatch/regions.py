"""Registering client memory: from a frontend to the coordinator and back.

Looking regions up needs neither: the published `Snapshot` has them.
"""

from __future__ import annotations

from shmserve.core.regions.region_book import Caller
from shmserve.core.registry import SYSTEM
from shmserve.errors import Code, Unavailable, from_code
from shmserve.protocol.control.region_messages import (
    RegionAnswer,
    RegisterCudaRegion,
    RegisterRegion,
    UnregisterRegions,
)
from shmserve.transport.holders import with_process
from shmserve.transport.link import Link
from shmserve.transport.questions import Make, close_all

_ANSWER_S = 5.0  # a restarted coordinator is back by then, and is asked again


class RegionDesk:
    """The coordinator's desk for regions, as a frontend sees it."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def register(self, caller: Caller, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register `byte_size` bytes from `offset` of the object `key`.

        When this returns, every request that begins later finds the region, whichever
        frontend it comes to.

        Raises:
            ShmserveError: it was refused; the text is for the client.
        """
        self._ask(
            lambda ticket, again: RegisterRegion(
                ticket, name, key, offset, byte_size, caller.uid, caller.pid, caller.started, again
            )
        )

    def register_cuda(
        self, caller: Caller, name: str, handle: bytes, device_id: int, byte_size: int
    ) -> None:
        """Register `byte_size` bytes of GPU memory; as `register`.

        It is the caller's process that is watched: the memory is kept on the GPU for as long as
        the region, even if that process has died.
        """
        caller = with_process(caller)
        who = (caller.uid, caller.pid, caller.started)
        self._ask(
            lambda ticket, again: RegisterCudaRegion(
                ticket, name, handle, device_id, byte_size, *who, again
            )
        )

    def unregister(self, caller: Caller, name: str = "", kind: str = SYSTEM) -> None:
        """Remove one of the caller's regions of a kind, or all of them; unknown ones are no
        error."""
        self._ask(lambda ticket, _: UnregisterRegions(ticket, name, caller.uid, kind))

    def _ask(self, make: Make) -> None:
        answer, fds = self._link.ask(make, _ANSWER_S)
        close_all(fds)
        if not isinstance(answer, RegionAnswer):
            raise Unavailable("the coordinator gave no answer about a shared memory region")
        if answer.error_code:
            raise from_code(Code(answer.error_code), answer.error)
