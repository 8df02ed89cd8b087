"""Traces of requests through real sockets and shared memory, and the trace files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.live_settings import GrantedTraces, RuntimeSettings, TraceFiles, TraceSettings
from shmserve.core.registry import ModelEntry, ModelState
from shmserve.dispatch.calls.call import Call
from shmserve.dispatch.outcome import OutputTensor, RunOptions
from shmserve.dispatch.traced_request import Trace
from shmserve.dispatch.traces import tracing
from shmserve.dispatch.traces.trace_entries import entries_of
from shmserve.dispatch.traces.tracing import Take, Tracer, timestamps
from shmserve.errors import (
    ModelFailure,
    PermissionDenied,
    ProtocolViolation,
    Unauthenticated,
    Unavailable,
)
from shmserve.executor.backend import Output, Request, Response
from shmserve.exporter.__main__ import Intake
from shmserve.observe.logs import TRACES
from shmserve.protocol.control.data_messages import Timing
from shmserve.protocol.control.span_messages import Span, Spans
from shmserve.tensor import bytes_codec
from tests.unit.dispatch.test_ensembles import BRANCHES, Models, sums
from tests.unit.dispatch.test_pipelines import plus
from tests.unit.rig import SPEC, Rig, feed

ONES = np.ones(3, np.float32)
COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
ENDED = ["INFER_RESPONSE_COMPLETE", "REQUEST_END"]
HTTP = ["HTTP_RECV_START", "HTTP_RECV_END"], ["HTTP_SEND_START", "HTTP_SEND_END"]
BEGUN = ["REQUEST_START", "QUEUE_START"]
Row = dict[str, Any]
Flush = Callable[[Rig, Take], None]


@pytest.fixture
def rig(rig_with, tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_TENSOR_BYTES", 100)
    return rig_with(trace_file=str(tmp_path / "t.json"))


@pytest.fixture
def flush(monkeypatch):
    """Only these tests flush: the maintenance would ask a coordinator that does not exist."""
    flush = Tracer.flush
    monkeypatch.setattr(Tracer, "flush", lambda *_: None)
    return lambda rig, take: flush(rig.dispatcher.tracer, take)


def answer(request: Request) -> Response:
    if request.parameters.get("fail"):
        raise ModelFailure("no")
    return Response((Output("OUT", "FP32", request.inputs["IN"].numpy() + 1),))


def traced(entry: ModelEntry, **settings: Any) -> ModelEntry:
    return replace(entry, trace=TraceSettings(**{"on": True, "rate": 1, **settings}))


def send(rig: Rig, entry: ModelEntry, array: Any = ONES, **options: Any) -> None:
    with rig.dispatcher.call(entry, RunOptions(**options)) as call:
        feed(call, array)
        call.receipt.receive_ns = 1000
        call.execute()
        call.account.answered()


class Takes:
    """The coordinator's part."""

    def __init__(self, frequency: int = 0, least: int = 1 << 30) -> None:
        self.files = TraceFiles()
        self.asked: list[tuple[str, int, int]] = []
        self._frequency, self._left = frequency, least

    def __call__(self, model: str, wanted: int, ids: int) -> GrantedTraces:
        self.asked.append((model, wanted, ids))
        granted = min(wanted, self._left)
        self._left -= granted
        self.files, traces = self.files.allot("", self._frequency, granted, ids)
        return traces


