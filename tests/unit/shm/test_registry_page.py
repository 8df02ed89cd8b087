"""The registry's page: one writer, readers in other processes, coordinators that restart."""

import multiprocessing
import os
import threading
import time

import msgspec
import pytest

from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.errors import Unavailable
from shmserve.shm.registry_page import (
    MAGIC,
    PAGE_BYTES,
    PAGE_FILE,
    SNAPSHOT_FILE,
    RegistryReader,
    RegistryWriter,
)
from shmserve.tensor.spec import ModelSpec


def snapshot(name="m"):
    entry = ModelEntry(ModelSpec(name, "1", "", "python", 0, (), ()), ModelState.READY)
    return Snapshot("", 0, {name: {"1": entry}}, complete=True)


@pytest.fixture
def run_dir(tmp_path):
    return str(tmp_path)


def test_a_publication_is_seen_by_the_next_read(run_dir):
    writer, reader = RegistryWriter(run_dir, "e1"), RegistryReader(run_dir)
    for name in ("a", "b", "c"):
        published = writer.publish(snapshot(name))
        assert reader.current() == published
        assert list(reader.current().models) == [name]
    assert reader.current() is reader.current()
    assert reader.current().generation == 3
    assert reader.current().epoch == "e1"
    writer.close()


def test_who_waits_for_a_publication_is_woken_by_word_of_it(run_dir):
    writer, reader = RegistryWriter(run_dir, "e1"), RegistryReader(run_dir)
    writer.publish(snapshot("a"))
    old, found = reader.current(), []
    waiting = threading.Thread(target=lambda: found.append(reader.newer(old, 60)))
    waiting.start()
    while not reader._published._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    published = writer.publish(snapshot("b"))
    reader.changed()
    waiting.join(30)
    assert found == [published]
    writer.close()


def test_without_word_a_publication_is_seen_when_the_wait_is_over(run_dir):
    writer, reader = RegistryWriter(run_dir, "e1"), RegistryReader(run_dir)
    writer.publish(snapshot("a"))
    old = reader.current()
    assert reader.newer(old, 0.01) is None
    published = writer.publish(snapshot("b"))
    assert reader.newer(old, 0) == published
    writer.close()


def test_before_the_first_publication_the_server_is_starting(run_dir):
    reader = RegistryReader(run_dir)  # before the page exists
    with pytest.raises(Unavailable, match="the server is starting"):
        reader.current()
    writer = RegistryWriter(run_dir, "e1")
    with pytest.raises(Unavailable, match="the server is starting"):
        reader.current()
    writer.publish(snapshot())
    assert reader.current().generation == 1
    writer.close()


def test_the_page_is_laid_out_as_documented(run_dir):
    writer = RegistryWriter(run_dir, "e1")
    writer.publish(snapshot())
    writer.close()
    with open(os.path.join(run_dir, PAGE_FILE), "rb") as file:
        page = file.read()
    words = memoryview(page).cast("Q")
    assert (len(page), words[0], words[1]) == (PAGE_BYTES, MAGIC, 1)


def test_a_restarted_coordinator_goes_on_from_there(run_dir):
    first, reader = RegistryWriter(run_dir, "e1"), RegistryReader(run_dir)
    first.publish(snapshot("a"))
    first.publish(snapshot("b"))
    assert reader.current().generation == 2
    first.close()
    second = RegistryWriter(run_dir, "e1")
    assert list(second.previous.models) == ["b"]
    assert reader.current().generation == 2
    assert second.publish(snapshot("c")).generation == 3
    assert list(reader.current().models) == ["c"]  # the reader still has the same page
    second.close()


def test_a_coordinator_that_died_between_file_and_word_is_survived(run_dir):
    first, reader = RegistryWriter(run_dir, "e1"), RegistryReader(run_dir)
    published = first.publish(snapshot("a"))
    first.close()
    torn = msgspec.structs.replace(published, generation=2, draining=True)
    path = os.path.join(run_dir, SNAPSHOT_FILE)
    with open(path, "wb") as file:
        file.write(msgspec.msgpack.encode(torn))
    assert reader.current().generation == 2  # the file is newer than the word: as good
    second = RegistryWriter(run_dir, "e1")
    assert second.publish(snapshot("b")).generation == 3
    assert list(reader.current().models) == ["b"]
    second.close()


def test_a_coordinator_that_died_before_it_published_has_left_its_readers_the_page(run_dir):
    first, reader = RegistryWriter(run_dir, "e1"), RegistryReader(run_dir)
    with pytest.raises(Unavailable, match="the server is starting"):
        reader.current()
    first.close()
    second = RegistryWriter(run_dir, "e1")
    assert second.publish(snapshot("a")) == reader.current()
    second.close()


@pytest.mark.parametrize("broken", [b"", b"\xff\xff", b"not msgpack"])
def test_what_cannot_be_read_counts_as_nothing(run_dir, broken):
    with open(os.path.join(run_dir, SNAPSHOT_FILE), "wb") as file:
        file.write(broken)
    writer = RegistryWriter(run_dir, "e1")
    assert writer.previous is None
    assert writer.publish(snapshot()).generation == 1
    writer.close()


def test_another_service_starts_with_a_fresh_page(run_dir):
    first = RegistryWriter(run_dir, "e1")
    first.publish(snapshot())
    first.close()
    before = os.stat(os.path.join(run_dir, PAGE_FILE)).st_ino
    second = RegistryWriter(run_dir, "e2")
    assert second.previous is None
    assert os.stat(os.path.join(run_dir, PAGE_FILE)).st_ino != before
    assert second.publish(snapshot()).generation == 1
    second.close()


def _follow(run_dir: str, last: int, results) -> None:
    """Read until the last generation; report how many reads, and whether any went back."""
    reader = RegistryReader(run_dir)
    seen = reads = 0
    deadline = time.monotonic() + 60
    while seen < last and time.monotonic() < deadline:
        try:
            current = reader.current()
        except Unavailable:
            continue
        reads += 1
        went_back = current.generation < seen
        mixed = list(current.models) != [f"m{current.generation}"]
        if went_back or mixed:
            results.put(f"generation {current.generation} after {seen}, {list(current.models)}")
            return
        seen = current.generation
    results.put((seen, reads > 0))


def test_readers_in_other_processes_never_see_an_older_or_a_mixed_registry(run_dir):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    last = 400
    readers = [context.Process(target=_follow, args=(run_dir, last, results)) for _ in range(2)]
    for reader in readers:
        reader.start()
    for restart in range(4):  # coordinators of the same epoch, one after the other
        writer = RegistryWriter(run_dir, "e1")
        for n in range(restart * 100 + 1, restart * 100 + 101):
            assert writer.publish(snapshot(f"m{n}")).generation == n
            time.sleep(0.001)
        writer.close()
    assert [results.get(timeout=60) for _ in readers] == [(last, True)] * 2
    for reader in readers:
        reader.join(10)
    results.close()
    results.join_thread()
