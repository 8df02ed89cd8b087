"""Spans and metrics of a real server, as a collector receives them over HTTP."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

from shmserve._generated import grpc_service_pb2 as pb
from shmserve._generated import grps_pb2 as grps_pb
from tests.grpc_client import Client, request
from tests.running_server import free_port, wait_until
from tests.servers import Server

REPOSITORIES = Path(__file__).parents[1] / "repositories"
MODELS = ("basic/echo", "basic/misbehaving", "calls/caller", "calls/worker")
GOOD = {"inputs": [{"name": "IN", "shape": [3], "datatype": "FP32", "data": [1, 2, 3]}]}
KEY = "not-for-any-log"
PARENT = "b" * 16


class Collector:
    """OTLP collector over HTTP at a fixed port, which can be started and stopped."""

    def __init__(self) -> None:
        self.port = free_port()
        self.spans: dict[str, list[trace_pb2.Span]] = {}  # by trace
        self.resource: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.keys: set[str | None] = set()
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.keys.add(self.headers.get("x-api-key"))
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()
                self.close_connection = True

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,)).start()

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            found: dict[str, list[trace_pb2.Span]] = {}
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resource = attributes(group.resource)
                for span in (span for scope in group.scope_spans for span in scope.spans):
                    found.setdefault(span.trace_id.hex(), []).append(span)
            for trace, spans in found.items():  # at once: a test waits for the number
                self.spans[trace] = self.spans.get(trace, []) + spans
        else:
            assert path == "/v1/metrics"
            for some in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.metrics |= {m.name: m for scope in some.scope_metrics for m in scope.metrics}

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def tree(self, trace: str, spans: int) -> dict[str, list[str]]:
        """Return the names of spans by their parent's name, once the trace has `spans` spans."""
        wait_until(lambda: len(self.spans.get(trace, ())) >= spans, f"{spans} spans")
        found = self.spans[trace]
        names = {span.span_id: span.name for span in found}
        tree: dict[str, list[str]] = {}
        for span in found:
            parent = names.get(span.parent_span_id, span.parent_span_id.hex())
            tree.setdefault(parent, []).append(span.name)
        return {parent: sorted(n for n in names if n != "send") for parent, names in tree.items()}

    def span(self, trace: str, name: str) -> trace_pb2.Span:
        (found,) = (span for span in self.spans[trace] if span.name == name)
        return found


