"""The history's file, and the file's space on a file system that fills up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shmserve.coordinator.stats.history_file import HistoryFile, decode
from shmserve.core.stats.time_series import SavedSeries

_SAVED = SavedSeries(5.0, 7, (), ())


def test_room_for_the_next_history_is_there_beforehand(tmp_path, caplog) -> None:
    monitoring: Any = SimpleNamespace(saved=lambda _: _SAVED)
    file = HistoryFile(str(tmp_path), monitoring, lambda work: work(), 0.0)
    coming = tmp_path / "history.new"
    coming.mkdir()  # a folder in the file's place prevents writing
    file.tick(100.0)
    file.tick(200.0)
    (record,) = caplog.records
    assert record.message.startswith("cannot be written")
    coming.rmdir()
    file.close(300.0)
    assert decode((tmp_path / "history").read_bytes()) == _SAVED
    assert coming.stat().st_blocks * 512 >= 16_384
