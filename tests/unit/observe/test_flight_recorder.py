"""Rings of events as files: bounded, and nobody's trouble."""

import os
import stat
import subprocess
import sys

import pytest

from shmserve.core.stats.event_ring import RecordedEvent
from shmserve.errors import Unavailable
from shmserve.frontends.heap_budget import HeapBudget
from shmserve.observe import flight_recorder
from shmserve.supervisor.processes.children import Child
from shmserve.supervisor.processes.life_watch import LifeWatch
from shmserve.transport import rundir
from tests.no_descriptors import no_descriptors


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    recorder = flight_recorder._Recorder(str(tmp_path), "http-1-ab", 9)
    monkeypatch.setattr(flight_recorder, "_recorder", recorder)
    yield recorder
    if recorder._fd >= 0:
        os.close(recorder._fd)


def seen(run_dir):
    rows = flight_recorder.rows(str(run_dir), 1000)
    return [(row["process"], row["event"], row["subject"], row["count"]) for row in rows]


def test_a_limit_that_is_reached_again_and_again_is_one_row(tmp_path, recorder):
    assert not (tmp_path / "events").exists()  # nothing has happened
    for _ in range(50):
        with pytest.raises(Unavailable):
            HeapBudget().take(2, most=1)
    rows = seen(tmp_path)
    assert {row[:3] for row in rows} == {("http-1-ab", "limit reached", "memory of bodies")}
    assert sum(row[3] for row in rows) == 50
    assert len(rows) < 5
    assert stat.S_IMODE((tmp_path / "events").stat().st_mode) == 0o700


def test_a_follower_has_every_event_and_the_fields_of_its_log_line(tmp_path, recorder, monkeypatch):
    taken: list[RecordedEvent] = []
    monkeypatch.setattr(flight_recorder, "_follow", None)
    flight_recorder.follow(taken.append)
    for _ in range(2):
        flight_recorder.record("warning", "coordinator", "stopping", {"instance": "m/1/0"})
    assert [(e.text, e.count, e.fields) for e in taken] == [
        ("stopping", 1, {"instance": "m/1/0"})
    ] * 2
    rows = flight_recorder.rows(str(tmp_path))
    assert {row["text"] for row in rows} == {"stopping instance=m/1/0"}
    assert sum(row["count"] for row in rows) == 2


def test_where_nothing_can_be_written_nothing_fails(tmp_path, monkeypatch, caplog):
    recorder = flight_recorder._Recorder(str(tmp_path / "gone"), "http-1-ab", 9)
    monkeypatch.setattr(flight_recorder, "_recorder", recorder)
    for _ in range(3):
        flight_recorder.record("kind", "subject")
    assert len(caplog.records) == 1


def test_a_full_disk_is_looked_at_again_a_second_later(tmp_path, recorder, monkeypatch):
    tries, create = [], flight_recorder._create
    monkeypatch.setattr(flight_recorder, "_create", lambda *a: (tries.append(a), create(*a))[1])
    monkeypatch.setattr(flight_recorder, "_SPARE_INODES", 1 << 62)  # as if nothing was free
    for _ in range(100):
        flight_recorder.record("kind", "late")
    monkeypatch.undo()
    assert len(tries) == 1
    recorder._again_at = 0.0
    recorder.add("kind", "kept", "")
    assert [row[2:] for row in seen(tmp_path)] == [("late", 100), ("kept", 1)]


def test_a_process_without_descriptors_loses_no_event(tmp_path, recorder):
    with no_descriptors():
        recorder.add("kind", "limit reached", "")
    recorder.add("kind", "right after", "")
    recorder._again_at = 0.0
    recorder.add("kind", "later", "")
    assert [row[2] for row in seen(tmp_path)] == ["limit reached", "right after", "later"]


def test_a_ring_that_cannot_be_opened_is_not_taken_for_a_dead_one(tmp_path, recorder):
    recorder.add("kind", "first", "")
    ring = str(tmp_path / "events" / "http-1-ab.ring")
    with no_descriptors():
        assert flight_recorder._is_written(ring)
    os.close(recorder._fd)
    recorder._fd = -1
    assert not flight_recorder._is_written(ring)
    assert not flight_recorder._is_written(ring + "-gone")


def test_what_the_watchdog_kills_is_recorded_and_leaves_a_file(tmp_path, recorder):
    with subprocess.Popen(["sleep", "600"]) as process:
        child = Child.of("grpc 0", process, 0.0)
        lock = rundir.lock(str(tmp_path), "grpc-0")
        life = LifeWatch(str(tmp_path), 1.0, 5.0)
        for second in range(8):
            life.look("grpc-0", child, float(second))
            if process.poll() is not None or (tmp_path / "events").exists():
                break
        child.reap()
    lock.release()
    events = [row[1:3] for row in seen(tmp_path)]
    assert events == [("process killed", "grpc 0"), ("process ended", "grpc 0")]
    assert "gives no sign of life" in (tmp_path / "events" / flight_recorder.BAD_END).read_text()


@pytest.mark.parametrize("living", [0, 1])
def test_rings_of_the_dead_are_kept_within_bounds_and_the_living_keep_theirs(tmp_path, living):
    """The ring of a long-lived process with few events does not count as old."""
    script = (
        "import sys, os; from shmserve.observe import flight_recorder as f\n"
        "f.start(sys.argv[1], 'http-living'); f.record('kind', 'first'); print(flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        if not living:
            process.stdin.close()
            process.wait(60)
        for number in range(flight_recorder.KEPT_RINGS + 3):
            recorder = flight_recorder._Recorder(str(tmp_path), f"http-{number}", 9)
            recorder.add("kind", f"number {number}", "")
            os.close(recorder._fd)  # as it ends
        if living:
            process.stdin.close()
    subjects = [row["subject"] for row in flight_recorder.rows(str(tmp_path), 1000)]
    # The last one looked before it had a ring of its own.
    assert len(subjects) == flight_recorder.KEPT_RINGS + 1 + living
    assert ("first" in subjects) == bool(living)
    assert subjects[-1] == f"number {flight_recorder.KEPT_RINGS + 2}"
