"""`pb_utils.MetricFamily`: use by models, and publication."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmserve.core.stats.custom_metrics import Family
from shmserve.errors import ArenaExhausted, Internal
from shmserve.executor import custom_metrics
from shmserve.executor.backends.triton import pb_utils
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.backends.triton.metrics import COUNTER, GAUGE, HISTOGRAM, MetricFamily
from shmserve.executor.custom_metrics import CustomMetrics
from shmserve.shm.metrics_area import MetricsArea, read
from shmserve.shm.status_page import StatusPage
from tests.backend_runner import ask, load
from tests.model_files import model_maker, triton
from tests.unit.executor.test_triton_dialect import X

DELETED = (
    "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The "
    "'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been "
    "deleted."
)


def failure(use: Callable[..., object], *arguments: float) -> str:
    with pytest.raises(TritonModelException) as told:
        use(*arguments)
    return str(told.value)


class Published:
    """An executor's metrics and the page that other processes read."""

    def __init__(self) -> None:
        self.page = StatusPage("cafe0123")
        self.metrics = CustomMetrics(MetricsArea(self.page.segment.fd))

    def families(self) -> dict[str, Family]:
        return {family.name: family for family in read(self.page.segment.fd)}

    def values(self, name: str) -> list[tuple[float, ...]]:
        return [series.values for series in self.families()[name].series]


@pytest.fixture
def published(request, monkeypatch):
    for name, limit in getattr(request, "param", {}).items():
        monkeypatch.setattr(custom_metrics, name, limit)
    made = Published()
    monkeypatch.setattr(custom_metrics, "registry", made.metrics)
    yield made
    made.page.close()


def test_counters_gauges_and_histograms_are_published(published: Published) -> None:
    count = MetricFamily("n", "of things", COUNTER)
    metric = count.Metric(labels={"b": "2", "a": "1"})
    assert metric.value() == 0.0
    metric.increment(2.5)
    metric.increment(0)
    level = MetricFamily(name="level", description="now", kind=GAUGE).Metric  # dies at once
    assert level is not None
    gauges = MetricFamily(name="g", description="", kind=MetricFamily.GAUGE)
    gauge = gauges.Metric()
    gauge.set(5)
    gauge.increment(-7.5)
    assert (metric.value(), gauge.value()) == (2.5, -2.5)
    times = MetricFamily("t", "", HISTOGRAM)
    histogram = times.Metric(labels=None, buckets=[0.1, 1, 2.5])
    for value in (0.05, 0.1, 0.5, 1, 100):
        histogram.observe(value)
    assert published.values("n") == [(2.5,)]
    assert published.values("g") == [(-2.5,)]
    assert published.values("t") == [(2, 2, 0, 1, 101.65)]
    assert published.families()["n"].series[0].labels == (("a", "1"), ("b", "2"))
    assert published.families()["n"].help == "of things"


def test_the_native_dialects_are_published_as_well(published: Published) -> None:
    own = published.metrics
    rows = own.counter("n", "of things", {"b": "2", "a": "1"})
    rows.increment()
    own.counter("n", "the same one", {"a": "1", "b": "2"}).increment(1.5)
    level = own.gauge("g", "")
    level.set(5)
    level.increment(-7)
    own.histogram("t", "", [1, 10]).observe(3)
    assert (rows.value, level.value) == (2.5, -2)
    assert [published.values(name) for name in "ngt"] == [[(2.5,)], [(-2.0,)], [(0, 1, 0, 3)]]
    assert published.families()["n"].series[0].labels == (("a", "1"), ("b", "2"))


@pytest.mark.parametrize("published", [{"MAX_SERIES": 1}], indirect=True)
def test_what_native_models_do_wrong_is_no_clients_fault(published: Published) -> None:
    own = published.metrics
    rows = own.counter("n", "")
    for wrong, text in (
        (lambda: own.gauge("n", ""), "metric 'n': Family name already exists"),
        (lambda: own.gauge("9", ""), "metric '9': Invalid metric name"),
        (lambda: own.counter("n", "", {"le-": "1"}), "metric 'n': Invalid label name"),
        (lambda: own.counter("m", ""), "metric 'm': the model has 1 metrics already"),
        (lambda: own.histogram("h", "", [2, 1]), "metric 'h': Bucket Boundaries"),
    ):
        with pytest.raises(Internal) as told:
            wrong()
        assert told.value.message.startswith(text)
    for _ in range(2):  # a refused metric leaves no family, and costs no place
        with pytest.raises(Internal, match="the model has 1 metrics already"):
            own.counter("m", "")
    with pytest.raises(Internal, match="metric 'n': the value of label 'shard' is not a string"):
        own.counter("n", "", {"shard": 1})  # type: ignore[dict-item]
    for less in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="counter 'n' cannot grow by"):
            rows.increment(less)
    assert rows.value == 0


