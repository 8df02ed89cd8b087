"""The coordinator's sums over pages of processes that live, have ended, or outlived the
coordinator."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shmserve.config import Settings
from shmserve.coordinator.stats import admin_tables
from shmserve.coordinator.stats.counter_totals import CounterTotals
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.memory.budget import Ledger
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.stats.counter_pages import UNCOUNTED_WORD
from shmserve.core.stats.custom_metrics import Family, MetricKind, Series
from shmserve.core.stats.executor_counters import ExecutorCounters
from shmserve.core.stats.request_counters import Reason, RequestCounters, RequestCounts, nwords
from shmserve.protocol.control.stats_messages import (
    CounterPage,
    DropPages,
    ModelReport,
    PageOwner,
    Report,
    StorePages,
)
from shmserve.shm.metrics_area import MetricsArea
from shmserve.shm.replaced_file import ReplacedFile
from shmserve.shm.status_page import COUNTERS, DEPTH, SIZE
from shmserve.transport.channel import close_all
from tests.running_server import open_fds

SUPERVISOR = "supervisor-1"


class Page:
    """The page of a real process that the test can end."""

    def __init__(self, role: str, number: int) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.owner = PageOwner(f"{role}-{number}", role, self.process.pid)
        self.nbytes = SIZE if role == "executor" else nwords(4) * 8
        self.fd = os.memfd_create("page")
        self.memory = bytearray(self.nbytes)
        self.words = memoryview(self.memory).cast("Q")
        if role == "executor":
            self.owner = PageOwner(*self._key(role, number), "m", "1", "m/1/0")
            self.runs = ExecutorCounters(self.words[COUNTERS:])
        else:
            self.requests = RequestCounters(self.words)
        self.write()

    def _key(self, role: str, number: int) -> tuple[str, str, int]:
        return f"{role}-{number}", role, self.process.pid

    def count(self, answered: int, failed: int = 0) -> None:
        for _ in range(answered):
            self.requests.ended("m", "1", None, 1000)
        for _ in range(failed):
            self.requests.ended("m", "1", Reason.MODEL, 1000)
        self.write()

    def sending(self, number: int) -> None:
        head = COUNTERS if self.owner.role == "executor" else 0
        self.words[head + UNCOUNTED_WORD] = number
        self.write()

    def write(self) -> None:
        os.pwrite(self.fd, self.memory, 0)

    def tell(self, counters: CounterTotals, supervisor: str = SUPERVISOR) -> None:
        message = CounterPage(self.nbytes, self.owner.model, self.owner.version)
        counters.arrived(self.owner, message, [os.dup(self.fd)], supervisor)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.end()
        os.close(self.fd)


class World:
    """Coordinators one after the other, and the supervisor's descriptors."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = str(run_dir)
        self.stored: dict[PageOwner, int] = {}
        self.pages: list[Page] = []
        self.dropping = True
        self.counters = self.another()

    def send(self, process: str, message: object, fds: tuple[int, ...] = ()) -> None:
        assert process == SUPERVISOR
        if isinstance(message, StorePages):
            for owner, fd in zip(message.owners, fds, strict=True):
                self.stored[owner] = os.dup(fd)
        elif isinstance(message, DropPages) and self.dropping:
            close_all([self.stored.pop(owner) for owner in message.owners])

    def another(self, epoch: str = "cafe0123") -> CounterTotals:
        """Start the next coordinator, with the totals' file and the descriptors that the
        supervisor keeps."""
        self.counters = CounterTotals(self.run_dir, epoch, self.send, 2)
        if self.stored:
            owners = tuple(self.stored)
            fds = [os.dup(self.stored[owner]) for owner in owners]
            self.counters.stored(SUPERVISOR, owners, fds, more=False)
        return self.counters

    def page(self, role: str, supervisor: str = SUPERVISOR) -> Page:
        page = Page(role, len(self.pages))
        self.pages.append(page)
        page.tell(self.counters, supervisor)
        return page

    def end(self, page: Page) -> None:
        page.end()
        self.counters.gone(page.owner.process)

    def tick(self) -> None:
        self.counters.tick(SUPERVISOR, lambda model, version: True)

    def report(self) -> Report:
        reconciler = Reconciler(Ledger(1000, 0), 1.0, 1.0)
        return self.counters.report(reconciler, RegionBook(Settings(), 0), ())

    def answered(self) -> int:
        return sum(model.all_requests().succeeded for model in self.report().models)

    def close(self) -> None:
        self.counters.close()
        close_all(self.stored.values())
        for page in self.pages:
            page.close()


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    before = open_fds(os.getpid())
    yield made
    made.close()
    assert open_fds(os.getpid()) <= before


