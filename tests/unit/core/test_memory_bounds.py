"""Executors with a bound: times of measurements, and excess."""

from shmserve.core.control.memory_bounds import MemoryBounds


class Machine:
    """Memory of a process. `counts`: number of walks of the page tables."""

    def __init__(self) -> None:
        self.bounds = MemoryBounds(self._mapped, self._proportional)
        self.own: int | None = 10
        self.shared = 0
        self.measured = self.counts = 0

    def look(self, works: bool = True) -> int:
        return self.bounds.looked("executor-1-aa", 7, 100, works)

    def _mapped(self, pid: int) -> int | None:
        assert pid == 7
        self.measured += 1
        return None if self.own is None else self.own + self.shared

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


def test_pages_of_other_processes_do_not_count_and_are_seldom_counted() -> None:
    machine = Machine()
    machine.shared = 200
    assert [machine.look() for _ in range(50)] == [0] * 50
    assert machine.counts == 1
    machine.own = 90
    assert (machine.look(), machine.counts) == (0, 1)
    machine.own = 101
    assert (machine.look(), machine.counts) == (101, 2)


def test_an_executor_without_work_is_measured_at_every_fifth_look() -> None:
    machine = Machine()
    for _ in range(20):
        machine.look(works=False)
    assert machine.measured == 4
    machine.look(works=True)
    assert machine.measured == 5
    machine.own = 101
    assert [machine.look(works=False) for _ in range(5)] == [0, 0, 0, 0, 101]


def test_an_ended_process_and_a_new_one_begin_anew() -> None:
    machine = Machine()
    machine.shared = 200
    machine.look()
    machine.own = None
    assert machine.look() == 0
    machine.bounds.gone("executor-1-aa")
    machine.own, machine.shared = 150, 0
    assert machine.look() == 150, "the old one's shared pages are forgotten"
