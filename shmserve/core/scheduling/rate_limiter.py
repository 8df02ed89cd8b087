"""Whose turn it is to execute, where instances share resources. Pure.

An instance asks for a turn, gets it when all its resources are free, and gives them back. Turns
are start-time fair: who has had fewer, weighed by priority, comes first; who was idle has saved
none. What the first one waits for is kept for it, so nobody starves for having a large need; who
needs none of that need not wait behind it.

Invariants (tests/property/test_rate_limiter_properties.py):
- what is held was never more than there is when it was given;
- whoever waits is given its turn once those who hold give back, whatever others ask for;
- who has gone or given back holds nothing.
"""

from __future__ import annotations

import itertools

from msgspec import Struct

from shmserve.core.scheduling.rate_limit_policy import Amounts, RateLimit, Resource, amount_of


class Acquisition(Struct, frozen=True):
    """A process holds its resources from now on; `ticket` is that of its question."""

    process: str
    ticket: int


class ResourceUse(Struct, frozen=True, array_like=True):
    """A resource on a device (empty: one for all), who holds some of it, and who waits for a turn,
    the next one first: processes, or what these are called elsewhere."""

    name: str
    device: str
    count: int
    held: int
    holders: tuple[str, ...]
    waiting: tuple[str, ...]


class _Instance(Struct):
    """One instance's process. `due`: virtual time of its next turn; `asked`: who came first."""

    limit: RateLimit
    due: int
    waiting: int = 0  # tickets; 0: not
    holding: int = 0
    asked: int = 0

    def ask(self, ticket: int, now: int, order: int) -> None:
        """Want a turn, not before `now` of virtual time, and hold nothing."""
        self.holding, self.waiting = 0, ticket
        self.due, self.asked = max(self.due, now), order

    def take(self) -> int:
        """Take the turn that was asked for; return its ticket."""
        self.holding, self.waiting = self.waiting, 0
        self.due += self.limit.priority
        return self.holding

    def release(self) -> None:
        self.holding = self.waiting = 0


class RateLimiter:
    """Everybody who needs resources, and what there is of them.

    `given`: amounts that the settings name; of what they do not, there is as much as the instance
    needs that needs most. `is_open`: whether turns are given already (`open`).
    """

    def __init__(self, given: Amounts, is_open: bool = True) -> None:
        self.is_open = is_open
        self._given = given
        self._members: dict[str, _Instance] = {}
        self._now = 0  # virtual time: that of the latest turn
        self._questions = itertools.count(1)

    def open(self) -> list[Acquisition]:
        """From now on turns are given: all who hold something have said so."""
        self.is_open = True
        return self._serve()

    def join(self, process: str, limit: RateLimit, holding: int = 0) -> list[Acquisition]:
        """A process can execute. `holding`: the ticket of a turn it had already; 0: none."""
        self._members[process] = _Instance(limit, self._now, holding=holding)
        return self._serve()

    def knows(self, process: str) -> bool:
        return process in self._members

    def acquire(self, process: str, ticket: int) -> list[Acquisition]:
        """A process that has joined wants a turn, and gives back what it had. It may ask twice
        with one ticket."""
        member = self._members[process]
        if ticket == member.holding:
            return [Acquisition(process, ticket)]
        if ticket != member.waiting:
            member.ask(ticket, self._now, next(self._questions))
        return self._serve()

    def release(self, process: str) -> list[Acquisition]:
        """A process holds nothing any more, and wants nothing."""
        self._members[process].release()
        return self._serve()

    def leave(self, process: str) -> list[Acquisition]:
        """A process has ended, if it is here."""
        return self._serve() if self._members.pop(process, None) is not None else []

    def uses(self) -> list[ResourceUse]:
        """All resources that somebody needs, as of now."""
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
        """Who waits, the next one first."""
        return sorted((m.due, m.asked, name) for name, m in self._members.items() if m.waiting)

    def _serve(self) -> list[Acquisition]:
        """Turns for those who wait, as far as there is enough."""
        waiting = self._in_turn()
        if not (self.is_open and waiting):
            return []
        free = self._free()
        turns = []
        for _, _, name in waiting:
            member = self._members[name]
            fits = all(free[r.key] >= r.count for r in member.limit.resources)
            for resource in member.limit.resources:  # also if it waits: it is kept for it
                free[resource.key] -= resource.count
            if fits:
                self._now = max(self._now, member.due)
                turns.append(Acquisition(name, member.take()))
        return turns

    def _free(self) -> dict[tuple[str, str], int]:
        free: dict[tuple[str, str], int] = {}
        everybody = self._members.values()
        needs: list[Resource] = [r for member in everybody for r in member.limit.resources]
        for resource in needs:
            amount = amount_of(self._given, resource)
            most = max(free.get(resource.key, 0), resource.count)
            free[resource.key] = most if amount is None else amount
        for member in everybody:
            for resource in member.limit.resources if member.holding else ():
                free[resource.key] -= resource.count
        return free
