"""Rules of log and trace settings."""

from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.live_settings import (
    ALL_IN_ONE,
    UNLIMITED,
    GrantedTraces,
    LogChange,
    LogSettings,
    RuntimeSettings,
    TraceChange,
    TraceFiles,
    TraceSettings,
    initial_log,
)


def test_log_level_as_log_settings() -> None:
    assert initial_log("debug", "default") == LogSettings(verbose=1)
    assert initial_log("info", "ISO8601") == LogSettings(format="ISO8601")
    assert initial_log("warning", "default") == LogSettings(info=False)
    assert initial_log("error", "default") == LogSettings(info=False, warning=False)


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
        tuning, given = tuning.taken(model, wanted)
        assert given.count <= wanted
        granted[model] += given.count
    if own:
        assert max(granted.values()) <= limit
    else:
        assert sum(granted.values()) == min(limit, sum(wanted for _, wanted in asked))
    assert tuning.trace_of("n").count == limit - (granted["n"] if own else sum(granted.values()))


def test_without_a_limit_or_when_off() -> None:
    on = RuntimeSettings().with_trace("", TraceChange(on=True))
    after, granted = on.taken("m", 7)
    assert granted == GrantedTraces(7, 1, ((ALL_IN_ONE, 7),))
    assert after.trace == on.trace
    assert on.trace.count == UNLIMITED
    assert RuntimeSettings().taken("m", 7) == (RuntimeSettings(), GrantedTraces())


def test_cleared_is_as_at_the_start() -> None:
    start = TraceSettings(True, 5, 9, 3, True)
    tuning = RuntimeSettings(trace=start, start=start)
    changed = tuning.with_trace("", TraceChange(on=False, rate=1, count=2, tensors=False))
    everything = ("on", "rate", "count", "log_frequency", "tensors")
    assert changed.with_trace("", TraceChange(cleared=everything)) == tuning


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("", "m")), st.integers(0, 4), st.integers(1, 9), st.integers(0, 5)
        ),
        max_size=30,
    )
)
def test_every_trace_has_ids_and_a_place_of_its_own(asked: list[tuple[str, int, int, int]]) -> None:
    files = TraceFiles()
    ids: set[int] = set()
    held: dict[int, int] = {}
    size: dict[int, int] = {}
    for scope, frequency, count, more in asked:
        files, granted = files.allot(scope, frequency, count, count + more)
        own = range(granted.first, granted.first + count + more)
        assert ids.isdisjoint(own)
        ids.update(own)
        assert granted.count == count == sum(here for _, here in granted.places)
        for number, here in granted.places:
            if number == ALL_IN_ONE:
                assert not frequency
                continue
            assert size.setdefault(number, frequency) == frequency
            held[number] = held.get(number, 0) + here
            assert held[number] <= frequency
    assert ids == set(range(1, len(ids) + 1))
    assert sorted(held) == list(range(len(held)))
