"""The trace and logging extensions without a transport: types, names, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.config import Settings
from shmserve.core.live_settings import initial
from shmserve.dispatch.outcome import Outcome
from shmserve.errors import InvalidArgument, Unimplemented
from shmserve.frontends.oip.log_and_trace import ServerSettings
from tests.fake_dispatch import FakeDispatcher
from tests.unit.rig import SPEC

OFF = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


@pytest.fixture
def server():
    dispatcher = FakeDispatcher([(SPEC, lambda request: Outcome())])
    return ServerSettings(dispatcher, Settings())  # type: ignore[arg-type]


def test_traces_are_off_at_first(server: ServerSettings) -> None:
    assert server.trace() == server.trace("m") == OFF


@pytest.mark.parametrize(
    "update",
    [
        {"trace_level": ["TIMESTAMPS"], "trace_rate": "5", "trace_count": "9"},  # HTTP
        {"trace_level": ["TIMESTAMPS"], "trace_rate": ["5"], "trace_count": ["9"]},  # gRPC
        {"trace_level": "TIMESTAMPS", "trace_rate": "5", "trace_count": "9",
         "log_frequency": "0", "trace_mode": "triton"},
    ],
)  # fmt: skip
def test_a_change_is_answered_with_what_holds(server: ServerSettings, update: Any) -> None:
    changed = {**OFF, "trace_level": ["TIMESTAMPS"], "trace_rate": "5", "trace_count": "9"}
    assert server.trace("", update) == changed
    assert server.trace("m") == changed


def test_the_mode_of_opentelemetry() -> None:
    settings = Settings(trace_mode="opentelemetry")
    server = ServerSettings(FakeDispatcher([(SPEC, lambda request: Outcome())]), settings)  # type: ignore[arg-type]
    update = {"trace_level": "TIMESTAMPS", "trace_rate": "0", "trace_mode": "opentelemetry"}
    after = server.trace("", update)
    assert after == {**OFF, **update, "trace_level": ["TIMESTAMPS"]}
    for refused in ({"trace_mode": "triton"}, {"trace_level": "TENSORS"}, {"log_frequency": "5"}):
        with pytest.raises(Unimplemented):
            server.trace("", refused)
    assert server.trace() == after


def test_null_and_nothing_clear(server: ServerSettings) -> None:
    server.trace("", {"trace_rate": "5"})
    server.trace("m", {"trace_rate": "7"})
    assert server.trace("m")["trace_rate"] == "7"
    assert server.trace("m", {"trace_rate": None})["trace_rate"] == "5"
    assert server.trace("", {"trace_rate": [], "log_frequency": None})["trace_rate"] == "1000"


@pytest.mark.parametrize(
    ("update", "error", "text"),
    [
        ({"trace_file": "/tmp/x"}, Unimplemented, "trace file location can not be updated"),
        ({"trace_file": None}, Unimplemented, "trace file location can not be updated"),
        ({"trace_level": ["TENSORS"]}, Unimplemented, "'TENSORS' is not supported: there is no"),
        ({"trace_level": ["MAX"]}, Unimplemented, "trace level 'MAX' is not supported: OFF or"),
        ({"trace_level": ["LOUD"]}, InvalidArgument, "'trace_level' must be one of OFF"),
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, InvalidArgument, "OFF together"),
        ({"trace_level": 3}, InvalidArgument, "'trace_level' must be one of"),
        ({"trace_rate": "0"}, InvalidArgument, "'trace_rate' must be an integer from 1"),
        ({"trace_rate": 5}, InvalidArgument, "'trace_rate' must be a string, got 5"),
        ({"trace_rate": ["1", "2"]}, InvalidArgument, "'trace_rate' must be a string"),
        ({"trace_count": "-2"}, InvalidArgument, "'trace_count' must be an integer from -1"),
        ({"trace_count": "9" * 5000}, InvalidArgument, "'trace_count' must be"),
        ({"trace_mode": "opentelemetry"}, Unimplemented, "trace mode 'opentelemetry'"),
        ({"log_frequency": "10"}, Unimplemented, "'log_frequency' is not supported: there is no"),
        ({"log_frequency": "-1"}, InvalidArgument, "'log_frequency' must be an integer from 0"),
        ({"trace_colour": "red"}, InvalidArgument, "there is no trace setting 'trace_colour'"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name_and_changes_nothing(server, update, error, text):
    with pytest.raises(error, match=text):
        server.trace("", {"trace_rate": "5", **update})
    assert server.trace() == OFF


STARTED = Settings(
    trace_level=("TIMESTAMPS", "TENSORS"),
    trace_rate=7,
    trace_count=100,
    trace_log_frequency=5,
    trace_file="/var/lib/traces/t.json",
    log_level="warning",
    log_format="ISO8601",
)


def test_what_the_service_was_started_with() -> None:
    dispatcher = FakeDispatcher([(SPEC, lambda request: Outcome())])
    dispatcher.coordinator.tuning = initial(STARTED)
    server = ServerSettings(dispatcher, STARTED)  # type: ignore[arg-type]
    started = {
        "trace_level": ["TIMESTAMPS", "TENSORS"],
        "trace_rate": "7",
        "trace_count": "100",
        "log_frequency": "5",
        "trace_file": "t.json",
        "trace_mode": "triton",
    }
    assert server.trace() == server.trace("m") == started
    off = {"trace_level": ["OFF"], "trace_rate": "1", "trace_count": "2", "log_frequency": "3"}
    assert server.trace("", off) == server.trace("m") == {**started, **off}  # type: ignore[arg-type]
    own = {"trace_level": ["TENSORS"], "log_frequency": "9"}
    assert server.trace("m", own) == {**started, **off, **own}  # type: ignore[arg-type]
    assert server.trace("", {**dict.fromkeys(off)}) == started, "null: as at the start"
    assert server.trace("m") == {**started, **own}
    assert server.trace("m", {"trace_level": [], "log_frequency": None}) == started
    log = server.logging()
    assert (log["log_info"], log["log_warning"], log["log_format"]) == (False, True, "ISO8601")


def test_traces_of_an_unknown_model(server: ServerSettings) -> None:
    for update in (None, {"trace_rate": "5"}):
        with pytest.raises(InvalidArgument, match="Request for unknown model : nobody"):
            server.trace("nobody", update)


def test_log_settings(server: ServerSettings) -> None:
    assert server.logging() == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    after = server.logging({"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"})
    assert after == server.logging()
    assert (after["log_info"], after["log_warning"]) == (False, True)
    assert (after["log_verbose_level"], after["log_format"]) == (2, "ISO8601")
    assert server.logging({"log_file": None})["log_file"] == ""


def test_null_leaves_a_log_setting_alone(server: ServerSettings) -> None:
    before = server.logging({"log_info": False, "log_verbose_level": 3})
    assert server.logging(dict.fromkeys(before)) == before


@pytest.mark.parametrize(
    ("update", "error", "text"),
    [
        ({"log_file": "/tmp/x"}, Unimplemented, "log file location can not be updated"),
        ({"log_info": "true"}, InvalidArgument, "'log_info' must be true or false, got 'true'"),
        ({"log_warnings": False}, InvalidArgument, "there is no log setting 'log_warnings'"),
        ({"log_nosuch": None}, InvalidArgument, "there is no log setting 'log_nosuch'"),
        ({"log_verbose_level": True}, InvalidArgument, "'log_verbose_level' must be an integer"),
        ({"log_verbose_level": -1}, InvalidArgument, "'log_verbose_level' must be an integer"),
        ({"log_verbose_level": 1 << 40}, InvalidArgument, "'log_verbose_level' must be"),
        ({"log_format": "xml"}, InvalidArgument, "'log_format' must be one of default, ISO8601"),
        ({"log_format": ["ISO8601"]}, InvalidArgument, "'log_format' must be one of"),
        ({"log_level": "info"}, InvalidArgument, "there is no log setting 'log_level'"),
    ],
)
def test_what_cannot_be_logged_is_refused_by_name_and_changes_nothing(server, update, error, text):
    before = server.logging()
    with pytest.raises(error, match=text):
        server.logging({"log_error": False, **update})
    assert server.logging() == before
