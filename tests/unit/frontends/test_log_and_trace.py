"""The trace and logging extensions without a transport: types, names, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.config import Settings
from shmserve.dispatch.outcome import Outcome
from shmserve.errors import InvalidArgument, ShmserveError, Unimplemented
from shmserve.frontends.oip.log_and_trace import ServerSettings
from shmserve.testing.fake_dispatch import FakeDispatcher
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
def server() -> ServerSettings:
    dispatcher = FakeDispatcher([(SPEC, lambda request: Outcome())])
    return ServerSettings(dispatcher, Settings())


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
        ({"trace_level": ["TENSORS"]}, Unimplemented, "'TENSORS' is not supported"),
        ({"trace_level": ["LOUD"]}, InvalidArgument, "'trace_level' must be one of OFF"),
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, InvalidArgument, "OFF together"),
        ({"trace_level": 3}, InvalidArgument, "'trace_level' must be one of"),
        ({"trace_rate": "0"}, InvalidArgument, "'trace_rate' must be an integer from 1"),
        ({"trace_rate": 5}, InvalidArgument, "'trace_rate' must be a string, got 5"),
        ({"trace_rate": ["1", "2"]}, InvalidArgument, "'trace_rate' must be a string"),
        ({"trace_count": "-2"}, InvalidArgument, "'trace_count' must be an integer from -1"),
        ({"trace_count": "9" * 5000}, InvalidArgument, "'trace_count' must be"),
        ({"trace_mode": "opentelemetry"}, Unimplemented, "trace mode 'opentelemetry'"),
        ({"log_frequency": "10"}, Unimplemented, "'log_frequency' is not supported"),
        ({"trace_colour": "red"}, InvalidArgument, "there is no trace setting 'trace_colour'"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name_and_changes_nothing(
    server: ServerSettings, update: Any, error: type[ShmserveError], text: str
) -> None:
    with pytest.raises(error, match=text):
        server.trace("", {"trace_rate": "5", **update})
    assert server.trace() == OFF


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


@pytest.mark.parametrize(
    ("update", "error", "text"),
    [
        ({"log_file": "/tmp/x"}, Unimplemented, "log file location can not be updated"),
        ({"log_info": "true"}, InvalidArgument, "'log_info' must be true or false, got 'true'"),
        ({"log_warning": None}, InvalidArgument, "'log_warning' must be true or false"),
        ({"log_verbose_level": True}, InvalidArgument, "'log_verbose_level' must be an integer"),
        ({"log_verbose_level": -1}, InvalidArgument, "'log_verbose_level' must be an integer"),
        ({"log_verbose_level": 1 << 40}, InvalidArgument, "'log_verbose_level' must be"),
        ({"log_format": "xml"}, InvalidArgument, "'log_format' must be one of default, ISO8601"),
        ({"log_format": ["ISO8601"]}, InvalidArgument, "'log_format' must be one of"),
        ({"log_level": "info"}, InvalidArgument, "there is no log setting 'log_level'"),
    ],
)
def test_what_cannot_be_logged_is_refused_by_name_and_changes_nothing(
    server: ServerSettings, update: Any, error: type[ShmserveError], text: str
) -> None:
    before = server.logging()
    with pytest.raises(error, match=text):
        server.logging({"log_error": False, **update})
    assert server.logging() == before
