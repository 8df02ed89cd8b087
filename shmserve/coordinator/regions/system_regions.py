"""Registration of system regions: objects named by key, or passed as a descriptor."""

import os
from collections.abc import Callable

from msgspec import Struct

from shmserve.core.caller import Caller
from shmserve.core.region_kinds import RegionKind
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.registry import Region
from shmserve.errors import ShmserveError
from shmserve.protocol.control.region_messages import RegionAnswer, RegisterRegion
from shmserve.shm import client_object


class SystemRegions(Struct, frozen=True):
    """Opens, checks and enters system regions. `entered`: takes over the descriptor of a region
    entered in the book; raises if the region cannot stay. `answer`: answers a frontend once the
    change is published."""

    _book: RegionBook
    _run_dir: str
    _entered: Callable[[Region, int], None]
    _answer: Callable[[str, RegionAnswer], None]

    def register(self, process: str, message: RegisterRegion) -> None:
        caller = Caller(message.uid, message.pid, message.started)
        try:
            self._register(caller, message)
        except ShmserveError as ex:
            self._answer(process, RegionAnswer(message.ticket, ex.code, ex.message))
            return
        self._answer(process, RegionAnswer(message.ticket))

    def _register(self, caller: Caller, message: RegisterRegion) -> None:
        self._book.may_register(caller)
        fd = client_object.open_object(message.key, message.name)
        try:
            self._check_room(caller, message.name, fd)
            facts = client_object.facts(fd, client_object.own_files(self._run_dir))
            window = (message.name, message.key, message.offset, message.byte_size)
            region = self._book.register(caller, *window, facts, message.again)
        except ShmserveError:
            os.close(fd)
            raise
        self._entered(region, fd)

    def register_passed(
        self, caller: Caller, name: str, offset: int, byte_size: int, fd: int, kind: RegionKind
    ) -> None:
        """Enter an object already checked by `passed_memory`, and take over `fd`. Registering the
        identical region again is no error, because the first answer may have been lost."""
        try:
            self._check_room(caller, name, fd)
            facts = client_object.facts(fd)
            region = self._book.register(
                caller, name, "", offset, byte_size, facts, again=True, kind=kind
            )
        except ShmserveError:
            os.close(fd)
            raise
        self._entered(region, fd)

    def _check_room(self, caller: Caller, name: str, fd: int) -> None:
        """Raise ResourceExhausted if a new region finds no room. A known name costs no further
        descriptor."""
        if not self._book.has(caller, name):
            client_object.check_room(fd)
