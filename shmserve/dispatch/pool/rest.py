"""Rest: whether this process's maintenance waits for long, and what ends that.

A process without work sleeps until something comes or the next thing is due. Messages, publications
and ends of processes wake the processes that they concern. A request wakes the maintenance of its
frontend, and so does what comes back after the request. An idle executor is woken by the
coordinator's question alone, once a minute; on a GPU it also looks after its device once a second.
The coordinator wakes once a second for its history. `python -m bench.idle` counts how often
processes wake.
"""

from __future__ import annotations

from collections.abc import Callable


class Rest:
    """For any thread, and for finalizers: it takes no lock.

    Whoever leaves work for the maintenance does so first, and then looks whether it is `resting`;
    the maintenance says that it is, and then looks for work. So one of them sees the other.

    Args:
        wake: ends the wait of the maintenance.

    Attributes:
        called: there was something to do since the maintenance has last asked.
        resting: it waits for long.
    """

    __slots__ = ("_wake", "called", "resting")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.called = self.resting = False
        self._wake = wake

    def end(self) -> None:
        """There is something to do."""
        self.called = True
        if self.resting:
            self.resting = False
            self._wake()

    def begin(self) -> None:
        """The maintenance has done its work. Look for more afterwards: who comes later ends it."""
        self.resting = True

    def call_off(self) -> None:
        """Nobody need be woken."""
        self.resting = False

    def over(self) -> bool:
        """The maintenance is awake: whether there was something to do."""
        self.resting = False
        called = self.called
        if called:  # else who calls right now would not be seen
            self.called = False
        return called
