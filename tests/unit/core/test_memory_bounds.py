"""Executors with a bound: times of measurements, and excess."""

from shmserve.core.control.memory_bounds import MemoryBounds


class Machine:
    """Memory of a process. `counts`: number of walks of the page tables."""

    def __init__(self) -> None:
        self.bounds = MemoryBounds(self._whole, self._proportional)
        self.own: int | None = 10
        self.shared = 0
        self.knows_whole = True
        self.measured = self.counts = 0

    def look(self, works: bool = True) -> int | None:
        return self.bounds.looked("executor-1-aa", 7, 100, works)

    def _whole(self, pid: int) -> int | None:
        assert pid == 7
        self.measured += 1
        return None if self.own is None or not self.knows_whole else self.own + self.shared

    def _proportional(self, pid: int) -> int | None:
        self.counts += 1
        return self.own


def test_use_beyond_the_bound_is_told() -> None:
    machine = Machine()
    assert machine.look() == 0
    machine.own = 100
    assert machine.look() == 0
    machine.own = 101
    assert machine.look() == 101


def test_the_share_of_pages_is_counted_only_beyond_the_bound() -> None:
    machine = Machine()
    machine.own, machine.shared = 60, 40
    assert (machine.look(), machine.counts) == (0, 0)
    machine.shared = 41
    assert (machine.look(), machine.counts) == (0, 1)
    machine.own = 101
    assert (machine.look(), machine.counts) == (101, 2)


def test_where_only_the_share_is_known_it_counts() -> None:
    machine = Machine()
    machine.knows_whole = False
    assert machine.look() == 0
    machine.own = 101
    assert machine.look() == 101


def test_an_executor_without_work_is_measured_at_every_fifth_look() -> None:
    machine = Machine()
    for _ in range(20):
        machine.look(works=False)
    assert machine.measured == 4
    machine.look(works=True)
    assert machine.measured == 5
    machine.own = 101
    assert [machine.look(works=False) for _ in range(5)] == [0, 0, 0, 0, 101]


def test_an_unknown_use_is_no_excess() -> None:
    machine = Machine()
    machine.own = None
    assert machine.look() is None
    assert machine.look(works=False) == 0, "not measured"


def test_a_process_that_has_gone_is_forgotten() -> None:
    machine = Machine()
    machine.own = 101
    assert [machine.look(works=False) for _ in range(4)] == [0] * 4
    machine.bounds.gone("executor-1-aa")
    assert [machine.look(works=False) for _ in range(5)] == [0, 0, 0, 0, 101]
