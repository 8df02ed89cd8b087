"""Pool budget that a process has asked for: one ticket per question, until its answer.

Not thread-safe: its owner calls everything but `wait` with its lock held, so that a question is
asked once of each coordinator.
"""

from __future__ import annotations

import threading

from shmserve.protocol.control.link_messages import Grant, Granted


class Ticket:
    """A grant that is waited for (or no longer is: `abandoned`)."""

    __slots__ = ("abandoned", "answered", "granted", "nbytes", "number")

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.answered = threading.Event()
        self.granted = False
        self.abandoned = False

    @property
    def question(self) -> Grant:
        return Grant(self.number, self.nbytes)

    def wait(self, timeout_s: float) -> None:
        """Until it is answered or the time is over."""
        self.answered.wait(timeout_s)


class Grants:
    """The open tickets of one process."""

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}
        self._next = 1

    def open(self, nbytes: int) -> Ticket:
        """A new ticket."""
        ticket = self._tickets[self._next] = Ticket(self._next, nbytes)
        self._next += 1
        return ticket

    def close(self, ticket: Ticket, connected: bool) -> bool:
        """Nobody waits any more; whether it was granted. What is granted later is given back."""
        if ticket.answered.is_set():
            return ticket.granted
        ticket.abandoned = True
        if not connected:
            self._tickets.pop(ticket.number, None)
        return False

    def answered(self, message: Granted) -> int:
        """An answer has come; how many bytes must be given back, as nobody waited for them."""
        ticket = self._tickets.pop(message.ticket, None)
        if ticket is None:
            return 0
        if ticket.abandoned:
            return ticket.nbytes if message.granted else 0
        ticket.granted = message.granted
        ticket.answered.set()
        return 0

    def again(self) -> list[Grant]:
        """What a new coordinator must be asked."""
        return [ticket.question for ticket in self._tickets.values() if not ticket.abandoned]

    def disconnected(self) -> None:
        """Answers to what nobody waits for will not come any more."""
        self._tickets = {n: t for n, t in self._tickets.items() if not t.abandoned}
