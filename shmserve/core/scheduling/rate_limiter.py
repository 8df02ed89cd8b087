"""Rate limiter: decides which instance may execute next when instances share resources. Pure.

An instance asks for a turn, gets the turn when all its resources are free, and gives the resources
back after the execution. Scheduling is start-time fair: the instance with the fewest turns so far,
weighted by priority, goes first. Idle time earns no credit. Resources wanted by the first waiting
instance are reserved for it, so a large request cannot starve. Instances that need none of these
resources may overtake.

Invariants (tests/property/test_rate_limiter_properties.py):
- no resource is granted beyond the amount that exists at the time of the grant;
- every waiting process gets its turn once the holders release, whatever other processes ask for;
- a process holds nothing after it has released or left.
"""

import itertools

from msgspec import Struct

from shmserve.core.scheduling.rate_limit_policy import Amounts, RateLimit, Resource, amount_of


class Acquisition(Struct, frozen=True):
    """Grant of a turn: the process holds its resources from now on. `ticket` is the ticket of the
    process's request for the turn."""

    process: str
    ticket: int


class ResourceUse(Struct, frozen=True, array_like=True):
    """Use of one resource on one device (empty: one amount for all devices). `holders` and
    `waiting` (next turn first) name processes, or the callers' labels for processes."""

    name: str
    device: str
    count: int
    held: int
    holders: tuple[str, ...]
    waiting: tuple[str, ...]


class _Instance(Struct):
    """Process of one instance. `due`: virtual time of the next turn; `asked`: rank by the order of
    the requests for turns."""

    limit: RateLimit
    due: int
    waiting: int = 0  # ticket; 0: not waiting
    holding: int = 0
    asked: int = 0


class RateLimiter:
    """Processes with limited resources, and the amounts of these resources. `given`: amounts from
    the settings; a resource missing there has the largest count needed by any instance. `is_open`:
    True if turns are granted already (see `open`)."""

    def __init__(self, given: Amounts, is_open: bool = True) -> None:
        self.is_open = is_open
        self._given = given
        self._members: dict[str, _Instance] = {}
        self._now = 0  # virtual time of the latest turn
        self._questions = itertools.count(1)

    def open(self) -> list[Acquisition]:
        """Start to grant turns: every process with a turn from earlier has reported."""
        self.is_open = True
        return self._serve()

    def join(self, process: str, limit: RateLimit, holding: int = 0) -> list[Acquisition]:
        """Add a process. `holding`: ticket of a turn which the process has already, or 0."""
        self._members[process] = _Instance(limit, self._now, holding=holding)
        return self._serve()

    def knows(self, process: str) -> bool:
        return process in self._members

    def acquire(self, process: str, ticket: int) -> list[Acquisition]:
        """Release the turn of a joined process and request a new turn. A process may ask twice
        with one ticket."""
        member = self._members[process]
        if ticket == member.holding:
            return [Acquisition(process, ticket)]
        if ticket != member.waiting:
            member.holding, member.waiting = 0, ticket
            member.due, member.asked = max(member.due, self._now), next(self._questions)
        return self._serve()

    def release(self, process: str) -> list[Acquisition]:
        """Release a process's turn and withdraw its request for a turn."""
        member = self._members[process]
        member.holding = member.waiting = 0
        return self._serve()

    def leave(self, process: str) -> list[Acquisition]:
        """Remove an ended process. An unknown process changes nothing."""
        return self._serve() if self._members.pop(process, None) is not None else []

    def uses(self) -> list[ResourceUse]:
        """Return the current use of all resources needed by any process."""
        members = self._members
        free, ordered = self._free(), [name for _, _, name in self._in_turn()]
        needs = {name: {r.key: r.count for r in m.limit.resources} for name, m in members.items()}
        uses = []
        for key in sorted(free):
            holders = [n for n, m in sorted(members.items()) if m.holding and key in needs[n]]
            held = sum(needs[name][key] for name in holders)
            waiting = [name for name in ordered if key in needs[name]]
            uses.append(ResourceUse(*key, free[key] + held, held, tuple(holders), tuple(waiting)))
        return uses

    def _in_turn(self) -> list[tuple[int, int, str]]:
        """Return (due, asked, name) of the waiting processes, next turn first."""
        return sorted((m.due, m.asked, name) for name, m in self._members.items() if m.waiting)

    def _serve(self) -> list[Acquisition]:
        """Grant turns to waiting processes as far as the resources suffice."""
        waiting = self._in_turn()
        if not (self.is_open and waiting):
            return []
        free = self._free()
        turns = []
        for _, _, name in waiting:
            member = self._members[name]
            fits = all(free[r.key] >= r.count for r in member.limit.resources)
            for resource in member.limit.resources:  # reserve also for a process which must wait
                free[resource.key] -= resource.count
            if fits:
                self._now = max(self._now, member.due)
                turns.append(Acquisition(name, member.waiting))
                member.holding, member.waiting = member.waiting, 0
                member.due += member.limit.priority
        return turns

    def _free(self) -> dict[tuple[str, str], int]:
        free: dict[tuple[str, str], int] = {}
        everybody = self._members.values()
        needs: list[Resource] = [r for member in everybody for r in member.limit.resources]
        for resource in needs:
            amount = amount_of(self._given, resource)
            largest = max(free.get(resource.key, 0), resource.count)
            free[resource.key] = largest if amount is None else amount
        for member in everybody:
            for resource in member.limit.resources if member.holding else ():
                free[resource.key] -= resource.count
        return free