def test_the_same_labels_are_the_same_metric(published: Published) -> None:
    first, again = MetricFamily("n", "first", COUNTER), MetricFamily("n", "second", COUNTER)
    metric, same = first.Metric({"a": "1"}), first.Metric({"a": "1"})
    other = again.Metric({"a": "1"})
    metric.increment(7.5)
    assert [each.value() for each in (metric, same, other)] == [7.5] * 3
    assert published.families()["n"].help == "first"
    del metric, same
    assert first.Metric({"a": "1"}).value() == 7.5  # the family has the metric
    del first
    assert (other.value(), published.values("n")) == (7.5, [(7.5,)])
    times = MetricFamily("t", "", HISTOGRAM)
    times.Metric({}, [1.0]).observe(3)
    times.Metric({}, [5.0, 6.0]).observe(3)  # such a metric exists already
    assert published.values("t") == [(0, 2, 6)]


def test_metrics_go_with_their_family(published: Published) -> None:
    kept = MetricFamily("kept", "", GAUGE)
    value = kept.Metric()
    value.set(3)
    for kind in (COUNTER, GAUGE):
        family = MetricFamily("n", "", kind)
        metric = family.Metric({"a": "1"})
        metric.increment(1)
        del family
        assert list(published.families()) == ["kept"]
        told = [failure(metric.increment, 1), failure(metric.set, 1), failure(metric.observe, 1)]
        told.append(failure(metric.value))
        doing = ("increment", "set", "observe", "get")
        assert told == [f"Failed to {each} metric value: {DELETED}" for each in doing]
    value.set(4)  # in the current place
    assert published.values("kept") == [(4,)]


def test_a_family_that_the_collector_finds_while_metrics_change(published: Published) -> None:
    """Finalizers run at any point, also on the thread that has the lock."""
    family = MetricFamily("n", "", COUNTER)
    metric = family.Metric()
    for number in range(20):
        lost = [MetricFamily(f"lost{number}", "", GAUGE)]
        lost[0].Metric().set(1)
        lost.append(lost)  # type: ignore[arg-type]
        with published.metrics._lock:
            del lost
            gc.collect()
            assert f"lost{number}" in published.families()
        metric.increment(1)
        assert list(published.families()) == ["n"]
    assert published.values("n") == [(20,)]


def test_no_increment_is_lost_between_threads(published: Published) -> None:
    family = MetricFamily("n", "", COUNTER)
    metric = family.Metric()

    def count() -> None:
        for number in range(500):
            metric.increment(1)
            family.Metric({"number": str(number % 7)}).increment(1)

    with ThreadPoolExecutor(4) as threads:
        assert [each.result() for each in [threads.submit(count) for _ in range(4)]] == [None] * 4
    assert metric.value() == 2000
    assert sum(value for (value,) in published.values("n")) == 4000


def test_what_a_forked_process_counts_is_its_own(published: Published) -> None:
    family = MetricFamily("n", "", COUNTER)
    metric = family.Metric()
    with published.metrics._lock:  # as if another thread had the lock
        pid = os.fork()
        if not pid:
            metric.increment(5)
            del family
            os._exit(0)
    os.waitpid(pid, 0)
    metric.increment(1)
    assert published.values("n") == [(1,)]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "c.increment(-1)",
            "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be "
            "incremented monotonically by non-negative values.",
        ),
        ("c.set(1)", "Failed to set metric value: TRITONSERVER_METRIC_KIND_COUNTER does not"),
        (
            "g.observe(1)",
            "Failed to observe metric value: TRITONSERVER_METRIC_KIND_GAUGE does not support "
            "Observe",
        ),
        (
            "h.value()",
            "Failed to get metric value: TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value",
        ),
        ("h.increment(1)", "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment"),
        ("h.set(1)", "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Set"),
        ("F('c', '', GAUGE)", "Error when creating MetricFamily: Family name already exists with"),
        ("F('a b', '', GAUGE)", "Error when creating MetricFamily: Invalid metric name"),
        ("F('', '', GAUGE)", "Error when creating MetricFamily: Invalid metric name"),
        ("F('shmserve_x', '', GAUGE)", "'shmserve_x' is reserved for the server's own metrics"),
        ("F('nv_inference_count', '', COUNTER)", "reserved"),
        ("F('x' * 257, '', GAUGE)", "the name has 257 characters, more than 256"),
        ("cs.Metric(labels=5)", "Failed to create metric. Labels must be a dictionary."),
        ("cs.Metric({'a': 5})", "Error when creating Metric: attempt to access JSON non-string as"),
        ("cs.Metric({'a-b': 'x'})", "Error when creating Metric: Invalid label name"),
        ("cs.Metric({'__a': 'x'})", "Invalid label name"),
        ("hs.Metric({'le': 'x'}, [1.0])", "Invalid label name"),
        ("cs.Metric({'a': 'x' * 257})", "the value of label 'a' has 257 characters"),
        ("cs.Metric({'a': chr(0xd800)})", "the value of label 'a' is not UTF-8"),
        ("cs.Metric({f'a{i}': '' for i in range(33)})", "there are 33 labels, more than 32"),
        ("cs.Metric(buckets=[1.0])", "Failed to create metric. Unexpected buckets found."),
        ("hs.Metric()", "Failed to create metric. Missing required buckets."),
        ("hs.Metric({}, (1, 2))", "Failed to create metric. Buckets must be a list."),
        ("hs.Metric({}, [2, 1])", "Error when creating Metric: Bucket Boundaries must be strictly"),
        ("hs.Metric({}, [1, 1])", "Bucket Boundaries must be strictly sorted"),
        ("hs.Metric({}, list(range(129)))", "there are 129 buckets, more than 128"),
    ],
)
def test_misuse_has_tritons_words(published: Published, line: str, told: str) -> None:
    cs, gs, hs = (
        MetricFamily(*each) for each in (("c", "", COUNTER), ("g", "", GAUGE), ("h", "", HISTOGRAM))
    )
    names = {"F": MetricFamily, "COUNTER": COUNTER, "GAUGE": GAUGE, "cs": cs, "hs": hs}
    names |= {"c": cs.Metric(), "g": gs.Metric(), "h": hs.Metric(buckets=[])}
    before = published.families()
    with pytest.raises(pb_utils.TritonModelException) as error:
        eval(line, names)
    assert told in str(error.value)
    assert published.families() == before


