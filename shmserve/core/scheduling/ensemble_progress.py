"""Which step of an ensemble may run when, in one request.

A step that streams gives its outputs any number of times, and what takes them runs once for each
of its answers: tensors and runs behind it are numbered as these are. All else is there, and runs,
`ONCE`; a step behind a stream has such a tensor in each of its runs. Which step is behind which
stream says `core.scheduling.ensemble_graph`: none is behind two.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from shmserve.tensor.spec import EnsembleStep

ONCE = -1
Item = tuple[str, int]  # a tensor of the ensemble and its number


class Run(NamedTuple):
    """One run of a step; of one that streams, until its last answer."""

    step: int
    number: int


class GraphProgress:
    """The runs of one request; not for use by two threads.

    Args:
        inputs: tensors that the request may have; they are there from the beginning.
        wanted: tensors that answers are made of.
        limit: how many answers of each stream may be on their way; one is until all behind it has
            run, and what the client gets of it is taken.

    Attributes:
        passed: tensors that steps give to others.
        running: runs that were taken and have neither ended nor given way.
    """

    def __init__(
        self,
        steps: Sequence[EnsembleStep],
        inputs: Collection[str],
        wanted: Collection[str],
        limit: int,
    ) -> None:
        self._steps = steps
        self._limit = limit
        self._takers: dict[str, list[int]] = {}
        for index, step in enumerate(steps):
            for tensor in dict.fromkeys(step.inputs.values()):
                self._takers.setdefault(tensor, []).append(index)
        # A pipeline may have an output with the name of an input
        self.passed = self._takers.keys() - inputs
        self._number_by: dict[str, int] = {}  # tensor -> its stream, of those that are passed
        self._givers: dict[int, set[int]] = {}  # stream or ONCE -> who gives wanted tensors
        for index, step in enumerate(steps):
            stream = _stream_of(index, step)
            for tensor in step.outputs.values():
                if tensor in self.passed:
                    self._number_by[tensor] = stream
                if tensor in wanted:
                    self._givers.setdefault(stream, set()).add(index)
        self._answers_by = max(self._givers, default=ONCE)  # the stream that numbers answers
        self._untold = set(self._givers.get(ONCE, ()))  # who has still to give what is there once
        self._told: Counter[int] = Counter()  # by number: who has given
        self._next = 0 if self._answers_by != ONCE else ONCE  # answer
        self._followers = Counter(step.behind for step in steps)
        self._followers[self._answers_by] += 1
        self._there: dict[Item, int] = {}  # and how many steps have still to take it
        self._given: Counter[int] = Counter()  # answers of each stream so far
        self._left: dict[tuple[int, int], int] = {}  # (stream, number) -> followers
        self._on_way: Counter[int] = Counter()  # answers of each stream
        self._turn: Counter[int] = Counter()  # of steps whose runs keep their order: the next one
        self._waiting: dict[int, set[int]] = {}  # step behind a stream -> numbers of no run yet
        self._ready: deque[Run] = deque()
        self._paused: deque[Run] = deque()  # runs of steps that stream, between two answers
        self.running = 0
        for tensor in inputs:
            self._arrived(tensor, ONCE)

    # ------------------------------------------------------------------- runs

    @property
    def runnable(self) -> int:
        """How many runs can be taken."""
        return len(self._ready) + sum(self._has_room(run.step) for run in self._paused)

    def take(self) -> Run | None:
        """A run to begin, or one of a stream to go on with; what is behind a stream goes first."""
        run = self._ready.popleft() if self._ready else None
        if run is None:
            run = next((run for run in self._paused if self._has_room(run.step)), None)
            if run is None:
                return None
            self._paused.remove(run)
        self.running += 1
        return run

    def item(self, tensor: str, run: Run) -> Item:
        """What this run takes as its input."""
        return (tensor, ONCE if self._number_by.get(tensor, ONCE) == ONCE else run.number)

    def began(self, run: Run) -> list[Item]:
        """A run has what it takes: what nobody needs any more of that."""
        over = []
        for tensor in dict.fromkeys(self._steps[run.step].inputs.values()):
            item = self.item(tensor, run)
            # What is there once for steps behind a stream is needed to its end
            if item[1] != ONCE or all(self._steps[s].behind == ONCE for s in self._takers[tensor]):
                self._there[item] -= 1
                if not self._there[item]:
                    del self._there[item]
                    over.append(item)
        return over

    def gave(self, run: Run) -> int:
        """A run has given the outputs of its step: their number."""
        step, number = self._steps[run.step], run.number
        if step.streams:
            number = self._given[run.step]
            self._given[run.step] += 1
            if self._followers[run.step]:
                self._left[run.step, number] = self._followers[run.step]
                self._on_way[run.step] += 1
        for tensor in dict.fromkeys(step.outputs.values()):
            if tensor in self.passed:
                self._arrived(tensor, number)
        if number != ONCE and run.step in self._givers.get(self._answers_by, ()):
            self._told[number] += 1
        self._untold.discard(run.step)
        return number

    def paused(self, run: Run) -> None:
        """A run of a step that streams has given an answer, and may give more."""
        self.running -= 1
        self._paused.append(run)

    def ended(self, run: Run) -> None:
        """A run gives nothing more."""
        self.running -= 1
        step = self._steps[run.step]
        if run.number != ONCE:
            self._followed(step.behind, run.number)
            if step.in_turn:
                self._turn[run.step] += 1
                self._look(run.step, run.number + 1)

    @property
    def over(self) -> bool:
        """Whether nothing runs and nothing will, but for the bound."""
        return not (self.running or self._ready or self._paused)

    # ---------------------------------------------------------------- answers

    def answer(self) -> int | None:
        """The number of the next answer, if all of it is there."""
        if self._untold or not self._givers:
            return None
        if self._answers_by == ONCE:
            return ONCE if self._next == ONCE else None
        complete = self._told[self._next] == len(self._givers[self._answers_by])
        return self._next if complete else None

    def follows(self, number: int) -> bool:
        """Whether another answer is there after the one of this number."""
        given = len(self._givers[self._answers_by])
        return number != ONCE and self._told[number + 1] == given

    def answered(self, number: int) -> None:
        """The client has that answer."""
        self._next = number + 1
        if number != ONCE:
            del self._told[number]
            self._followed(self._answers_by, number)

    # ---------------------------------------------------------------- private

    def _has_room(self, stream: int) -> bool:
        return self._on_way[stream] < self._limit

    def _followed(self, stream: int, number: int) -> None:
        self._left[stream, number] -= 1
        if not self._left[stream, number]:
            del self._left[stream, number]
            self._on_way[stream] -= 1

    def _arrived(self, tensor: str, number: int) -> None:
        takers = self._takers.get(tensor, ())
        if takers:
            self._there[tensor, number] = len(takers)
        for index in takers:
            if self._steps[index].behind == ONCE:
                self._look(index, ONCE)
            elif number != ONCE:
                self._waiting.setdefault(index, set()).add(number)
                self._look(index, number)
            else:
                for known in sorted(self._waiting.get(index, ())):
                    self._look(index, known)

    def _look(self, index: int, number: int) -> None:
        """Have a run wait to be taken, if all is there."""
        step, run = self._steps[index], Run(index, number)
        if number != ONCE:
            if number not in self._waiting.get(index, ()):
                return
            if step.in_turn and self._turn[index] != number:
                return
        if all(self.item(tensor, run) in self._there for tensor in step.inputs.values()):
            self._waiting.get(index, set()).discard(number)
            (self._paused if step.streams else self._ready).append(run)


def _stream_of(index: int, step: EnsembleStep) -> int:
    return index if step.streams else step.behind
