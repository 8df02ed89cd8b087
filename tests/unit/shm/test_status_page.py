"""Location of sequences as published to frontends."""

import os

import pytest

from shmserve.core.scheduling.sequence_names import SequenceName
from shmserve.shm.status_page import MOST_SEQUENCES, StatusPage, StatusView, digest


@pytest.fixture
def page():
    page = StatusPage("cafe0123")
    yield page
    page.close()


def test_what_is_shown_is_seen_until_it_is_hidden(page: StatusPage) -> None:
    fd = page.segment.reader_fd()
    view = StatusView(fd)
    os.close(fd)
    ids = [*(SequenceName(0, number) for number in range(1, MOST_SEQUENCES)), SequenceName(0, "1")]
    assert len({digest(each) for each in ids}) == MOST_SEQUENCES
    for each in ids:
        page.show_sequence(each)
    assert all(view.has_sequence(digest(each)) for each in ids)
    assert not view.has_sequence(digest(SequenceName(0, "2")))
    for each in reversed(ids[:-1]):
        page.hide_sequence(each)
        assert not view.has_sequence(digest(each))
    assert view.has_sequence(digest(SequenceName(0, "1")))
    assert not view.has_sequence(digest(SequenceName(9, "1")))  # another owner's
    page.show_sequence(SequenceName(9, "again"))
    assert view.has_sequence(digest(SequenceName(9, "again")))
    page.show_free_slots(7)
    assert view.free_slots == 7
