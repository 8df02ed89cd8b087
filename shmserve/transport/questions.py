"""What a process has asked the coordinator and not been told yet (`Link.ask`).

A question outlives the connection it was sent on: it is sent again, marked as such, to the
coordinator's successor. Its answer may carry fds, which always end up with exactly one owner.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable

from shmserve.protocol.messages import FromCoordinator, ToCoordinator

Make = Callable[[int, bool], ToCoordinator]  # (ticket, asked before) to a message


class Question:
    """One question. `answer` and `fds` are set before `answered` is."""

    __slots__ = ("answer", "answered", "fds", "make")

    def __init__(self, make: Make) -> None:
        self.make = make
        self.answered = threading.Event()
        self.answer: FromCoordinator | None = None
        self.fds: list[int] = []


class Questions:
    """The open questions of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, Question] = {}
        self._next = 1

    def open(self, make: Make) -> tuple[int, Question]:
        """A new question and its ticket."""
        question = Question(make)
        with self._lock:
            number = self._next
            self._next += 1
            self._open[number] = question
        return number, question

    def close(self, number: int) -> None:
        """Nobody waits for the answer any more."""
        with self._lock:
            self._open.pop(number, None)

    def again(self) -> list[ToCoordinator]:
        """All open questions, for a coordinator that may have been asked them before."""
        with self._lock:
            return [question.make(number, True) for number, question in self._open.items()]

    def answered(self, number: int, answer: FromCoordinator, fds: list[int]) -> None:
        """Hand an answer over with its fds; late ones are dropped."""
        with self._lock:
            question = self._open.pop(number, None)
            if question is not None:
                question.answer, question.fds = answer, fds
                question.answered.set()
                return
        close_all(fds)


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors nobody wants."""
    for fd in fds:
        os.close(fd)
