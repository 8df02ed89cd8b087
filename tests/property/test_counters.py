"""Pages of counters: reads return the written values, and sums lose nothing."""

import copy

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.stats import executor_counters, request_counters
from shmserve.core.stats.counter_pages import (
    BOUNDS_NS,
    Gauges,
    cumulated,
    read_gauges,
    write_gauges,
)
from shmserve.core.stats.executor_counters import (
    BATCH_ROWS,
    OTHER_SIZES,
    RESPONSE,
    RESPONSE_ROWS,
    ExecutorCounters,
    ExecutorCounts,
)
from shmserve.core.stats.request_counters import (
    COPIES,
    OTHER,
    Reason,
    RequestCounters,
    RequestCounts,
)

NS = st.integers(0, 10**11)
TIMES = st.tuples(NS, NS, NS)
RUN = st.tuples(st.integers(1, 200), TIMES, st.lists(NS, min_size=1, max_size=4))
RESPONSES = st.tuples(
    st.integers(0, 60), st.sampled_from(("success", "fail", "empty_response", "cancel")), NS, NS
)
NAMES = st.sampled_from([*"abcdefgh", "ü" * 100, "x" * 250, "y" * 400, "a.b-c+d", "-/3"])
REQUEST = st.tuples(
    NAMES,
    st.sampled_from(("1", "2", "123456789012345678")),
    st.sampled_from([None, *Reason]),
    NS,
    st.tuples(*[st.integers(0, 1 << 40)] * len(COPIES)),
)


def bucket(ns: int) -> int:
    """Return the first bucket whose bound is not less."""
    return next((i for i, bound in enumerate(BOUNDS_NS) if ns <= bound), len(BOUNDS_NS))


def words(count: int) -> memoryview:
    return memoryview(bytearray(count * 8)).cast("Q")


def write_runs(runs: list) -> memoryview:
    page = words(executor_counters.NWORDS)
    counters = ExecutorCounters(page)
    for now, (batch, times, queued) in enumerate(runs, 1):
        counters.executed(batch, now, *times, queued[0])  # type: ignore[call-arg]
        for queue_ns in queued[1:]:
            counters.shared(queue_ns, *times)
    return page


@given(st.lists(RUN, max_size=120))
def test_runs_are_read_as_they_were_counted(runs: list) -> None:
    counts = executor_counters.read(write_runs(runs))
    assert counts is not None
    requests = [(queue_ns, *times) for _, times, queued in runs for queue_ns in queued]
    assert counts.last_inference_ms == len(runs)
    assert counts.executions == len(runs)
    assert counts.inferences == sum(batch for batch, _, _ in runs)
    assert counts.requests == len(requests)
    assert counts.stage_ns == [sum(column) for column in zip(*requests, strict=True)] or not runs
    for stage, buckets in enumerate(counts.buckets):
        assert sum(buckets) == len(requests)
        for index, count in enumerate(buckets):
            assert count == sum(1 for request in requests if bucket(request[stage]) == index)
    assert sum(values[0] for values in counts.batches.values()) == len(runs)
    assert len(counts.batches) <= BATCH_ROWS
    for size, values in counts.batches.items():
        if size != OTHER_SIZES:
            mine = [times for batch, times, _ in runs if batch == size]
            assert values == [len(mine), *(sum(column) for column in zip(*mine, strict=True))]


@given(st.lists(RESPONSES, max_size=60))
def test_responses_are_kept_by_index_up_to_a_bound(responses: list) -> None:
    page = words(executor_counters.NWORDS)
    counters = ExecutorCounters(page)
    for response in responses:
        counters.response(*response)
    counts = executor_counters.read(page)
    assert counts is not None
    assert len(counts.responses) <= RESPONSE_ROWS
    for row, values in counts.responses.items():
        mine = [r for r in responses if min(r[0], RESPONSE_ROWS - 1) == row]
        told = dict(zip(RESPONSE, zip(values[::2], values[1::2], strict=True), strict=True))
        assert told["compute_infer"] == (len(mine), sum(r[2] for r in mine))
        for outcome in RESPONSE[2:]:
            of = [r for r in mine if r[1] == outcome]
            assert told[outcome] == (len(of), sum(r[2] + r[3] for r in of))
        with_output = [r for r in mine if r[1] in ("success", "fail")]
        assert told["compute_output"] == (len(with_output), sum(r[3] for r in with_output))


@given(st.lists(RUN, max_size=60), st.lists(st.integers(0, 3), min_size=60, max_size=60))
def test_the_sum_over_executors_does_not_depend_on_who_ran_what(runs: list, of: list) -> None:
    parts = [write_runs([r for r, n in zip(runs, of, strict=False) if n == i]) for i in range(4)]
    there, back = ExecutorCounts(), ExecutorCounts()
    for page in parts:
        there.add(executor_counters.read(page))
    for page in reversed(parts):
        back.add(executor_counters.read(page))
    whole = executor_counters.read(write_runs(runs))
    assert there == back
    for field in ("inferences", "executions", "requests", "stage_ns", "buckets"):
        assert getattr(there, field) == getattr(whole, field)
    if len({batch for batch, _, _ in runs}) < BATCH_ROWS:
        assert there.batches == whole.batches


