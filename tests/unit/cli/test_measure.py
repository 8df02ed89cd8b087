"""Command `measure`: its plan, its figures, its picture, and its callers on doors of the tests."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from xml.etree import ElementTree

import numpy as np
import pytest

from shmserve.cli.measuring import chart, load_plan, load_run, measure
from shmserve.cli.measuring.door import Answered, FailedRequest
from shmserve.cli.measuring.grpc_door import GrpcDoor
from shmserve.cli.measuring.measurement import Measurement, RequestTimes
from shmserve.cli.measuring.model_inputs import made_inputs
from shmserve.cli.measuring.turns import Turns
from shmserve.client.wire.credentials import Credentials
from shmserve.errors import ConfigError
from tests.grpc_client import VALUES, Rig

NOTHING = Credentials(key="")


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("4", [4]),
        ("8,1,2,2", [1, 2, 8]),
        ("1:32", [1, 2, 4, 8, 16, 32]),
        ("3:20", [3, 6, 12, 20]),
        ("5:5", [5]),
    ],
)
def test_levels(text: str, levels: list[int]) -> None:
    assert load_plan.levels(text, 256) == levels


@pytest.mark.parametrize("text", ["", "x", "0", "1:", "4:2", "1:2:3", "1,2:3", "257", "1:257"])
def test_levels_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--concurrency: "):
        load_plan.levels(text, 256)
    with pytest.raises(ConfigError, match="more than 32 levels"):
        load_plan.levels(",".join(map(str, range(1, 34))), 256)


def test_arrivals_have_equal_distances_or_those_of_a_poisson_process() -> None:
    regular = list(itertools.islice(load_plan.arrivals(4.0, False, -0.5), 5))
    assert regular == [-0.5, -0.25, 0.0, 0.25, 0.5]
    number = 20_000
    moments = np.array(list(itertools.islice(load_plan.arrivals(500.0, True, 0.0), number)))
    distances = np.diff(moments)
    assert distances.mean() == pytest.approx(1 / 500, rel=0.03)
    assert distances.std() == pytest.approx(1 / 500, rel=0.05), "as the mean of an exponential"
    in_a_second = np.histogram(moments, np.arange(0, 39))[0]
    assert in_a_second.var() == pytest.approx(in_a_second.mean(), rel=0.6)
    again = list(itertools.islice(load_plan.arrivals(500.0, True, 0.0), 9))
    assert again == moments[:9].tolist()


@pytest.mark.parametrize(
    ("rates", "knee"),
    [
        ([(1, 100.0), (2, 190.0), (4, 350.0), (8, 360.0), (16, 700.0)], 4),
        ([(1, 100.0), (2, 109.0)], 1),
        ([(1, 100.0), (2, 110.1)], None),
        ([(1, 100.0), (4, 120.0)], 1),  # 1.21 for two doublings
        ([(1, 100.0), (4, 122.0)], None),
        ([(8, 100.0), (16, 90.0)], 8),
        ([(8, 100.0)], None),
    ],
)
def test_knee(rates: list[tuple[int, float]], knee: int | None) -> None:
    assert load_plan.knee(rates) == knee


def test_a_measurement_becomes_a_row() -> None:
    samples = [RequestTimes(n / 50, float(n), nbytes=6_000) for n in range(1, 101)]
    result = Measurement("lane", 3, input_bytes=14_000, elapsed_s=2.0, samples=samples)
    result.warm_up({"copied_bytes": {"in": 0, "out": 8}})
    result.fail(FailedRequest("503", "full"))
    row = result.row()
    assert (row["concurrency"], row["requests"], row["failed"]) == (3, 100, 1)
    assert (row["per_s"], row["mb_per_s"]) == (50.0, 1.0)
    assert [row[f"{p}_ms"] for p in ("p50", "p90", "p95", "p99")] == [50.5, 90.1, 95.05, 99.01]
    assert row["max_ms"] == 100.0
    assert row["copied_bytes"] == "out=8"
    assert row["stable"] is True
    assert not row.keys() & {"late", "first_p50_ms", "answers_per_s"}
    assert "p50_ms" not in Measurement("grpc", error="none").row()


def test_a_stream_has_times_to_the_first_answer_and_between_answers() -> None:
    result = Measurement("grpc", streamed=True)
    result.add(1.0, 1.0, [(1.25, 10), (1.5, 10), (2.0, 10), (2.5, 0)])
    result.add(3.0, 3.0, [(3.5, 0)])
    result.finish(4.0)
    row = result.row()
    assert (row["answers_per_s"], row["p50_ms"], row["max_ms"]) == (0.8, 1000.0, 1500.0)
    assert (row["first_p50_ms"], row["first_p99_ms"]) == (250.0, 250.0)
    assert (row["between_p50_ms"], row["between_p99_ms"]) == (375.0, 497.5)


def test_planned_requests_that_never_started_are_told_though_none_was_late() -> None:
    row = Measurement("http", 1, open_loop=True, elapsed_s=1.0, unsent=7).row()
    assert (row["late"], row["unsent"]) == (0, 7)
    assert "and 7 did not start" in measure.remarks([row])[0]


def test_latency_counts_from_the_planned_start_and_late_starts_are_told() -> None:
    result = Measurement("http", 2, open_loop=True)
    result.add(1.0, 1.0005, [(1.01, 1), (1.01, 0)])
    result.add(1.0, 1.5, [(1.51, 1), (1.51, 0)])
    result.finish(2.0)
    row = result.row()
    assert (row["late"], row["max_late_ms"], row["max_ms"]) == (1, 500.0, 510.0)
    assert measure.remarks([row])[0].startswith(
        "http at 2: 1 requests started late, at most 500.0 ms, and 0 did not start: "
    )


def test_a_late_start_counts_although_the_request_fails() -> None:
    result = Measurement("http", open_loop=True)
    result.add(1.0, 1.0, [(1.01, 0)])
    result.fail(FailedRequest("503", "full"), 250.0)
    result.finish(2.0)
    row = result.row()
    assert (row["late"], row["max_late_ms"], row["unsent"]) == (1, 250.0, 0)


def test_a_rate_that_changes_is_not_stable() -> None:
    def row(*thirds: int) -> dict[str, object]:
        ends = [n + 0.5 for n, count in enumerate(thirds) for _ in range(count)]
        samples = [RequestTimes(end, 1.0) for end in ends]
        return Measurement("http", elapsed_s=3.0, samples=samples).row()

    assert row(1000, 950, 1050)["stable"] is True
    assert row(1000, 800, 1200)["stable"] is False
    assert row(10, 8, 12)["stable"] is True, "chance explains that"
    told = measure.remarks([row(1000, 800, 1200)])
    assert told[0].startswith("not stable: http at 1: ")


def test_failures_are_counted_by_status_and_text() -> None:
    result = Measurement("http")
    for n in range(30):
        result.fail(FailedRequest("503", "full"))
        result.fail(FailedRequest("", f"answer {n}"))
    row = result.row()
    assert row["failed"] == 60
    assert row["errors"][0] == {"status": "503", "text": "full", "count": 30}
    assert row["errors"][1] == {"status": "", "text": "other errors", "count": 11}
    assert len(row["errors"]) == 21
    assert measure.remarks([row])[0] == "http at 1: 30 failed, 503: full"


def test_a_knee_is_told() -> None:
    rows: list[dict[str, object]]
    rows = [{"over": "http", "concurrency": n, "errors": [], "knee": n == 2} for n in (1, 2, 4)]
    assert measure.remarks(rows) == [
        "http: knee at 2: up to there the rate grows by at least 10 % per doubling"
    ]
    rows = [{**row, "knee": False} for row in rows]
    assert measure.remarks(rows) == [
        "http: no knee: up to 4 the rate grows by at least 10 % per doubling"
    ]


def test_inputs_are_made_from_what_a_model_says(tmp_path) -> None:
    def tensor(name: str, datatype: str, *shape: int) -> dict[str, object]:
        return {"name": name, "datatype": datatype, "shape": list(shape)}

    metadata = [tensor("a", "FP32", -1, 3), tensor("b", "BYTES", -1), tensor("c", "INT8", 2)]
    np.save(tmp_path / "c.npy", np.array([7, 8], np.int8))
    made = made_inputs(metadata, [f"c={tmp_path}/c.npy"], 4, 5)
    assert (made["a"].dtype, made["a"].shape) == (np.float32, (4, 3))
    assert made["b"].tolist() == [b"shmserve"] * 4
    assert made["c"].tolist() == [7, 8]
    again = made_inputs(metadata, [], None, 5)
    assert again["a"].shape == (5, 3)
    assert set(again["c"].tolist()) <= {0, 1}
    for bad in ("d=x.npy", "c", f"c={tmp_path}/none.npy", "c=/dev/null"):
        with pytest.raises(ConfigError, match="--input"):
            made_inputs(metadata, [bad], None, 1)
    with pytest.raises(ConfigError, match="'a' would be larger"):
        made_inputs(metadata, [], None, 1 << 40)


class CountingDoor:
    """Answers at once, but every fifth time."""

    def __init__(self, fails_at: int = 5) -> None:
        self.sent = self.open = 0
        self._fails_at = fails_at

    def send(self, answered: Answered, receipt: bool = False) -> dict[str, object]:
        self.sent += 1
        if self.sent % self._fails_at == 0:
            raise FailedRequest("503", "not now")
        answered(7)
        return {"copied_bytes": {"in": 3}} if receipt else {}

    def __enter__(self) -> CountingDoor:
        self.open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.open -= 1


def test_requests_are_shared_among_callers_and_counted_although_some_fail() -> None:
    doors = [CountingDoor(), CountingDoor()]
    made = iter(doors)
    result = Measurement("lane", 2)
    load_run.run(result, lambda: next(made), None, 60.0, 500, 0.0)
    assert sum(door.sent for door in doors) == 2 * 5 + 500, "five of each are not measured"
    assert len(result.samples) + result.failures.total() == 500
    assert set(result.failures) == {("503", "not now")}
    assert abs(result.failures.total() - 100) <= 2
    assert result.receipt == {"copied_bytes": {"in": 3}}
    assert result.samples == sorted(result.samples, key=lambda sample: sample.end_s)
    assert {sample.nbytes for sample in result.samples} == {7}
    assert [door.open for door in doors] == [0, 0]


def test_a_door_whose_first_requests_all_fail_is_given_up() -> None:
    with pytest.raises(FailedRequest, match="not now"):
        load_run.run(Measurement("lane"), lambda: CountingDoor(1), None, 60.0, 500, 0.0)


def test_a_measurement_begins_after_the_warm_up() -> None:
    door = CountingDoor()
    result = Measurement("lane")
    load_run.run(result, lambda: door, load_plan.arrivals(100, False, -0.1), 60.0, 5, 0.1)
    assert door.sent == 5 + 10 + 5
    assert len(result.samples) + result.failures.total() == 5
    assert all(sample.latency_ms >= sample.late_ms >= 0 for sample in result.samples)


def test_turns() -> None:
    turns = Turns(None, 2.0, 2)
    assert [turns.take(now) for now in (-0.5, -0.25, 0.5, 1.0, 1.5)] == [
        -0.5,
        -0.25,
        0.5,
        1.0,
        None,
    ]
    turns = Turns(iter((0.0, 1.0, 3.0)), 2.0, 9)
    assert [turns.take(0.0) for _ in range(3)] == [0.0, 1.0, None]
    assert turns.unsent() == 0
    turns = Turns(iter((0.0, 1.0, 2.0, 2.1, 2.2)), 2.0, 9)
    assert turns.take(2.1) is None, "a backlog ends with the time"
    assert turns.unsent() == 3
    turns = Turns(None, 2.0, 9)
    turns.end()
    assert turns.take(0.0) is None


def arguments(svg: object) -> argparse.Namespace:
    return argparse.Namespace(model="a < b", svg=str(svg))


def texts(drawing: str, style: str) -> list[str]:
    found = ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")
    return [node.text or "" for node in found if node.get("class") == style]


def test_latencies_are_drawn_over_time(tmp_path) -> None:
    path = tmp_path / "m.svg"
    samples = [RequestTimes(n / 100, 1.0) for n in range(100)]
    results = [Measurement("lane", elapsed_s=1.0, samples=samples), Measurement("grpc")]
    measure.draw(arguments(path), results, {})
    drawing = path.read_text()
    assert drawing.count("<polyline") == 2
    assert texts(drawing, "title") == ["a < b, 1 at a time"]
    assert texts(drawing, "end quiet")[:6] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert texts(drawing, "quiet") == ["lane"]
    assert "prefers-color-scheme:dark" in drawing
    with pytest.raises(ConfigError, match="--svg"):
        measure.draw(arguments(tmp_path / "no/m.svg"), results, {})


def test_levels_are_drawn_with_their_knees(tmp_path) -> None:
    path = tmp_path / "m.svg"
    results = [
        Measurement("http", level, elapsed_s=1.0, samples=[RequestTimes(0.5, 1.0)] * (9 * level))
        for level in (1, 4, 16)
    ]
    measure.draw(arguments(path), results, {"http": 4, "grpc": None})
    drawing = path.read_text()
    assert drawing.count("<circle") == 2
    assert texts(drawing, "middle quiet")[:3] == ["1", "4", "16"]


@pytest.mark.parametrize("high", [0.0, 0.0123, 1.0, 3.0, 7.3, 11.0, 99.0, 2_500_000.0])
def test_an_axis_has_at_least_four_numbers(high: float) -> None:
    drawing = chart.line_chart("t", {"ms": {"x": [(0.0, 0.0), (high, high)]}})
    rows, columns = texts(drawing, "end quiet"), texts(drawing, "middle quiet")[:-1]
    assert 4 <= len(rows) <= 7
    assert 4 <= len(columns) <= 9
    assert float(rows[-1].replace(",", "")) >= high
    assert len(set(rows)) == len(rows)


def test_a_legend_of_many_lines_is_above_the_captions() -> None:
    names = [f"a line with a long name {n}" for n in range(9)]
    drawing = chart.line_chart("t", {"ms": {name: [(0.0, 1.0), (1.0, 2.0)] for name in names}})
    nodes = list(ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text"))
    place = {node.text: (float(node.get("x", 0)), float(node.get("y", 0))) for node in nodes}
    assert max(place[name][1] for name in names) < place["ms"][1] - 12
    assert min(place[name][1] for name in names) > place["t"][1] + 12
    assert max(Counter(place[name] for name in names).values()) == 1
    assert all(x + 7 * len(name) < 820 for name, (x, _) in place.items() if name in names)


def ignored(nbytes: int) -> None: ...


def test_grpc_is_measured_with_every_datatype() -> None:
    with Rig() as rig, GrpcDoor(rig.target, "identity", {"INPUT0": VALUES}, NOTHING) as door:
        sizes: list[int] = []
        assert door.send(sizes.append, receipt=True)["copied_bytes"]["in"] >= 0
        assert sizes[0] > VALUES.nbytes
        assert door.send(ignored) == {}
        wrong = GrpcDoor(rig.target, "identity", {"X": np.array([b"a"], object)}, NOTHING)
        with wrong, pytest.raises(FailedRequest, match=r"unexpected .* input 'X'") as caught:
            wrong.send(ignored)
        assert caught.value.status == "INVALID_ARGUMENT"
    with pytest.raises(
        ConfigError, match=r"--input 'x': arrays of complex128 have no place in the protocol"
    ):
        GrpcDoor("127.0.0.1:1", "m", {"x": np.zeros(1, complex)}, NOTHING)


def test_a_client_that_is_the_limit_is_told() -> None:
    def row(client_cpu: float) -> dict[str, object]:
        result = Measurement("http", 32)
        result.finish(1.0, client_cpu)
        return result.row()

    assert measure.remarks([row(0.5)]) == []
    (line,) = measure.remarks([row(0.934)])
    assert line.startswith("http at 32: the client used 93% of a processor, and this command uses")
