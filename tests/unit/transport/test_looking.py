"""Looks before waits, with a clock and events of the test's own."""

import threading
from functools import partial
from time import monotonic_ns

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.transport import cgroups, looking
from shmserve.transport.looking import LookingWait

US = 1000
BUDGET = 100
POLL_US = 2  # what a poll takes on the test's clock


@pytest.fixture(autouse=True)
def _budget(monkeypatch):
    monkeypatch.setattr(looking, "_budget_ns", BUDGET * US)


class Machine:
    """A clock, and an event at a set time. Looks and sleeps are recorded in microseconds."""

    def __init__(self, monkeypatch=None):
        self.now = 1_000_000_000
        self.event_at = 0
        self.looked = 0
        self.slept = 0
        self.away = 0  # time that others have the processor at the next yield, in microseconds
        if monkeypatch is not None:
            monkeypatch.setattr(looking, "give_way", self.give_way)
        self.look = LookingWait(self.poll, clock=lambda: self.now)

    def give_way(self):
        self.now += self.away * US
        self.away = 0

    def poll(self, timeout_s):
        if not timeout_s:
            self.now += POLL_US * US
            self.looked += POLL_US
        elif self.event_at > self.now:
            wake_at = min(self.event_at, self.now + round(timeout_s * 1e9))
            self.slept += (wake_at - self.now) // US
            self.now = wake_at
        return ["event"] if self.now >= self.event_at else []

    def wait(self, us, timeout_s=1.0, kind=0):
        """Wait for an event that comes in so many microseconds."""
        self.event_at = self.now + us * US
        self.looked = self.slept = 0
        return self.look.wait(timeout_s, kind)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_a_wait_sleeps_unless_the_last_one_was_short(machine):
    assert machine.wait(50) == ["event"]
    assert machine.slept > 0
    assert machine.wait(50) == ["event"]
    assert machine.slept == 0
    assert machine.wait(5000) == ["event"]  # looked for the budget, then slept
    assert BUDGET <= machine.looked <= BUDGET + 3 * POLL_US
    assert machine.wait(5000) == ["event"]
    assert machine.looked <= POLL_US


def test_kinds_of_waits_predict_themselves_alone(machine):
    for _ in range(3):
        machine.wait(50, kind=1)
        assert machine.wait(10_000, kind=0) == ["event"]
        assert machine.looked <= POLL_US
    machine.wait(50, kind=1)
    assert machine.slept == 0


def test_a_timeout_holds_for_look_and_sleep_together(machine):
    machine.wait(50)
    began = machine.now
    assert machine.wait(5000, timeout_s=0.001) == []
    assert 1000 * US <= machine.now - began <= (1000 + 3 * POLL_US) * US
    machine.wait(50)
    machine.wait(50)
    began = machine.now
    assert machine.wait(5000, timeout_s=20e-6) == []
    assert machine.now - began <= (20 + 3 * POLL_US) * US


def test_no_look_while_others_want_the_processor(machine):
    machine.wait(50)
    machine.away = 3000
    machine.wait(50)
    for pause in (5_000, 10_000, 20_000):
        for _ in range(3):
            machine.wait(50)
            assert machine.slept > 0
        machine.now += pause * US
        machine.wait(50)  # short: the next one may look
        machine.away = 3000
        machine.wait(50)
    machine.now += 40_000 * US
    machine.wait(50)
    machine.wait(50)
    assert machine.slept == 0


def test_a_look_that_gives_way_to_the_awaited_process_goes_on(machine):
    machine.wait(50)
    machine.away = 40
    machine.wait(50)
    assert machine.slept == 0
    machine.wait(50)
    assert machine.slept == 0


def test_no_look_while_the_quota_is_used_up(machine, monkeypatch):
    counts = iter([5, 5, 6, 6])
    monkeypatch.setattr(cgroups, "throttled", lambda: next(counts))
    looks = []
    for _ in range(4):
        machine.wait(50)
        machine.wait(50)
        looks.append(machine.slept == 0)
        machine.now += 1_000_000_000
    assert looks == [True, True, False, True]


def test_a_budget_of_zero_never_looks(monkeypatch):
    timeouts = []
    monkeypatch.setattr(looking, "_budget_ns", 0)
    look = LookingWait(lambda timeout, limit: timeouts.append((timeout, limit)), 256)
    for _ in range(3):
        look.wait(1.0)
    assert timeouts == [(1.0, 256)] * 3


def test_the_budget_depends_on_processors(monkeypatch):
    monkeypatch.setattr(looking, "_budget_ns", None)
    looking.permit(7)
    looking.permit("auto")
    assert looking._budget_ns == 7 * US, "the first call counts"
    for processors, budget_us in ((2.0, looking.DEFAULT_US), (1.5, 0)):
        monkeypatch.setattr(cgroups, "processors", partial(float, processors))
        monkeypatch.setattr(looking, "_budget_ns", None)
        looking.permit("auto")
        assert looking._budget_ns == budget_us * US


@pytest.mark.parametrize("us", [-1, 1001])
def test_a_budget_out_of_range_is_refused(us):
    with pytest.raises(ValueError, match=f"look_us: {us} is not between 0 and 1000"):
        looking.permit(us)


def test_a_steady_caller_costs_one_percent_at_most(machine):
    """Ten milliseconds between requests, and an answer that takes less than the budget."""
    looked = 0
    began = machine.now
    for _ in range(1000):
        machine.wait(80, kind=1)
        looked += machine.looked
        machine.wait(10_000, kind=0)
        looked += machine.looked
    assert looked <= (machine.now - began) / US / 100 + looking._SAVED_NS / US + BUDGET


def test_a_busy_caller_never_has_the_thread_sleep(machine):
    """A caller that sends its next request at once: all waits are looks, for as long as it does."""
    for _ in range(4):
        machine.wait(50)
    for _ in range(10_000):
        machine.wait(50)
        assert machine.slept == 0


def test_looks_in_vain_are_paid_for_although_the_thread_is_busy(machine):
    """Each fourth wait is just too long for a look."""
    vain = 0
    began = machine.now
    for number in range(4000):
        machine.wait(10 if number % 4 else 150)
        vain += machine.slept > 0 and machine.looked > 3 * POLL_US
    spent = vain * BUDGET * US
    assert spent <= (machine.now - began) / 10


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 400)), max_size=60))
def test_looks_cost_no_more_than_the_short_waits_allow(waits):
    """A look in vain follows a short wait, so looks in vain are at most as many as short waits,
    and none is longer than the budget."""
    machine = Machine()
    vain = short = 0
    for kind, us in waits:
        assert machine.wait(us, kind=kind) == ["event"]
        assert machine.looked <= BUDGET + 3 * POLL_US
        vain += machine.slept > 0 and machine.looked > POLL_US
        short += us < BUDGET + 3 * POLL_US
    assert vain <= short


def test_a_look_lets_other_threads_of_the_process_run():
    """A thread that computes goes on while another looks: a look gives up the interpreter's
    lock with each poll."""
    look = LookingWait(lambda _: None)
    counted, is_over = 0, False

    def count():
        nonlocal counted
        while not is_over:
            counted += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(100):
            assert looking._turn.acquire(timeout=10)
            began = monotonic_ns()
            look._look(began, began + 1000 * US)
    finally:
        is_over = True
        thread.join()
    assert counted > 1000