def test_pages_of_all_processes_add_up(world: World) -> None:
    for number in range(3):
        world.page("http").count(number + 1, failed=1)
    world.page("grpc").count(10)
    (model,) = world.report().models
    assert model.all_requests().succeeded == 16
    assert {role: counts.succeeded for role, counts in model.requests.items()} == {
        "http": 6,
        "grpc": 10,
    }
    assert world.report().starts == {"http": 3, "grpc": 1}


def test_an_executors_page_tells_of_its_queue(world: World) -> None:
    page = world.page("executor")
    page.words[DEPTH] = 7
    page.runs.executed(1, 123, 1, 2, 3, 4)
    page.write()
    report = world.report()
    assert [(p.owner.instance, p.depth) for p in report.processes] == [("m/1/0", 7)]
    assert report.models[0].runs.stage_ns == [4, 1, 2, 3]


def test_an_unchanged_page_gives_the_identical_reading(world: World) -> None:
    page = world.page("executor")
    first = world.counters.reading(page.owner.process)
    assert first is not None
    assert world.counters.reading(page.owner.process) is first
    page.words[DEPTH] = 1
    page.write()
    changed = world.counters.reading(page.owner.process)
    assert (changed and changed.depth) == 1
    assert world.counters.reading("executor-9") is None


def test_models_own_metrics_are_told_as_long_as_their_executor_has_a_link(world: World) -> None:
    page, other = world.page("executor"), world.page("executor")
    assert world.counters.custom_metrics() == ([], 0)
    family = Family("n", "", MetricKind.COUNTER, (Series(()),))
    words = MetricsArea(page.fd).write([family], [1])
    words[0] = 5
    os.pwrite(other.fd, b"x" * 64, SIZE)
    ((told,), unreadable) = world.counters.custom_metrics()
    assert (told.model, told.version, told.instance) == ("m", "1", "m/1/0")
    assert (told.families[0].series[0].values, unreadable) == ((5,), 1)
    assert world.report().unreadable == 0  # the counts of requests can be read
    world.end(page)
    assert world.counters.custom_metrics() == ([], 1)


def test_what_a_killed_process_counted_stays_and_its_page_goes(world: World) -> None:
    page = world.page("http")
    page.count(5)
    page.requests.show_in_flight({("m", "1"): 3})
    page.write()
    assert world.report().pending() == {("m", "1"): 3}
    world.end(page)
    assert world.answered() == 5
    world.tick()
    assert world.answered() == 5
    assert world.report().pending() == {("m", "1"): 0}
    assert world.stored == {}
    report = world.report()
    assert (report.starts, report.ends, report.processes) == ({"http": 1}, {"http": 1}, ())


def test_a_broken_link_is_no_end(world: World) -> None:
    page = world.page("http")
    world.counters.gone(page.owner.process)
    world.tick()
    page.count(2)
    page.tell(world.counters)
    page.count(1)
    assert world.answered() == 3
    assert world.report().starts == {"http": 1}


def test_no_coordinators_death_loses_or_doubles_anything(world: World) -> None:
    """At every moment the next coordinator reports the sums of the last coordinator."""
    lives, dies = world.page("http"), world.page("http")
    lives.count(1)
    dies.count(10)
    world.counters.close()
    world.another()  # neither has said hello yet
    assert world.answered() == 11
    lives.tell(world.counters)
    dies.end()  # while no coordinator ran
    world.tick()
    assert world.answered() == 11
    world.counters.close()
    world.another()  # lives has not said hello
    assert world.answered() == 11
    lives.count(100)
    lives.tell(world.counters)
    assert world.answered() == 111
    assert world.report().ends == {"http": 1}


def test_a_page_that_was_added_up_is_not_added_again(world: World) -> None:
    page = world.page("http")
    page.count(4)
    world.end(page)
    # the coordinator dies after writing the file and before the message to the supervisor
    world.dropping = False
    world.tick()
    world.counters.close()
    world.dropping = True
    world.another()
    world.tick()
    assert world.answered() == 4
    assert world.stored == {}