def rows_of(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(path.read_text())
    return rows


def times_of(rows: list[Row], number: int) -> dict[str, int]:
    """Gather the times of one trace as a reader of Triton's files does."""
    stamps = [s for row in rows if row["id"] == number for s in row.get("timestamps", ())]
    return {stamp["name"]: stamp["ns"] for stamp in stamps}


def test_a_trace_file_is_tritons(rig: Rig, flush: Flush, tmp_path) -> None:
    entry = traced(rig.serve(answer), tensors=True)
    send(rig, entry, request_id="r")
    send(rig, entry)
    flush(rig, takes := Takes())
    assert takes.asked == [("m", 2, 2)]
    rows = rows_of(tmp_path / "t.json")
    assert rows[0] == {"id": 1, "model_name": "m", "model_version": 1, "request_id": "r"}
    assert [row for row in rows if "model_name" in row][1:] == [
        {"id": 2, "model_name": "m", "model_version": 1}
    ]
    for number in (1, 2):
        times = times_of(rows, number)
        assert list(times) == [*HTTP[0], *BEGUN, *COMPUTE, *ENDED, *HTTP[1]]
        assert list(times.values()) == sorted(times.values())
        assert times["HTTP_RECV_END"] - times["HTTP_RECV_START"] == 1000
    assert [(row["activity"], row["tensor"]) for row in rows if row.get("activity")][:2] == [
        ("TENSOR_QUEUE_INPUT", tensor("IN", "1.0,1.0,1.0", "3")),
        ("TENSOR_BACKEND_OUTPUT", tensor("OUT", "2.0,2.0,2.0", "3")),
    ]
    assert {frozenset(row) for row in rows} == {
        frozenset({"id", "model_name", "model_version", "request_id"}),
        frozenset({"id", "model_name", "model_version"}),
        frozenset({"id", "timestamps"}),
        frozenset({"id", "activity", "tensor"}),
    }


def tensor(name: str, data: str, shape: str, dtype: str = "FP32") -> Row:
    return {"name": name, "data": data, "shape": shape, "dtype": dtype}


def test_only_levels_that_are_wanted_and_tensors_that_are_small(rig, flush, tmp_path) -> None:
    entry = rig.serve(answer)
    send(rig, traced(entry, on=False, tensors=True))
    send(rig, traced(entry, tensors=True), np.ones(26, np.float32))
    send(rig, traced(entry))
    flush(rig, Takes())
    rows = rows_of(tmp_path / "t.json")
    assert not times_of(rows, 1)
    assert times_of(rows, 2)
    assert {row["id"] for row in rows if "activity" in row} == {1}


def test_files_have_as_many_traces_as_the_frequency_says(rig: Rig, flush: Flush, tmp_path) -> None:
    entry, takes = traced(rig.serve(answer), log_frequency=2), Takes(2)
    for count in (3, 2):
        for _ in range(count):
            send(rig, entry)
        flush(rig, takes)
    found = [sorted({r["id"] for r in rows_of(tmp_path / f"t.json.{n}")}) for n in range(3)]
    assert found == [[1, 2], [3, 4], [5]]
    assert not (tmp_path / "t.json").exists()


def test_what_fails_is_not_traced_and_one_of_so_many_is(rig: Rig, flush: Flush, tmp_path) -> None:
    entry = traced(rig.serve(answer), rate=3)
    for _ in range(7):
        send(rig, entry)
    flush(rig, takes := Takes())
    for _ in range(2):
        with pytest.raises(ModelFailure):
            send(rig, entry, parameters={"fail": True})
    flush(rig, takes)
    assert takes.asked == [("m", 2, 2)]
    assert {row["id"] for row in rows_of(tmp_path / "t.json")} == {1, 2}


def test_an_answer_that_cannot_be_read_is_not_traced(rig: Rig, flush: Flush, monkeypatch) -> None:
    def refuse(*_: object) -> OutputTensor:
        raise ProtocolViolation("an output aliases an input that is not there")

    entry, take = traced(rig.serve(answer)), Takes()
    with monkeypatch.context() as patch:
        patch.setattr(Call, "_output", refuse)
        with pytest.raises(ProtocolViolation):
            send(rig, entry)
    flush(rig, take)
    assert take.asked == []
    send(rig, entry)
    flush(rig, take)
    assert take.asked[0][:2] == ("m", 1)


def test_no_more_than_the_coordinator_grants(rig: Rig, flush: Flush, tmp_path) -> None:
    entry = traced(rig.serve(answer), count=9)
    for _ in range(5):
        send(rig, entry)
    flush(rig, Takes(least=2))
    assert {row["id"] for row in rows_of(tmp_path / "t.json")} == {1, 2}


def test_without_a_coordinator_traces_are_lost(rig: Rig, flush: Flush, tmp_path, caplog) -> None:
    def away(*_: object) -> GrantedTraces:
        raise Unavailable("the coordinator is away")

    send(rig, traced(rig.serve(answer)))
    flush(rig, away)
    assert "traces of model m are lost: the coordinator is away" in caplog.text
    assert not (tmp_path / "t.json").exists()


def test_steps_are_within_the_trace_of_their_ensemble(rig: Rig, flush: Flush, tmp_path) -> None:
    models = Models(rig, BRANCHES)
    models.serve(one=plus(1), ten=plus(10), sum=sums)
    ensemble = traced(rig.dispatcher.ready_model("e"), tensors=True)
    own = traced(rig.dispatcher.ready_model("one"))
    for entry in (ensemble, replace(ensemble, trace=None)):
        send(rig, entry)
        send(rig, own)
    flush(rig, takes := Takes())
    rig.assert_nothing_held()
    assert takes.asked == [("e", 1, 4), ("one", 2, 2)]
    rows = rows_of(tmp_path / "t.json")
    heads = {row["id"]: row for row in rows if "model_name" in row}
    assert heads[1]["model_name"] == "e"
    assert {heads[n]["model_name"] for n in (2, 3, 4)} == {"one", "ten", "sum"}
    assert [heads[n].get("parent_id") for n in heads] == [None, 1, 1, 1, None, None]
    assert list(times_of(rows, 1)) == [*HTTP[0], "REQUEST_START", *ENDED, *HTTP[1]]
    assert list(times_of(rows, 2)) == [*BEGUN, *COMPUTE, *ENDED]
    tensors = [row["tensor"]["name"] for row in rows if "activity" in row]
    assert tensors[:3] == ["IN", "OUT", "a"]
    assert len(tensors) == 3 + 2 + 2 + 3


# ------------------------------------------------------------------------------ spans

SPANS: dict[str, Any] = {"trace_mode": "opentelemetry"}
PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
COMPUTED = ["compute_input", "compute_infer", "compute_output"]


class Exporter:
    """Where spans are sent, read by the test."""

    def __init__(self, run_dir: Path) -> None:
        self._spans: list[Span] = []
        self.dropped = 0
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._intake = Intake(str(run_dir), self._put, self._wake_fd)

    def _put(self, message: Spans) -> None:
        self._spans += message.spans
        self.dropped += message.dropped

    def take(self) -> list[Span]:
        while self._intake.turn(0.05):
            pass
        spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        self._intake.close()
        os.close(self._wake_fd)


@pytest.fixture
def spanned(rig_with):
    return rig_with(**SPANS)


@pytest.fixture
def exporter(tmp_path):
    with closing(Exporter(tmp_path)) as made:
        yield made


def never(*_: object) -> GrantedTraces:
    raise AssertionError("there is no limit")


def tree(spans: list[Span]) -> dict[str, list[str]]:
    names = {span.span_id: span.name for span in spans}
    found: dict[str, list[str]] = {}
    for span in spans:
        found.setdefault(names.get(span.parent_id, span.parent_id), []).append(span.name)
    return found


def test_a_trace_is_spans_within_what_its_client_has_begun(spanned, exporter, flush) -> None:
    entry = traced(spanned.serve(answer), rate=1000)
    send(spanned, entry, request_id="r", traceparent=PARENT)
    send(spanned, entry, traceparent=PARENT.replace("-01", "-00"))
    send(spanned, entry)
    flush(spanned, never)
    spans = exporter.take()
    assert {span.trace_id for span in spans} == {"a" * 32}
    assert len({span.span_id for span in spans}) == len(spans)
    assert tree(spans)["b" * 16] == ["InferRequest"]
    assert [n for n in tree(spans)["InferRequest"] if n != "send"] == ["receive", "m"]
    assert tree(spans)["m"] == ["queue", "compute"]
    assert tree(spans)["compute"] == COMPUTED
    by_name = {span.name: span for span in spans}
    whole, model = by_name["InferRequest"], by_name["m"]
    assert whole.server
    assert not whole.failed
    assert whole.attributes["shmserve.transport"] == "http"
    assert model.attributes["triton.model_name"] == "m"
    assert model.attributes["triton.model_version"] == 1
    assert model.attributes["triton.request_id"] == "r"
    assert model.attributes["shmserve.copied_bytes.batch"] == 0
    assert abs(whole.start_ns - time.time_ns()) < 60e9, "of the wall clock"
    for span in spans:
        assert whole.start_ns <= span.start_ns <= span.end_ns <= whole.end_ns
    assert by_name["receive"].end_ns - by_name["receive"].start_ns == 1000


def test_failures_have_spans_too(spanned: Rig, exporter: Exporter, flush: Flush) -> None:
    entry = traced(spanned.serve(answer))
    with pytest.raises(ModelFailure):
        send(spanned, entry, parameters={"fail": True})
    flush(spanned, never)
    failed = {span.name: span for span in exporter.take() if span.failed}
    assert set(failed) == {"InferRequest", "m"}
    assert "no" in failed["m"].error
    assert failed["m"].attributes["error.type"] == "model"
    assert failed["InferRequest"].parent_id == ""


def test_refused_requests_are_sampled_and_bounded_as_others(spanned, exporter, flush) -> None:
    tracer, taken = spanned.dispatcher.tracer, []
    status: dict[str, str | int] = {"http.response.status_code": 503}
    one_of_two = TraceSettings(on=True, rate=2)

    def take(model: str, wanted: int, ids: int) -> GrantedTraces:
        taken.append((model, wanted, ids))
        return GrantedTraces(1)

    for settings in (TraceSettings(), one_of_two, one_of_two):
        tracer.refused(Unavailable("not now"), "", status, settings)
    flush(spanned, never)
    (span,) = exporter.take()
    assert (span.name, span.failed, span.error) == ("InferRequest", True, "not now")
    assert span.attributes["http.response.status_code"] == 503
    assert (span.parent_id, span.start_ns) == ("", span.end_ns)
    for _ in range(3):
        tracer.refused(Unavailable("no"), PARENT, status, TraceSettings(on=True, count=1))
    flush(spanned, take)
    assert [span.trace_id for span in exporter.take()] == ["a" * 32]
    assert taken == [("", 3, 3)]


def test_a_refused_key_is_a_type_of_error_of_its_own(spanned, exporter, flush) -> None:
    status: dict[str, str | int] = {"rpc.grpc.status_code": 16}
    for error in (Unauthenticated("it needs a key"), PermissionDenied("it may not")):
        spanned.dispatcher.tracer.refused(error, PARENT, status, TraceSettings(on=True))
    flush(spanned, never)
    kinds = [span.attributes["error.type"] for span in exporter.take()]
    assert kinds == ["unauthenticated", "permission_denied"]


def test_a_rate_of_0_traces_for_clients_that_say_so(spanned, exporter, flush) -> None:
    entry = traced(spanned.serve(answer), rate=0)
    send(spanned, entry)
    send(spanned, entry, traceparent=PARENT)
    flush(spanned, never)
    assert [span.name for span in exporter.take()].count("InferRequest") == 1


def test_what_finds_no_exporter_is_counted(spanned: Rig, tmp_path, flush: Flush, caplog) -> None:
    entry = traced(spanned.serve(answer))
    send(spanned, entry)
    flush(spanned, never)
    assert "spans are lost: the exporter is away" in caplog.text
    with closing(Exporter(tmp_path)) as exporter:
        send(spanned, entry)
        flush(spanned, never)
        assert exporter.take()
        assert exporter.dropped >= 8
    send(spanned, entry)
    flush(spanned, never)  # it has gone: nothing waits, nothing fails


def test_steps_are_spans_within_their_ensemble(
    spanned: Rig, exporter: Exporter, flush: Flush
) -> None:
    Models(spanned, BRANCHES).serve(one=plus(1), ten=plus(10), sum=sums)
    send(spanned, traced(spanned.dispatcher.ready_model("e")))
    flush(spanned, never)
    spanned.assert_nothing_held()
    spans = exporter.take()
    assert len({span.trace_id for span in spans}) == 1
    assert sorted(tree(spans)["e"]) == ["one", "sum", "ten"]
    assert tree(spans)["one"] == ["queue", "compute"]
    (ensemble,) = (span for span in spans if span.name == "e")
    for step in (span for span in spans if span.name in ("one", "ten", "sum")):
        assert ensemble.start_ns <= step.start_ns <= step.end_ns


def test_a_model_knows_what_its_own_calls_are_part_of(spanned, exporter, flush) -> None:
    seen: list[str] = []

    def noting(request: Request) -> Response:
        seen.append(request.traceparent)
        return answer(request)

    entry = spanned.serve(noting)
    send(spanned, traced(entry), traceparent=PARENT)
    send(spanned, entry, traceparent=PARENT)
    flush(spanned, never)
    (model,) = (span for span in exporter.take() if span.name == "m")
    assert seen == [f"00-{'a' * 32}-{model.span_id}-01", ""]


# -------------------------------------------------------------------------- the parts


def written(array: Any, datatype: str) -> str:
    data = array if isinstance(array, bytes) else array.tobytes()
    count = 2 if isinstance(array, bytes) else array.size
    trace = Trace(ModelEntry(SPEC, ModelState.READY), TraceSettings(tensors=True), "", 1 << 20)
    trace.add_tensors("A", [OutputTensor("T", datatype, (count,), memoryview(data))])
    (row,) = [row for row in entries_of(trace, 1, "http") if "tensor" in row]
    text: str = row["tensor"]["data"]
    return text


def test_tensors_as_text() -> None:
    assert written(np.array([True, False]), "BOOL") == "1,0"
    assert written(np.array([-1, 2], np.int64), "INT64") == "-1,2"
    assert written(np.array([0.1, np.nan], np.float32), "FP32") == "0.1,nan"
    assert written(np.array([0.5], np.float16), "FP16") == ""
    assert written(bytes_codec.encode([b"a b", b"\xff"]), "BYTES") == '"a b","\ufffd"'


def test_tensors_in_client_memory_are_not_there() -> None:
    trace = Trace(ModelEntry(SPEC, ModelState.READY), TraceSettings(tensors=True), "", 100)
    trace.add_tensors("A", [OutputTensor("T", "FP32", (4,), memoryview(b""))])
    assert trace.tensors == []


@pytest.mark.parametrize(
    ("protocol", "first", "last"),
    [("http", "HTTP_RECV", "HTTP_SEND"), ("grpc", "GRPC_WAITREAD", "GRPC_SEND")],
)
def test_times_are_called_after_their_frontend(protocol: str, first: str, last: str) -> None:
    trace = Trace(ModelEntry(SPEC, ModelState.READY), TraceSettings(on=True), "", 0)
    trace.times = timestamps(1, 5, Timing(1, 2, 3, 4), 9, 30, 40)
    stamps = [r["timestamps"][0] for r in entries_of(trace, 1, protocol) if "timestamps" in r]
    assert stamps[0] == {"name": f"{first}_START", "ns": 1}
    assert stamps[-1] == {"name": f"{last}_END", "ns": 40}
    ends = {s["name"]: s["ns"] for s in stamps}
    assert ends["COMPUTE_END"] == ends["REQUEST_END"] == 15, "never before the model's end"
    inner = [r for r in entries_of(trace, 1, "model") if "timestamps" in r]
    assert inner[0]["timestamps"][0]["name"] == "REQUEST_START"


def test_what_waits_is_bounded(monkeypatch, caplog) -> None:
    monkeypatch.setattr("shmserve.dispatch.traces.tracing._MOST_WAITING", 3)
    monkeypatch.setattr("shmserve.dispatch.traces.tracing._MOST_WAITING_BYTES", 10)
    caplog.set_level("INFO", TRACES)
    tracer = Tracer("http-1", "http", Settings())
    entry = ModelEntry(SPEC, ModelState.READY, trace=TraceSettings(True, 1, tensors=True))
    for size in (8, 8, 0, 0, 0):
        trace = tracer.begin(entry, RunOptions())
        trace.times = timestamps(1, 2, None, 3, 4, 5)
        trace.add_tensors("A", [OutputTensor("T", "UINT8", (size,), memoryview(bytes(size)))])
        tracer.end(trace)
    tracer.flush(lambda *_: GrantedTraces())
    assert len([r for r in caplog.records if r.name == TRACES]) == 3
    assert "2 traces are lost" in caplog.text
    assert RuntimeSettings().taken("m", 3)[1] == GrantedTraces()


def test_a_trace_of_a_stream_without_end_is_bounded() -> None:
    settings = TraceSettings(on=True, tensors=True)
    entry = ModelEntry(SPEC, ModelState.READY)
    trace = Trace(entry, settings, "", most_bytes=100)
    for _ in range(3000):
        trace.add_tensors("a", [OutputTensor("OUT", "FP32", (3,), ONES.data.cast("B"))])
        trace.add_step(Trace(entry, settings, "", 100, inner=True))
    assert (len(trace.tensors), len(trace.steps)) == (256, 1024)
