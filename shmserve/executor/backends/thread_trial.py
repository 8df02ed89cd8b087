"""Thread trial: chooses the number of threads of a model's runs, by the time of real runs.

A run on several threads ends with the slowest thread, so a small model is fastest on one thread,
and a large model on all cores. In a trial the candidate counts take turns. The smallest count with
a median time within `_NEAR` of the best wins. Each class of input sizes (powers of two) has a
separate trial, because a large batch may need more threads than a single row. A new trial begins
after `_AGAIN` runs, because the load of other processes on the same cores changes. Pure: the caller
measures time.
"""

from statistics import median

_FIRST_RUNS = 5  # of a class; TorchScript optimises during its first runs
_ROUNDS = 9  # runs of each candidate in a trial
_AGAIN = 5000
_NEAR = 1.05


def candidates(cores: int) -> tuple[int, ...]:
    """Return the candidate counts for `cores` cores: all cores, halves, one."""
    counts = []
    while cores > 1:
        counts.append(cores)
        cores //= 2
    return (*counts, 1)


class _SizeClass:
    """State of one class of sizes: chosen count, runs before the next trial, measured times."""

    def __init__(self, first: int) -> None:
        self.chosen = first
        self.wait = _FIRST_RUNS
        self.times: dict[int, list[float]] = {}


class ThreadTrial:
    """Choice of threads for one instance. `counts`: candidates; the first candidate is used before
    the first trial. `chosen`: winner of the latest trial."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._counts = counts
        self._classes: dict[int, _SizeClass] = {}
        self.chosen = counts[0]

    @property
    def is_open(self) -> bool:
        """True if there is a choice."""
        return len(self._counts) > 1

    def threads(self, elements: int) -> int:
        """Return the number of threads for the next run, on inputs of `elements` elements."""
        size = self._class(elements)
        if size.wait:
            return size.chosen
        return min(self._counts, key=lambda count: len(size.times.get(count, ())))

    def ran(self, elements: int, count: int, seconds: float) -> None:
        """Take the time of a run on `count` threads."""
        size = self._class(elements)
        if size.wait:
            size.wait -= 1
            return
        size.times.setdefault(count, []).append(seconds)
        if all(len(size.times.get(count, ())) >= _ROUNDS for count in self._counts):
            times = {count: median(size.times[count]) for count in self._counts}
            limit = _NEAR * min(times.values())
            self.chosen = size.chosen = min(c for c in self._counts if times[c] <= limit)
            size.times, size.wait = {}, _AGAIN

    def _class(self, elements: int) -> _SizeClass:
        number = elements.bit_length()
        if number not in self._classes:
            self._classes[number] = _SizeClass(self._counts[0])
        return self._classes[number]
