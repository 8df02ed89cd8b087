"""Ensemble progress: decides which step of an ensemble may run when, for one request.

A streaming step gives its outputs any number of times. The steps behind the stream run once for
each answer, and their runs and tensors carry the answer's number. All other tensors and runs exist
`ONCE`; a step behind a stream uses such tensors in each run. `core.scheduling.ensemble_graph`
determines the stream, at most one, behind which a step runs.
"""

from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from shmserve.tensor.spec import EnsembleStep

ONCE = -1
Item = tuple[str, int]  # (tensor of the ensemble, number)


class Run(NamedTuple):
    """Run of a step. The run of a streaming step lasts until its last answer."""

    step: int
    number: int


class GraphProgress:
    """Runs of one request. Not thread-safe.

    Args:
        inputs: tensors which the request may have; present from the beginning.
        wanted: tensors of the answers.
        limit: unfinished answers allowed per stream. An answer is unfinished until all steps
            behind it have run and the client's part is taken.

    Attributes:
        passed: tensors passed from step to step.
        running: runs taken and neither ended nor paused.
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
        self._number_by: dict[str, int] = {}  # passed tensor -> its stream
        self._givers: dict[int, set[int]] = {}  # stream or ONCE -> steps that give wanted tensors
        for index, step in enumerate(steps):
            stream = index if step.streams else step.behind
            for tensor in step.outputs.values():
                if tensor in self.passed:
                    self._number_by[tensor] = stream
                if tensor in wanted:
                    self._givers.setdefault(stream, set()).add(index)
        self._answers_by = max(self._givers, default=ONCE)  # stream that numbers the answers
        # steps still to give a tensor which exists once
        self._givers_pending = set(self._givers.get(ONCE, ()))
        self._givers_done: Counter[int] = Counter()  # answer number -> steps that have given
        self._next = 0 if self._answers_by != ONCE else ONCE  # number of the next answer
        self._followers = Counter(step.behind for step in steps)
        self._followers[self._answers_by] += 1
        self._present: dict[Item, int] = {}  # present item -> steps still to take it
        self._given: Counter[int] = Counter()  # stream -> answers so far
        self._followers_left: dict[tuple[int, int], int] = {}  # (stream, number) -> followers
        self._on_way: Counter[int] = Counter()  # stream -> unfinished answers
        self._turn: Counter[int] = Counter()  # in-order step -> number of its next run
        # step behind a stream -> numbers without a run yet
        self._waiting: dict[int, set[int]] = {}
        self._ready: deque[Run] = deque()
        self._paused: deque[Run] = deque()  # streaming runs between two answers
        self.running = 0
        for tensor in inputs:
            self._arrived(tensor, ONCE)

    # ------------------------------------------------------------------- runs

    @property
    def runnable(self) -> int:
        """Number of runs that `take` can return now."""
        return len(self._ready) + sum(self._has_room(run.step) for run in self._paused)

    def take(self) -> Run | None:
        """Return a run to begin, or a paused stream to continue; None if there is neither. New
        runs go before paused streams."""
        run = self._ready.popleft() if self._ready else None
        if run is None:
            run = next((run for run in self._paused if self._has_room(run.step)), None)
            if run is None:
                return None
            self._paused.remove(run)
        self.running += 1
        return run

    def item(self, tensor: str, run: Run) -> Item:
        """Return the item used by this run for an input tensor."""
        return (tensor, ONCE if self._number_by.get(tensor, ONCE) == ONCE else run.number)

    def began(self, run: Run) -> list[Item]:
        """Record that a run has its inputs; return the items needed by no further run."""
        over = []
        for tensor in dict.fromkeys(self._steps[run.step].inputs.values()):
            item = self.item(tensor, run)
            # Steps behind a stream need an item which exists once until the stream ends
            if item[1] != ONCE or all(self._steps[s].behind == ONCE for s in self._takers[tensor]):
                self._present[item] -= 1
                if not self._present[item]:
                    del self._present[item]
                    over.append(item)
        return over

    def gave(self, run: Run) -> int:
        """Record the outputs of a run. Return the number that the outputs carry: `ONCE`, or the
        number of an answer."""
        step, number = self._steps[run.step], run.number
        if step.streams:
            number = self._given[run.step]
            self._given[run.step] += 1
            if self._followers[run.step]:
                self._followers_left[run.step, number] = self._followers[run.step]
                self._on_way[run.step] += 1
        for tensor in dict.fromkeys(step.outputs.values()):
            if tensor in self.passed:
                self._arrived(tensor, number)
        if number != ONCE and run.step in self._givers.get(self._answers_by, ()):
            self._givers_done[number] += 1
        self._givers_pending.discard(run.step)
        return number

    def paused(self, run: Run) -> None:
        """Record that a streaming run has given an answer and may give more."""
        self.running -= 1
        self._paused.append(run)

    def ended(self, run: Run) -> None:
        """Record that a run gives nothing more."""
        self.running -= 1
        step = self._steps[run.step]
        if run.number != ONCE:
            self._followed(step.behind, run.number)
            if step.in_turn:
                self._turn[run.step] += 1
                self._look(run.step, run.number + 1)

    @property
    def over(self) -> bool:
        """True if nothing runs and no run is ready or paused."""
        return not (self.running or self._ready or self._paused)

    # ---------------------------------------------------------------- answers

    def answer(self) -> int | None:
        """Return the number of the next answer if the answer is complete, else None."""
        if self._givers_pending or not self._givers:
            return None
        if self._answers_by == ONCE:
            return ONCE if self._next == ONCE else None
        complete = self._givers_done[self._next] == len(self._givers[self._answers_by])
        return self._next if complete else None

    def follows(self, number: int) -> bool:
        """Return True if the next answer after `number` is complete."""
        given = len(self._givers[self._answers_by])
        return number != ONCE and self._givers_done[number + 1] == given

    def answered(self, number: int) -> None:
        """Record that the client has answer `number`."""
        self._next = number + 1
        if number != ONCE:
            del self._givers_done[number]
            self._followed(self._answers_by, number)

    # ---------------------------------------------------------------- private

    def _has_room(self, stream: int) -> bool:
        return self._on_way[stream] < self._limit

    def _followed(self, stream: int, number: int) -> None:
        self._followers_left[stream, number] -= 1
        if not self._followers_left[stream, number]:
            del self._followers_left[stream, number]
            self._on_way[stream] -= 1

    def _arrived(self, tensor: str, number: int) -> None:
        takers = self._takers.get(tensor, ())
        if takers:
            self._present[tensor, number] = len(takers)
        for index in takers:
            if self._steps[index].behind == ONCE:
                self._look(index, ONCE)
            elif number != ONCE:
                self._waiting.setdefault(index, set()).add(number)
                self._look(index, number)
            else:
                for waiting_number in sorted(self._waiting.get(index, ())):
                    self._look(index, waiting_number)

    def _look(self, index: int, number: int) -> None:
        """Make a run ready if all its inputs are present."""
        step, run = self._steps[index], Run(index, number)
        if number != ONCE:
            if number not in self._waiting.get(index, ()):
                return
            if step.in_turn and self._turn[index] != number:
                return
        if all(self.item(tensor, run) in self._present for tensor in step.inputs.values()):
            self._waiting.get(index, set()).discard(number)
            (self._paused if step.streams else self._ready).append(run)
