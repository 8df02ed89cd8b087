"""Files that are replaced as a whole, with room for the next content."""

import logging
import os
from errno import ENOSPC

import pytest

from shmserve.shm.replaced_file import ReplacedFile


def test_room_for_the_next_content_is_there_beforehand(tmp_path) -> None:
    file, coming = ReplacedFile(str(tmp_path / "file")), tmp_path / "file.new"
    for data in (b"x" * 100_000, b"", b"y" * 30_000):
        assert file.write(data)
        assert (tmp_path / "file").read_bytes() == data
        assert coming.stat().st_blocks * 512 >= len(data) + 16_384


def test_content_that_was_read_never_changes(tmp_path) -> None:
    file = ReplacedFile(str(tmp_path / "file"))
    file.write(b"first")
    with (tmp_path / "file").open("rb") as reader:
        file.write(b"other")
        file.write(b"third")
        assert reader.read() == b"first"


def test_what_cannot_be_written_is_told_once_and_written_later(tmp_path, caplog) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "file.new").mkdir()  # no content can be written there
    file = ReplacedFile(str(tmp_path / "file"))
    assert not file.write(b"one")
    assert not file.write(b"two")
    assert file.late
    (tmp_path / "file.new").rmdir()
    assert file.write(b"two")
    assert not file.late
    assert (tmp_path / "file").read_bytes() == b"two"
    told = [record.message.partition(",")[0] for record in caplog.records]
    assert told == ["cannot be written", "written again"]


@pytest.mark.parametrize("yields", [False, True])
def test_a_file_that_the_service_can_do_without_keeps_no_inode(
    tmp_path, monkeypatch: pytest.MonkeyPatch, yields: bool
) -> None:
    def full(*_: object) -> None:
        raise OSError(ENOSPC, "No space left on device")

    file = ReplacedFile(str(tmp_path / "file"), yields)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        patched.setattr(os, "replace", full)
        assert not file.write(b"one")
        file.keep_room()
        assert (tmp_path / "file.new").exists() is not yields
    assert file.write(b"one")
    assert (tmp_path / "file.new").exists()
