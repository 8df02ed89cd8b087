"""Calls that wait to be run by their pool: whose turn is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator

from shmserve.frontends.grpc.call_turns import CallTurn


class WaitingTurns:
    """Callers take turns, and so do the lines of each. Not thread-safe.

    Attributes:
        by_caller: the lines of each caller; whose turn is next first, and nobody is without.
    """

    def __init__(self) -> None:
        self.by_caller: dict[int, dict[Hashable, deque[CallTurn]]] = {}

    def add(self, turn: CallTurn) -> None:
        """It waits behind those of its line."""
        lines = self.by_caller.setdefault(turn.place.caller, {})
        lines.setdefault(turn.line, deque()).append(turn)

    def remove(self, turn: CallTurn) -> bool:
        """It will not run; False: it does not wait."""
        lines = self.by_caller.get(turn.place.caller, {})
        line = lines.get(turn.line)
        if line is None or turn not in line:
            return False
        line.remove(turn)
        if not line:
            del lines[turn.line]
            if not lines:
                del self.by_caller[turn.place.caller]
        return True

    def next(self, may_run: Callable[[CallTurn], bool]) -> CallTurn | None:
        """Take the next one out of those that may run now."""
        for caller, lines in self.by_caller.items():
            for name, line in lines.items():
                if may_run(line[0]):
                    turn = line.popleft()
                    del lines[name]
                    if line:
                        lines[name] = line  # behind the others
                    del self.by_caller[caller]
                    if lines:
                        self.by_caller[caller] = lines
                    return turn
        return None

    def put_back(self, turn: CallTurn) -> None:
        """It was taken out as the next, and cannot run yet: it is the next again."""
        lines = self.by_caller.pop(turn.place.caller, {})
        line = lines.pop(turn.line, deque())
        line.appendleft(turn)
        lines = {turn.line: line, **lines}
        self.by_caller = {turn.place.caller: lines, **self.by_caller}

    def count(self, caller: int) -> int:
        """How many wait of a caller."""
        return sum(map(len, self.by_caller.get(caller, {}).values()))

    def __iter__(self) -> Iterator[CallTurn]:
        for lines in self.by_caller.values():
            for line in lines.values():
                yield from line
