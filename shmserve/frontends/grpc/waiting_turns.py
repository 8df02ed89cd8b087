"""Calls that wait for a thread of their pool: whose turn is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Any

from msgspec import Struct


class PoolPlace(Struct, eq=False):
    """A call's place in its pool. `uses`: the parties that have not left it yet."""

    address: str
    uses: int = 1


class ThreadTurn(Struct, eq=False):
    """One call that waits for a thread, or has it. `line`: its connection, of which there is one
    turn for each subject, since a call that may not run holds up those behind it. `subject`:
    the model that it names; empty: none that is known."""

    line: Hashable
    place: PoolPlace
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    future: Future[Any] | None = None
    subject: bytes = b""


class WaitingTurns:
    """Addresses take turns, and so do the lines of each. Not thread-safe.

    Attributes:
        by_address: the lines of each address; whose turn is next first, and nobody is without.
    """

    def __init__(self) -> None:
        self.by_address: dict[str, dict[Hashable, deque[ThreadTurn]]] = {}

    def add(self, turn: ThreadTurn) -> None:
        """It waits behind those of its line."""
        lines = self.by_address.setdefault(turn.place.address, {})
        lines.setdefault(turn.line, deque()).append(turn)

    def remove(self, turn: ThreadTurn) -> bool:
        """It will not run; False: it does not wait."""
        lines = self.by_address.get(turn.place.address, {})
        line = lines.get(turn.line)
        if line is None or turn not in line:
            return False
        line.remove(turn)
        if not line:
            del lines[turn.line]
            if not lines:
                del self.by_address[turn.place.address]
        return True

    def next(self, may_run: Callable[[ThreadTurn], bool]) -> ThreadTurn | None:
        """Take the next one out of those that may run now."""
        for address, lines in self.by_address.items():
            for name, line in lines.items():
                if may_run(line[0]):
                    turn = line.popleft()
                    del lines[name]
                    if line:
                        lines[name] = line  # behind the others
                    del self.by_address[address]
                    if lines:
                        self.by_address[address] = lines
                    return turn
        return None

    def count(self, address: str) -> int:
        """How many wait of an address."""
        return sum(map(len, self.by_address.get(address, {}).values()))

    def __iter__(self) -> Iterator[ThreadTurn]:
        for lines in self.by_address.values():
            for line in lines.values():
                yield from line
