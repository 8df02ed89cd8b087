"""Opening memory named by a client: errors name the region, never the key."""

import os
from pathlib import Path

import pytest

from shmserve.errors import InvalidArgument, PermissionDenied, ShmserveError
from shmserve.shm.client_object import open_object

KEY = "shmserve-test-secret-key"


@pytest.mark.parametrize("key", [KEY, f"//{KEY}", f"/{KEY}/x", "/..", "/" + "k" * 300, f"\0{KEY}"])
def test_no_error_shows_a_key(key: str) -> None:
    with pytest.raises(InvalidArgument, match="shared memory region 'r'") as caught:
        open_object(key, "r")
    assert_hidden(caught.value)


def test_nor_where_it_leads_elsewhere_or_may_not_be_opened(monkeypatch) -> None:
    link = Path("/dev/shm") / KEY
    link.symlink_to("/etc/passwd")
    try:
        with pytest.raises(
            InvalidArgument, match="'r': its key leads to no memory object"
        ) as found:
            open_object(KEY, "r")
    finally:
        link.unlink()
    assert_hidden(found.value)

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionDenied, match="'r': the server's user may not") as caught:
        open_object(KEY, "r")
    assert_hidden(caught.value)


def assert_hidden(error: ShmserveError) -> None:
    assert "secret" not in error.message
    assert "/" not in error.message
