"""Complete log lines: pytest's `caplog` leaves the fields out."""

import pytest

from shmserve.log_fields import ATTRIBUTE, with_fields


def log_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the captured messages, each followed by the fields."""
    return [with_fields(one.getMessage(), getattr(one, ATTRIBUTE, {})) for one in caplog.records]
