"""Trace files: whole JSON arrays, with several writers and after errors."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from shmserve.config import Settings, load
from shmserve.core.trace_grants import ALL_IN_ONE
from shmserve.errors import ConfigError
from shmserve.observe import trace_files
from shmserve.observe.trace_files import TraceWriter, begin


def settings(path: Path, **more: Any) -> Settings:
    return Settings(trace_file=str(path), **more)


def entry(number: int) -> bytes:
    return json.dumps({"id": number}).encode()


def ids(path: Path) -> list[int]:
    return [row["id"] for row in json.loads(path.read_text())]


def test_a_file_is_a_whole_array_after_each_write(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    writer = TraceWriter(settings(path))
    for number in range(3):
        writer.append(ALL_IN_ONE, [entry(2 * number), entry(2 * number + 1)])
        assert ids(path) == list(range(2 * number + 2))
    writer.append(3, [entry(9)])
    assert ids(tmp_path / "t.json.3") == [9]
    assert path.stat().st_mode & 0o777 == 0o600


def test_writers_wait_for_one_another(tmp_path: Path) -> None:
    path = tmp_path / "t.json"

    def write(first: int) -> None:
        writer = TraceWriter(settings(path))
        for number in range(first, first + 50):
            writer.append(ALL_IN_ONE, [entry(number)])

    threads = [threading.Thread(target=write, args=(50 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids(path)) == list(range(200))


def test_what_does_not_fit_is_lost_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_files, "MAX_FILE_BYTES", 60)
    monkeypatch.setattr(trace_files, "MAX_FILES", 2)
    path = tmp_path / "t.json"
    writer = TraceWriter(settings(path))
    for number in range(9):
        writer.append(ALL_IN_ONE, [entry(number)])
    assert ids(path) == [0, 1, 2, 3, 4]
    assert path.stat().st_size <= 60
    for number in range(4):
        writer.append(number, [entry(number)])
    assert sorted(os.listdir(tmp_path)) == ["t.json", "t.json.0", "t.json.1"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "the file is full" in told[0]
    assert "there are 2 files already" in told[1]


def test_a_file_that_is_not_ours_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.json"
    path.write_text("[1, 2]")
    TraceWriter(settings(path)).append(ALL_IN_ONE, [entry(1)])
    assert path.read_text() == "[1, 2]"
    link = tmp_path / "link"
    link.symlink_to(path)
    TraceWriter(settings(link)).append(ALL_IN_ONE, [entry(1)])
    assert path.read_text() == "[1, 2]"
    assert len(caplog.records) == 2


def test_a_disk_that_is_full_leaves_a_whole_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.json"
    writer = TraceWriter(settings(path))
    writer.append(ALL_IN_ONE, [entry(1)])
    write, room = os.pwrite, [10]

    def some(fd: int, data: Any, at: int) -> int:
        if room and len(data) > room[0]:
            if not room[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            data, room[0] = data[: room[0]], 0
        return write(fd, data, at)

    monkeypatch.setattr(os, "pwrite", some)
    monkeypatch.setattr(trace_files.os, "ftruncate", lambda *a: (room.clear(), truncate(*a)))  # type: ignore[attr-defined]
    writer.append(ALL_IN_ONE, [entry(2)])
    assert ids(path) == [1]
    assert "No space left on device" in caplog.text
    writer.append(ALL_IN_ONE, [entry(3)])
    assert ids(path) == [1, 3]


truncate = os.ftruncate


def test_who_holds_the_file_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_files, "_LOCK_S", 0.05)
    path = tmp_path / "t.json"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        TraceWriter(settings(path)).append(ALL_IN_ONE, [entry(1)])
    assert "another process has locked the file" in caplog.text
    assert path.read_text() == ""


def test_a_start_makes_room(tmp_path: Path) -> None:
    for name in ("t.json", "t.json.0", "t.json.17", "t.json.old", "other.json.1"):
        (tmp_path / name).write_text("x")
    begin(Settings())
    begin(settings(tmp_path / "t.json"))
    assert sorted(os.listdir(tmp_path)) == ["other.json.1", "t.json", "t.json.old"]
    assert (tmp_path / "t.json").read_text() == ""


@pytest.mark.parametrize("name", ["nosuch/t.json", "."])
def test_a_place_that_cannot_be_written_is_refused_at_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="trace_file: cannot be written: ") as caught:
        begin(settings(tmp_path / name))
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"TRACE_MODE": "zipkin"}, "wants one of opentelemetry, triton"),
        ({"TRACE_MODE": "opentelemetry", "TRACE_FILE": "t"}, "trace_file: trace_mode opent"),
        (
            {"TRACE_MODE": "opentelemetry", "TRACE_LEVEL": "TENSORS"},
            "trace_level: TENSORS are not traced with trace_mode opentelemetry",
        ),
        ({"OTLP_ENDPOINT": "http://user:secret@host:4318"}, "otlp_endpoint"),
        ({"OTLP_HEADERS": "nothing"}, r"otlp_headers\[0\] = \(not shown\)"),
        ({"OTLP_HEADERS": "api key=x"}, r"otlp_headers\[0\] = \(not shown\)"),
        ({"TRACE_LEVEL": "LOUD"}, "'LOUD'"),
        ({"TRACE_LEVEL": "OFF,TIMESTAMPS"}, "trace_level: OFF cannot be together"),
        ({"TRACE_LEVEL": "TENSORS"}, "trace_level: TENSORS go to a trace_file"),
        ({"TRACE_LOG_FREQUENCY": "5"}, "trace_log_frequency: there is no trace_file"),
        ({"TRACE_RATE": "0"}, "trace_rate"),
        ({"TRACE_COUNT": "-2"}, "trace_count"),
        ({"LOG_FORMAT": "xml"}, "log_format"),
    ],
)
def test_settings_that_make_no_sense(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load({f"SHMSERVE_{name}": value for name, value in environ.items()})


def test_nothing_is_said_where_all_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    TraceWriter(settings(tmp_path / "t.json")).append(ALL_IN_ONE, [entry(1)])
    assert not caplog.records