def attributes(holder: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in holder.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    made.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def server(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    for model in MODELS:
        (folder / Path(model).name).symlink_to(REPOSITORIES / model)
    environ = {"NO_PROXY": "127.0.0.1", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with Server(
        folder,
        environ,
        trace_mode="opentelemetry",
        trace_level="TIMESTAMPS",
        trace_rate=0,
        pipelines="line=echo,worker",
        http_workers=1,
        access_log=True,
        otlp_endpoint=f"http://127.0.0.1:{collector.port}",
        otlp_headers=f"x-api-key={KEY}",
        otlp_service_name="models",
        otlp_resource="deployment.environment.name=test",
        otlp_timeout_s=5,  # else a slow collector gets spans twice
        otlp_metrics_interval_s=0.5,
    ) as server:
        server.wait_instances()
        yield server
    assert KEY not in server.log()


def begun() -> tuple[str, str]:
    """Begin a trace as a client; return the trace's id and the traceparent header."""
    trace = os.urandom(16).hex()
    return trace, f"00-{trace}-{PARENT}-01"


def test_a_request_over_http(server: Server, collector: Collector) -> None:
    trace, parent = begun()
    assert server.infer("echo", {**GOOD, "id": "7"}, traceparent=parent)[0] == 200
    assert collector.tree(trace, 8) == {
        PARENT: ["InferRequest"],
        "InferRequest": ["echo", "receive"],
        "echo": ["compute", "queue"],
        "compute": ["compute_infer", "compute_input", "compute_output"],
    }
    whole, model = collector.span(trace, "InferRequest"), collector.span(trace, "echo")
    assert whole.kind == trace_pb2.Span.SPAN_KIND_SERVER
    assert attributes(whole)["shmserve.transport"] == "http"
    told = attributes(model)
    assert (told["triton.model_name"], told["triton.request_id"]) == ("echo", "7")
    assert (told["shmserve.copied_bytes.in"], told["shmserve.executor"]) == (12, "echo/1/0")
    assert abs(whole.start_time_unix_nano - time.time_ns()) < 600e9
    assert collector.resource["service.name"] == "models"
    assert collector.resource["deployment.environment.name"] == "test"
    assert collector.keys == {KEY}
    assert server.get("/v2/trace/setting")[1]["trace_mode"] == "opentelemetry"


def test_requests_over_grpc(server: Server, collector: Collector) -> None:
    array = np.ones(3, np.float32)
    message = request(array, "echo", name="IN")
    with Client(server.grpc_address) as client:
        trace, parent = begun()
        client.call("ModelInfer", message, metadata=[("traceparent", parent)])
        assert collector.tree(trace, 8)[PARENT] == ["InferRequest"]
        assert attributes(collector.span(trace, "InferRequest"))["shmserve.transport"] == "grpc"
        trace, parent = begun()
        method = client.method("ModelStreamInfer", stream=True)
        answers = method(iter([message, message]), metadata=[("traceparent", parent)], timeout=60)
        assert not any(answer.error_message for answer in answers)
        assert collector.tree(trace, 16)[PARENT] == ["InferRequest"] * 2
    server.wait_log('"ModelStreamInfer" OK ')


def test_models_within_a_request(server: Server, collector: Collector) -> None:
    trace, parent = begun()
    assert server.infer("line", GOOD, traceparent=parent)[0] == 200
    tree = collector.tree(trace, 13)
    assert tree["InferRequest"] == ["line", "receive"]
    assert tree["line"] == ["echo", "worker"]
    trace, parent = begun()
    x = {"name": "X", "shape": [3], "datatype": "FP32", "data": [1, 2, 3]}
    document = {"inputs": [x], "parameters": {"model": "worker"}}
    assert server.infer("caller", document, traceparent=parent)[0] == 200
    tree = collector.tree(trace, 14)
    assert tree["caller"] == ["compute", "queue", "worker"], "what it calls is within it"


def test_an_error(server: Server, collector: Collector) -> None:
    trace, parent = begun()
    throws = {"name": "COMMAND", "shape": [1], "datatype": "BYTES", "data": ["throw"]}
    assert server.infer("misbehaving", {"inputs": [throws]}, traceparent=parent)[0] == 500
    assert collector.tree(trace, 3)["InferRequest"][0] == "misbehaving"
    for name in ("InferRequest", "misbehaving"):
        status = collector.span(trace, name).status
        assert status.code == trace_pb2.Status.STATUS_CODE_ERROR
        assert "no such luck" in status.message
        assert "/srv" not in status.message
    assert attributes(collector.span(trace, "misbehaving"))["error.type"] == "model"


GRPS = "/grps/v1/infer/predict"
PREDICT = "/grps.protos.v1.GrpsService/Predict"
AS_JSON = {"Content-Type": "application/json"}


def grps_message(model: str, name: str = "IN") -> grps_pb.GrpsMessage:
    message = grps_pb.GrpsMessage(model=model)
    dtype = grps_pb.DataType.Value("DT_FLOAT32")
    message.gtensors.tensors.add(name=name, dtype=dtype, shape=[3], flat_float32=[1, 2, 3])
    return message


def test_requests_of_grps(server: Server, collector: Collector) -> None:
    trace, parent = begun()
    body = json.dumps({"model": "echo-1.0.0", "ndarray": [1, 2, 3]}).encode()
    told = server.request("POST", GRPS, body, {**AS_JSON, "traceparent": parent})
    assert told[0] == 200, told
    assert collector.tree(trace, 8)[PARENT] == ["InferRequest"]
    with Client(server.grpc_address) as client:
        trace, parent = begun()
        method = client.channel.unary_unary(PREDICT)
        message = grps_message("echo-1.0.0").SerializeToString()
        answer = method(message, metadata=[("traceparent", parent)], timeout=60)
        assert grps_pb.GrpsMessage.FromString(answer).status.code == 200
        assert collector.tree(trace, 8)[PARENT] == ["InferRequest"]


def refusals(server: Server) -> Iterator[tuple[str, dict[str, Any]]]:
    """Send requests refused before an executor; yield their traces and expected attributes."""

    def http(path: str, body: bytes, status: int, **fields: str) -> tuple[str, dict[str, Any]]:
        trace, parent = begun()
        told = server.request("POST", path, body, {**fields, "traceparent": parent})
        assert told[0] == status, told
        return trace, {"http.response.status_code": status, "url.path": path}

    good = json.dumps(GOOD).encode()
    yield http("/v2/models/echo/infer", b"{", 400)
    yield http("/v2/models/echo/infer", good.replace(b"FP32", b"FP64"), 400)
    yield http("/v2/models/nobody/infer", good, 404)
    yield http("/v2/models/nobody/generate", b"{}", 404)
    yield http(GRPS, b'{"model": "nobody", "str_data": "x"}', 404, **AS_JSON)
    with Client(server.grpc_address) as client:
        message = pb.ModelInferRequest(model_name="nobody")
        trace, parent = begun()
        code, _ = client.error("ModelInfer", message, metadata=[("traceparent", parent)])
        assert code == "NOT_FOUND"
        yield trace, {"rpc.grpc.status_code": 5, "rpc.method": "ModelInfer"}
        trace, parent = begun()
        method = client.method("ModelStreamInfer", stream=True)
        (answer,) = method(iter([message]), metadata=[("traceparent", parent)], timeout=60)
        assert "nobody" in answer.error_message
        yield trace, {"rpc.grpc.status_code": 5, "rpc.method": "ModelStreamInfer"}
        trace, parent = begun()
        grps = client.channel.unary_unary(PREDICT)
        data = grps_message("echo-1.0.0", "NOPE").SerializeToString()
        answer = grps_pb.GrpsMessage.FromString(grps(data, metadata=[("traceparent", parent)]))
        assert answer.status.code == 400
        yield trace, {"rpc.grpc.status_code": 3, "rpc.method": "Predict"}


def test_refused_requests_have_a_span_with_the_status(server: Server, collector: Collector) -> None:
    for trace, expected in list(refusals(server)):
        assert collector.tree(trace, 1) == {PARENT: ["InferRequest"]}, expected
        (span,) = collector.spans[trace]
        assert span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
        assert span.status.message
        told = attributes(span)
        assert {name: told.get(name) for name in expected} == expected
        assert (told["error.type"], "shmserve.process" in told) != ("", False)
    trace, parent = begun()
    assert server.infer("nobody", GOOD, traceparent=parent[:-2] + "00")[0] == 404
    assert server.infer("echo", GOOD, traceparent=begun()[1])[0] == 200
    assert trace not in collector.spans, "its client has it not traced"


def test_the_numbers_of_metrics(server: Server, collector: Collector) -> None:
    assert server.infer("echo", GOOD)[0] == 200

    def counted() -> bool:
        metric = collector.metrics.get("shmserve_requests")
        points = metric.sum.data_points if metric is not None else ()
        told = [(attributes(p), p.as_double) for p in points]
        return any(a["model"] == "echo" and a["protocol"] == "http" and n for a, n in told)

    wait_until(counted, "requests of echo")
    assert collector.metrics["shmserve_request_duration_seconds"].histogram.data_points
    assert collector.metrics["shmserve_pool_bytes"].gauge.data_points
    assert collector.metrics["shmserve_exporter_spans"].sum.data_points


def test_a_collector_that_is_away_for_a_while(server: Server, collector: Collector) -> None:
    collector.stop()
    trace, parent = begun()
    assert server.infer("echo", GOOD, traceparent=parent)[0] == 200
    server.wait_log("does not take spans: no answer")
    collector.start()
    assert collector.tree(trace, 8)[PARENT] == ["InferRequest"], "what waited has come"
    server.wait_log("takes spans again")


def test_an_exporter_that_is_killed_takes_nothing_but_spans(
    server: Server, collector: Collector
) -> None:
    (pid,) = server.pids("exporter")
    others = set(server.processes()) - {pid}
    os.kill(pid, signal.SIGKILL)
    for _ in range(20):
        assert server.infer("echo", GOOD, traceparent=begun()[1])[0] == 200
    wait_until(lambda: server.pids("exporter") not in ([], [pid]), "another one")
    assert others <= set(server.processes())

    def arrives() -> bool:
        trace, parent = begun()
        assert server.infer("echo", GOOD, traceparent=parent)[0] == 200
        time.sleep(2)  # the maintenance of a frontend comes once a second
        return len(collector.spans.get(trace, ())) >= 8

    wait_until(arrives, "spans by way of the next one")
