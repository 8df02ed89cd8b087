"""Rest: tells whether this process's maintenance waits for long, and ends the wait.

A process without work sleeps until a message comes or the next deadline. Messages, publications
and ends of processes wake only the processes concerned. A request wakes the maintenance of its
frontend; so do slots and answers that come back after the request. An idle executor is woken only
by the coordinator's question, once a minute; on a GPU the executor also looks after its device
once a second. The coordinator wakes once a second for its history. `python -m bench.idle` counts
wake-ups of processes.
"""

from collections.abc import Callable


class Rest:
    """State of the maintenance's rest. For any thread, and for finalizers: takes no lock.

    A thread with work for the maintenance leaves the work first and reads `resting` afterwards.
    The maintenance sets `resting` first and looks for work afterwards. So at least one of both
    sees the other.

    `wake`: ends the wait of the maintenance. `called`: true if work has come since the maintenance
    last asked. `resting`: true while the maintenance waits for long.
    """

    __slots__ = ("_wake", "called", "resting")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.called = self.resting = False
        self._wake = wake

    def end(self) -> None:
        """Report work, and end the rest."""
        self.called = True
        if self.resting:
            self.resting = False
            self._wake()

    def begin(self) -> None:
        """Begin the rest. The maintenance must look for work afterwards; later work ends the
        rest."""
        self.resting = True

    def call_off(self) -> None:
        """End the rest without waking the maintenance."""
        self.resting = False

    def over(self) -> bool:
        """End the rest, on waking. Return True if work has come meanwhile."""
        self.resting = False
        called = self.called
        if called:  # an unconditional write could hide a call made right now
            self.called = False
        return called
