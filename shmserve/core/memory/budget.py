"""The pool's budget: how many bytes of shared memory each process may hold.

Owner: the coordinator. Decisions only: requests in, `Effect`s out, time as argument. Every byte of
a segment is granted out of `pool_bytes` before the segment is made, and allocated
(`posix_fallocate`) before it is used. A process asks when its arena grows and never else, so a
server in steady state asks nothing.

Rules (tests/property/test_budget_properties.py):

- granted bytes never exceed the pool, whatever the order of requests;
- a process's death returns all bytes that the process held and drops its waiting requests;
- a request that does not fit waits for others to trim, at most `PARK_S`, and at most `MAX_PARKED`
  requests wait: nobody blocks for long on memory;
- every request is answered exactly once, unless its process is gone.

No process is asked to go below its floor: the size of its first arena, `floor_bytes` or what the
process has announced. A process gives back its own idle segments before it asks for more, so it is
not asked to trim.
"""

from __future__ import annotations

from msgspec import Struct

from shmserve.core.effects import AnswerGrant, AskTrim, Effect
from shmserve.errors import ProtocolViolation

PARK_S = 0.25  # how long a request waits for others to trim
MAX_PARKED = 64


class _ParkedGrant(Struct, frozen=True):
    process: str
    ticket: int
    nbytes: int
    deadline: float


class Ledger:
    """Who holds how much of the pool.

    After a restart of the coordinator the holders tell what they hold when they say
    hello; until `settle_until` grants wait, so that nothing is granted twice.
    """

    def __init__(self, pool_bytes: int, floor_bytes: int, settle_until: float = 0.0) -> None:
        self.pool_bytes = pool_bytes
        self._floor_bytes = floor_bytes
        self._settle_until = settle_until
        self._held: dict[str, int] = {}
        self._floors: dict[str, int] = {}  # of those that begin with less
        self._parked: list[_ParkedGrant] = []

    @property
    def total(self) -> int:
        return sum(self._held.values())

    @property
    def waiting(self) -> int:
        return len(self._parked)

    def held(self, process: str) -> int:
        return self._held.get(process, 0)

    def joined(self, process: str, held_bytes: int, first_bytes: int = 0) -> None:
        """A process said hello, with what it was granted before (may exceed the pool).

        Args:
            first_bytes: what it begins with; 0: as others do.
        """
        if held_bytes < 0 or first_bytes < 0:
            raise ProtocolViolation(
                f"{process} says it holds {held_bytes} bytes and began with {first_bytes}"
            )
        self._held[process] = held_bytes
        if first_bytes:
            self._floors[process] = min(first_bytes, self._floor_bytes)

    def left(self, process: str, now: float) -> list[Effect]:
        """A process is gone: all it held is free."""
        self._held.pop(process, None)
        self._floors.pop(process, None)
        self._parked = [parked for parked in self._parked if parked.process != process]
        return self._serve(now)

    def grant(self, process: str, ticket: int, nbytes: int, now: float) -> list[Effect]:
        """A process asks for more: granted, refused, or parked while others trim."""
        if process not in self._held or nbytes <= 0:
            raise ProtocolViolation(f"{process} asks for {nbytes} bytes of the pool")
        if nbytes > self.pool_bytes:
            return [self._refusal(process, ticket, nbytes)]
        if self._fits(nbytes, now):
            return [self._take(process, ticket, nbytes)]
        unsettled = now < self._settle_until
        trims = [] if unsettled else self._trims(process, self.total + nbytes - self.pool_bytes)
        if not (trims or unsettled) or len(self._parked) >= MAX_PARKED:
            return [self._refusal(process, ticket, nbytes)]
        self._parked.append(_ParkedGrant(process, ticket, nbytes, now + PARK_S))
        return trims

    def give_back(self, process: str, nbytes: int, now: float) -> list[Effect]:
        """A process gives budget back; whoever waited and now fits is served."""
        if process not in self._held or nbytes < 0:
            raise ProtocolViolation(f"{process} gives back {nbytes} bytes of the pool")
        # It cannot hold less than nothing: a give-back may cross a hello that knew of it.
        self._held[process] = max(0, self._held[process] - nbytes)
        return self._serve(now)

    def expire(self, now: float) -> list[Effect]:
        """Serve who fits and refuse whoever has waited long enough."""
        effects = self._serve(now)
        expired = [parked for parked in self._parked if now >= parked.deadline]
        self._parked = [parked for parked in self._parked if now < parked.deadline]
        effects += [self._refusal(p.process, p.ticket, p.nbytes) for p in expired]
        return effects

    def _fits(self, nbytes: int, now: float) -> bool:
        return now >= self._settle_until and self.total + nbytes <= self.pool_bytes

    def _take(self, process: str, ticket: int, nbytes: int) -> AnswerGrant:
        self._held[process] += nbytes
        return AnswerGrant(process, ticket, True)

    def _refusal(self, process: str, ticket: int, nbytes: int) -> AnswerGrant:
        free = max(0, self.pool_bytes - self.total)
        reason = f"{nbytes} bytes asked of a pool of {self.pool_bytes} with {free} free"
        return AnswerGrant(process, ticket, False, reason)

    def _serve(self, now: float) -> list[Effect]:
        """Grant in order of arrival; one that does not fit does not hold up the next."""
        effects: list[Effect] = []
        waiting, self._parked = self._parked, []
        for parked in waiting:
            if self._fits(parked.nbytes, now):
                effects.append(self._take(parked.process, parked.ticket, parked.nbytes))
            else:
                self._parked.append(parked)
        return effects

    def _trims(self, asking: str, shortage: int) -> list[Effect]:
        """Whom to ask for how much, the largest holder first; empty if it cannot suffice."""
        floors, floor = self._floors, self._floor_bytes
        spare = sorted(
            ((held - floors.get(name, floor), name) for name, held in self._held.items()),
            reverse=True,
        )
        effects: list[Effect] = []
        for surplus, name in spare:
            if name == asking or surplus <= 0 or shortage <= 0:
                continue
            effects.append(AskTrim(name, min(surplus, shortage)))
            shortage -= surplus
        return effects if shortage <= 0 else []
