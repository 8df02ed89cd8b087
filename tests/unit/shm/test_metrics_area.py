"""Publication of models' own metrics: behind the status page, for every reader of the page."""

from __future__ import annotations

import os
import threading

import pytest

from shmserve.core.stats.custom_metrics import Family, MetricKind, Series
from shmserve.errors import ArenaExhausted, UnreadableMessage
from shmserve.shm.metrics_area import MAX_BYTES, MetricsArea, read
from shmserve.shm.status_page import SIZE, StatusPage


@pytest.fixture
def page():
    page = StatusPage("cafe0123")
    yield page
    page.close()


@pytest.fixture
def reader(page):
    """A reader's descriptor, opened before anything is published."""
    fd = page.segment.reader_fd()
    yield fd
    os.close(fd)


def counters(count: int, text: str = "x") -> list[Family]:
    series = (Series((("number", str(index)), ("text", text))) for index in range(count))
    return [Family("n", "of things", MetricKind.COUNTER, tuple(series))]


def values(fd: int) -> list[float]:
    return [value for family in read(fd) for series in family.series for value in series.values]


def test_values_are_seen_as_they_change(page: StatusPage, reader: int) -> None:
    assert read(reader) == ()
    size = os.fstat(reader).st_size
    area = MetricsArea(page.segment.fd)
    assert os.fstat(reader).st_size == size  # without metrics no area exists
    words = area.write(counters(2), [1.5, 2.5])
    assert values(reader) == [1.5, 2.5]
    words[1] = 7
    assert values(reader) == [1.5, 7]
    assert area.write([], []).nbytes == 0
    assert read(reader) == ()


def test_it_grows_as_it_has_to_and_no_further(page: StatusPage, reader: int) -> None:
    area = MetricsArea(page.segment.fd)
    for count in (1, 300, 3000):
        area.write(counters(count, "some text"), list(range(count)))
        assert values(reader) == list(range(count))
    with pytest.raises(ArenaExhausted, match="no room for more than"):
        area.write(counters(3, "x" * MAX_BYTES), [1, 2, 3])
    assert values(reader) == list(range(3000))
    page.words[0] = 5  # the page itself is where it was
    assert os.pread(reader, 8, 0) == (5).to_bytes(8, "little")


def test_readers_wait_for_no_writer_that_died_while_it_wrote(page: StatusPage, reader: int) -> None:
    MetricsArea(page.segment.fd).write(counters(1), [1])
    os.pwrite(page.segment.fd, (3).to_bytes(8, "little"), SIZE + 8)
    with pytest.raises(UnreadableMessage, match="being written"):
        read(reader)


@pytest.mark.parametrize(
    ("at", "word", "reason"),
    [
        (0, 77, "no area of metrics"),
        (2, 1 << 60, "cut short"),
        (3, 1 << 60, "cut short"),
        (2, 2, "Expected `array`"),
        (3, 3, "truncated"),
    ],
)
def test_nonsense_is_unreadable(page: StatusPage, reader: int, at, word, reason) -> None:
    MetricsArea(page.segment.fd).write(counters(1), [1])
    os.pwrite(page.segment.fd, word.to_bytes(8, "little"), SIZE + 8 * at)
    with pytest.raises(UnreadableMessage, match=reason):
        read(reader)


def test_names_that_would_spoil_a_scrape_are_unreadable(page: StatusPage, reader: int) -> None:
    MetricsArea(page.segment.fd).write([Family("a b", "", MetricKind.GAUGE, (Series(()),))], [1])
    with pytest.raises(UnreadableMessage, match="no sense"):
        read(reader)


def test_readers_see_whole_directories_while_they_change(page: StatusPage, reader: int) -> None:
    area = MetricsArea(page.segment.fd)
    area.write(counters(1), [1])
    over = threading.Event()

    def change() -> None:
        count = 0
        while not over.is_set():
            count = count % 40 + 1
            area.write(counters(count), [count] * count)

    thread = threading.Thread(target=change)
    thread.start()
    seen = 0
    try:
        while seen < 200:
            try:
                found = values(reader)
            except UnreadableMessage:
                continue
            assert found == [len(found)] * len(found)
            seen += 1
    finally:
        over.set()
        thread.join()
