"""Budget: how many bytes of the pool of shared memory each process may hold.

Owner: the coordinator. Decisions only: requests in, `Effect`s out, time as argument. Every byte of
a segment is granted out of `pool_bytes` before the segment is made, and allocated
(`posix_fallocate`) before it is used. A process asks only when its arena grows, so a server in
steady state asks nothing.

Rules (tests/property/test_budget_properties.py):

- granted bytes never exceed the pool, for any order of requests;
- a process's death returns all bytes held by the process and drops its waiting requests;
- a request that does not fit waits at most `PARK_S` for other processes to trim, and at most
  `MAX_PARKED` requests wait: no process blocks for long on memory;
- every request is answered exactly once, unless its process is gone.

No process is asked to go below its floor: the size of its first arena, which is `floor_bytes` or
the announced size. A process gives back its own idle segments before a request for more, so the
process is not asked to trim for its own request.
"""

from msgspec import Struct

from shmserve.core.effects import AnswerGrant, AskTrim, Effect
from shmserve.errors import ProtocolViolation

PARK_S = 0.25  # longest wait of a request for trims, in seconds
MAX_PARKED = 64


class _ParkedGrant(Struct, frozen=True):
    process: str
    ticket: int
    nbytes: int
    deadline: float


class Ledger:
    """Bytes of the pool held by each process.

    After a restart of the coordinator, holders report their bytes in their hello. Grants wait
    until `settle_until`, so that no byte is granted twice.
    """

    def __init__(self, pool_bytes: int, floor_bytes: int, settle_until: float = 0.0) -> None:
        self.pool_bytes = pool_bytes
        self._floor_bytes = floor_bytes
        self._settle_until = settle_until
        self._held: dict[str, int] = {}
        self._floors: dict[str, int] = {}  # floors of processes that announced a first size
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
        """Note a process's hello, with bytes granted before (the sum may exceed the pool).
        `first_bytes`: announced size of the first arena; 0: `floor_bytes`."""
        if held_bytes < 0 or first_bytes < 0:
            raise ProtocolViolation(
                f"{process} says it holds {held_bytes} bytes and began with {first_bytes}"
            )
        self._held[process] = held_bytes
        if first_bytes:
            self._floors[process] = min(first_bytes, self._floor_bytes)

    def left(self, process: str, now: float) -> list[Effect]:
        """Free all bytes of a process that is gone."""
        self._held.pop(process, None)
        self._floors.pop(process, None)
        self._parked = [parked for parked in self._parked if parked.process != process]
        return self._serve(now)

    def grant(self, process: str, ticket: int, nbytes: int, now: float) -> list[Effect]:
        """Grant, refuse or park a process's request for more bytes. A parked request waits while
        other processes trim."""
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
        """Return a process's bytes to the pool, and serve waiting requests that fit now."""
        if process not in self._held or nbytes < 0:
            raise ProtocolViolation(f"{process} gives back {nbytes} bytes of the pool")
        # Not below 0: a give-back may cross a hello that already counts it.
        self._held[process] = max(0, self._held[process] - nbytes)
        return self._serve(now)

    def expire(self, now: float) -> list[Effect]:
        """Serve waiting requests that fit, and refuse requests past their waiting time."""
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
        """Grant in order of arrival. A request that does not fit does not hold up the next."""
        effects: list[Effect] = []
        waiting, self._parked = self._parked, []
        for parked in waiting:
            if self._fits(parked.nbytes, now):
                effects.append(self._take(parked.process, parked.ticket, parked.nbytes))
            else:
                self._parked.append(parked)
        return effects

    def _trims(self, asking: str, shortage: int) -> list[Effect]:
        """Return the trims that cover the shortage, largest surplus first; empty if no trims
        suffice."""
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