def test_a_new_supervisor_is_given_all_pages(world: World) -> None:
    page = world.page("http", supervisor="")
    assert world.stored == {}
    world.counters.store_all(SUPERVISOR)
    assert list(world.stored) == [page.owner]


def test_after_a_restart_reports_wait_for_the_pages_that_are_kept(tmp_path) -> None:
    counters = CounterTotals(str(tmp_path), "cafe0123", lambda *_: None, 2, settle_until=10.0)
    assert not counters.settled(9.0)
    assert counters.settled(10.0)
    counters.stored(SUPERVISOR, (), (), more=True)
    assert not counters.settled(9.0)
    counters.stored(SUPERVISOR, (), (), more=False)
    assert counters.settled(9.0)


def test_another_service_starts_at_zero(world: World) -> None:
    page = world.page("http")
    page.count(4)
    world.end(page)
    world.tick()
    world.counters.close()
    world.another("beef4567")
    assert world.answered() == 0


def test_a_page_that_is_cut_short_or_nonsense_is_left_out_and_counted(world: World) -> None:
    short, nonsense, good = (world.page("http") for _ in range(3))
    good.count(1)
    os.ftruncate(short.fd, 100)
    os.pwrite(nonsense.fd, b"\xff" * 8, 0)
    assert world.answered() == 1
    assert world.report().unreadable == 2
    world.end(short)
    world.tick()
    assert world.answered() == 1


def test_versions_that_are_served_no_more_are_bounded(world: World) -> None:
    page = world.page("http")
    for number in range(4):
        page.requests.ended(f"old{number}", "1", None, 1)
    page.write()
    world.end(page)
    world.counters.tick(SUPERVISOR, lambda model, version: model == "old0")
    assert {m.model for m in world.report().models} == {"old0", "old2", "old3"}


def test_requests_by_key_outlive_their_process_within_a_bound(world: World) -> None:
    page, other = world.page("http"), world.page("grpc")
    for name, count in (("often", 3), ("seldom", 1), ("rarely", 1)):
        for _ in range(count):
            page.requests.keyed(name)
    other.requests.keyed("often")
    for each in (page, other):
        each.write()
    counted = {"often": 4, "seldom": 1, "(other)": 1}
    assert world.report().keys == counted
    world.end(page)
    world.tick()
    world.counters.close()
    world.another()
    assert world.report().keys == counted


def test_rows_of_shmserve_show_stats() -> None:
    model = ModelReport("m", "1")
    model.runs.requests, model.runs.stage_ns = 2, [2_000_000, 4_000_000, 0, 0]
    (row,) = admin_tables.stats_rows(Report((model,), (), {}, {}))
    assert (row["queue_ms"], row["compute_input_ms"], row["request_ms"]) == (1.0, 2.0, 0.0)
    assert (row["model"], row["answered"], row["failed"]) == ("m", 0, 0)


def test_show_stats_counts_the_runs_of_ensembles() -> None:
    counts = RequestCounts(batches={1: [5, 2, 2, 0, 4_000_000, 0]})
    (row,) = admin_tables.stats_rows(
        Report((ModelReport("e", "1", requests={"http": counts}),), (), {}, {})
    )
    assert (row["executions"], row["inferences"], row["compute_infer_ms"]) == (2, 2, 2.0)


def test_reading_is_not_stopped_by_a_file_that_cannot_be_written(world: World) -> None:
    page = world.page("http")
    page.count(3)
    world.counters._file = ReplacedFile("/proc/nowhere/totals")
    world.end(page)
    world.tick()
    assert world.answered() == 3


def test_answers_that_executors_have_not_counted_yet_are_seen(world: World) -> None:
    executor, frontend = world.page("executor"), world.page("http")
    lanes = Page("lane", 7)
    world.pages.append(lanes)
    lanes.owner = PageOwner(executor.owner.process, "executor", executor.owner.pid)
    lanes.tell(world.counters)
    lanes.owner = PageOwner("", "lane", 0)
    for page, number in ((executor, 3), (lanes, 4), (frontend, 5)):
        page.sending(number)
    name = executor.owner.process
    assert world.counters.uncounted() == {name: 3, f"{name}-lanes": 4}
    executor.sending(0)
    assert world.counters.uncounted() == {f"{name}-lanes": 4}
    os.ftruncate(lanes.fd, 0)
    assert world.counters.uncounted() == {}
