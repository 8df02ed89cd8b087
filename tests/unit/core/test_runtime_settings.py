"""Rules of log and trace settings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.control.runtime_settings import (
    UNLIMITED,
    LogChange,
    LogSettings,
    RuntimeSettings,
    TraceChange,
    TraceSettings,
    initial_log,
)


def test_log_level_as_log_settings() -> None:
    assert initial_log("debug") == LogSettings(verbose=1)
    assert initial_log("info") == LogSettings()
    assert initial_log("warning") == LogSettings(info=False)
    assert initial_log("error") == LogSettings(info=False, warning=False)


def test_a_change_leaves_the_rest_alone() -> None:
    log = LogChange(warning=False, format="ISO8601").onto(LogSettings(verbose=3))
    assert log == LogSettings(True, False, True, 3, "ISO8601")


def test_a_models_settings_lie_over_those_of_all() -> None:
    tuning = RuntimeSettings().with_trace("", TraceChange(on=True, rate=10))
    tuning = tuning.with_trace("m", TraceChange(rate=5))
    assert tuning.trace_of("m") == TraceSettings(True, 5)
    assert tuning.trace_of("other") == TraceSettings(True, 10)
    tuning = tuning.with_trace("", TraceChange(on=False))
    assert not tuning.trace_of("m").on
    tuning = tuning.with_trace("m", TraceChange(cleared=("rate",)))
    assert tuning.models == {}
    tuning = tuning.with_trace("", TraceChange(cleared=("rate",)))
    assert tuning.trace.rate == TraceSettings().rate


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.sampled_from(("m", "n")), st.integers(0, 20)), max_size=20),
    st.booleans(),
)
def test_no_more_traces_than_the_limit_are_granted(
    limit: int, asked: list[tuple[str, int]], own: bool
) -> None:
    tuning = RuntimeSettings().with_trace("", TraceChange(on=True, count=limit))
    if own:
        tuning = tuning.with_trace("m", TraceChange(count=limit))
    granted = {"m": 0, "n": 0}
    for model, wanted in asked:
        tuning, count = tuning.taken(model, wanted)
        assert count <= wanted
        granted[model] += count
    if own:
        assert max(granted.values()) <= limit
    else:
        assert sum(granted.values()) == min(limit, sum(wanted for _, wanted in asked))
    assert tuning.trace_of("n").count == limit - (granted["n"] if own else sum(granted.values()))


def test_without_a_limit_or_when_off() -> None:
    on = RuntimeSettings().with_trace("", TraceChange(on=True))
    assert on.taken("m", 7) == (on, 7)
    assert on.trace.count == UNLIMITED
    assert RuntimeSettings().taken("m", 7) == (RuntimeSettings(), 0)