@pytest.mark.parametrize(
    "line",
    [
        "F()",
        "F('a', None, COUNTER)",
        "F(5, '', COUNTER)",
        "F('a', '', 0)",
        "metric.increment('1')",
        "metric.increment(None)",
        "F('a', '', HISTOGRAM).Metric(buckets=['1'])",
        "M()",
    ],
)
def test_arguments_have_types(published: Published, line: str) -> None:
    family = MetricFamily("n", "", COUNTER)
    names = {"F": MetricFamily, "M": pb_utils.Metric, "COUNTER": COUNTER, "HISTOGRAM": HISTOGRAM}
    with pytest.raises(TypeError):
        eval(line, names | {"metric": family.Metric()})
    assert published.values("n") == [(0,)]


def test_a_last_bound_without_end_is_the_one_there_is_anyway(published: Published) -> None:
    family = MetricFamily("h", "", HISTOGRAM)
    family.Metric(buckets=[1.0, float("inf")]).observe(5)
    assert published.families()["h"].series[0].buckets == (1.0,)
    assert published.values("h") == [(0, 1, 5)]


LIMITS = {"MAX_FAMILIES": 2, "MAX_SERIES": 3, "MAX_TEXT": 5}


@pytest.mark.parametrize("published", [LIMITS], indirect=True)
def test_there_are_so_many_and_no_more(published: Published) -> None:
    first = MetricFamily("a", "long help is cut" * 99, COUNTER)
    second = MetricFamily("b", "", GAUGE)
    with pytest.raises(TritonModelException, match="the model has 2 metric names"):
        MetricFamily("c", "", GAUGE)
    with pytest.raises(TritonModelException, match="has 6 characters, more than 5"):
        MetricFamily("abcdef", "", GAUGE)
    kept = [first.Metric({"l": str(number)}) for number in range(2)], second.Metric()
    for _ in range(2):
        with pytest.raises(TritonModelException, match="the model has 3 metrics"):
            second.Metric({"l": "x"})
    assert second.Metric() is kept[1]
    assert len(published.families()["a"].help) == 1024
    del first, kept
    MetricFamily("c", "", GAUGE).Metric({"l": "x"})
    assert len(published.values("b")) == 1


def test_without_memory_a_metric_is_refused_and_the_others_stay(published, monkeypatch) -> None:
    family = MetricFamily("n", "", COUNTER)
    metric = family.Metric()

    def full(*_: object) -> None:
        raise ArenaExhausted("the server's shared memory is full")

    with monkeypatch.context() as patch:
        patch.setattr(MetricsArea, "write", full)
        with pytest.raises(TritonModelException, match="shared memory is full"):
            family.Metric({"a": "1"})
    metric.increment(1)
    assert published.values("n") == [(1,)]
    family.Metric({"a": "1"}).increment(2)
    assert published.values("n") == [(1,), (2,)]


def test_a_model_has_metrics_in_each_of_its_methods(tmp_path) -> None:
    body = """
    self.metric.increment(1)
    y = np.full(1, self.metric.value(), np.float32)
    return [pb.InferenceResponse([pb.Tensor("Y", y)])]
    """
    more = f"""
    def initialize(self, args):
        self.family = pb.MetricFamily(
            name="n", description="", kind=pb.MetricFamily.COUNTER
        )
        self.metric = self.family.Metric(labels={{"model": args["model_name"]}})
    def finalize(self):
        self.metric.increment(1)
        with open({str(tmp_path / "end")!r}, "w") as file:
            file.write(str(self.metric.value()))
"""
    backend, spec = load(model_maker(tmp_path)(triton(body, more)))
    for _ in range(2):
        assert ask(backend, spec, ("Y",), X=X).error is None
    backend.close()
    assert (tmp_path / "end").read_text() == "3.0"
    assert not os.path.exists(tmp_path / "m/1/__pycache__")