def write_requests(requests: list, rows: int) -> memoryview:
    page = words(request_counters.nwords(rows))
    counters = RequestCounters(page)
    for model, version, failed, ns, copied in requests:
        counters.ended(model, version, failed, ns, copied)
    return page


def expected(requests: list) -> RequestCounts:
    counts = RequestCounts()
    for _, _, failed, ns, copied in requests:
        if failed is None:
            counts.succeeded += 1
            counts.success_ns += ns
            counts.buckets[bucket(ns)] += 1
        else:
            counts.failures[failed] += 1
            counts.fail_ns += ns if failed is not Reason.BAD_REQUEST else 0
        counts.copied = [a + b for a, b in zip(counts.copied, copied, strict=True)]
    return counts


@given(st.lists(REQUEST, max_size=80), st.integers(0, 20))
def test_requests_are_read_by_model_and_those_without_a_row_together(
    requests: list, rows: int
) -> None:
    found = request_counters.read(write_requests(requests, rows))
    assert found is not None
    assert len(found) <= rows + 1
    named = {key for key in found if key != OTHER}
    for key in named:
        assert found[key] == expected([r for r in requests if (r[0], r[1]) == key])
    rest = expected([r for r in requests if (r[0], r[1]) not in named])
    assert found.get(OTHER, RequestCounts()) == rest
    if rows == 20:
        assert not any(len(f"{m}/{v}".encode()) <= 280 and (m, v) not in named
                       for m, v, *_ in requests)  # fmt: skip


@given(st.lists(st.sampled_from(["a", "b", "c-3", "x" * 64, "x" * 65])), st.integers(0, 6))
def test_keys_are_counted_by_name_beside_the_models(names: list, rows: int) -> None:
    page = words(request_counters.nwords(rows))
    counters = RequestCounters(page)
    for name in names:
        counters.keyed(name)
        counters.ended("m", "1", None, 5, (0, 0, 0, 0))
    found = request_counters.read_keys(page)
    rest = found.pop(request_counters.OTHER_KEYS, 0)
    assert len(found) <= rows
    assert all(names.count(name) == count for name, count in found.items())
    assert rest == len(names) - sum(found.values())
    if rows == 6:
        assert rest == names.count("x" * 65)
    models = request_counters.read(page)
    assert sum(counts.succeeded for counts in models.values()) == len(names)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=60), st.integers(0, 60)
)
def test_runs_of_ensembles_are_counted_by_batch_size(runs: list, rows: int) -> None:
    page = words(request_counters.nwords(rows))
    counters = RequestCounters(page)
    for now_ms, (model, size) in enumerate(runs):
        counters.ran(model, "1", size, (now_ms + 1, 1, size, 2, 3, 4))
    found = request_counters.read(page)
    assert found is not None
    if rows >= 5:  # then each of three ensembles has a row
        assert found.keys() == {(model, "1") for model, _ in runs}
    for (model, _), counts in found.items():
        sizes = [size for name, size in runs if name == model]
        last = max(now_ms for now_ms, (name, _) in enumerate(runs) if name == model)
        total = [0] * len(request_counters.BATCH)
        for size, values in counts.batches.items():
            assert size == OTHER_SIZES or values[1:3] == [
                sizes.count(size),
                sizes.count(size) * size,
            ]
            total = [max(total[0], values[0]), *map(sum, zip(total[1:], values[1:], strict=True))]
        n = len(sizes)
        assert total == [last + 1, n, sum(sizes), 2 * n, 3 * n, 4 * n]
        assert len(counts.batches) <= 17
    twice = RequestCounts()
    for counts in (*found.values(), *found.values()):
        twice.add(counts)
    assert sum(values[1] for values in twice.batches.values()) <= 2 * len(runs)


@given(st.lists(REQUEST, max_size=40), st.lists(REQUEST, max_size=40))
def test_counts_survive_the_way_to_a_file_and_back_and_add_up(one: list, other: list) -> None:
    total = RequestCounts()
    for part in (one, other):
        rows = request_counters.read(write_requests(part, 4))
        for counts in msgspec.msgpack.decode(
            msgspec.msgpack.encode(list(rows.values())), type=list[RequestCounts]
        ):
            total.add(counts)
    assert total == expected(one + other)
    assert total.requests == len(one) + len(other)


def test_cumulated_buckets_never_fall() -> None:
    assert cumulated([1, 0, 2]) == [1, 1, 3]


@given(st.builds(Gauges, *[st.integers(0, 1 << 50)] * 5))
def test_gauges_are_read_as_they_were_written(gauges: Gauges) -> None:
    page = words(executor_counters.NWORDS)
    ExecutorCounters(page)
    write_gauges(page, copy.copy(gauges))
    assert read_gauges(page) == gauges
    assert executor_counters.read(page) == ExecutorCounts()


@given(st.binary(max_size=4096).map(lambda data: data[: len(data) // 8 * 8]))
def test_what_is_no_page_is_refused(data: bytes) -> None:
    page = memoryview(data).cast("Q")
    assert executor_counters.read(page) is None
    assert request_counters.read(page) is None
