"""Statistics, trace and log settings, and metrics over HTTP, on made-up numbers."""

import math
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

import shmserve
from shmserve.config import Settings, load
from shmserve.core.registry import ModelState
from shmserve.core.stats.counter_pages import Gauges
from shmserve.core.stats.custom_metrics import Family, InstanceMetrics, MetricKind, Series
from shmserve.core.stats.executor_counters import OTHER_SIZES
from shmserve.core.stats.request_counters import OTHER, Reason, RequestCounts
from shmserve.errors import ConfigError
from shmserve.frontends.http.routes.inference import body_reader
from shmserve.frontends.http.routes.scrape.prometheus_text import Metrics
from shmserve.protocol.control.stats_messages import (
    GpuReport,
    ModelReport,
    PageOwner,
    ProcessReport,
    RegionsReport,
    Report,
    UsageReport,
)
from shmserve.tensor.spec import EnsembleStep
from tests.running_server import wait_until
from tests.unit.frontends.key_files import KEY, one_key
from tests.unit.http_client import INFER, Client, as_json, error_of


def model_report() -> ModelReport:
    model = ModelReport("identity", "1")
    http = model.requests.setdefault("http", type(model.all_requests())())
    http.succeeded, http.success_ns, http.fail_ns = 4, 8_000_000, 500
    http.failures[Reason.BAD_REQUEST] = 3
    http.failures[Reason.QUEUE_FULL] = 2
    http.failures[Reason.MODEL] = 1
    http.copied = [100, 0, 7, 0]
    http.buckets[4], http.buckets[-1] = 3, 1
    http.in_flight = 3
    http.cache = [4, 40_000, 6, 60_000]
    grpc = model.requests.setdefault("grpc", type(http)())
    grpc.succeeded, grpc.success_ns = 1, 2_000_000
    grpc.buckets[4] = 1
    runs = model.runs
    runs.last_inference_ms, runs.inferences, runs.executions, runs.requests = 1234567, 21, 5, 5
    runs.stage_ns = [1000, 2000, 3000, 4000]
    for buckets in runs.buckets:
        buckets[0] = 5
    runs.batches = {1: [1, 10, 20, 30], 4: [3, 1, 2, 3], OTHER_SIZES: [1, 0, 0, 0]}
    runs.responses = {0: [1, 10, 1, 5, 1, 15, 0, 0, 0, 0, 0, 0]}
    return model


def report() -> Report:
    executor = PageOwner("executor-1", "executor", 7, "identity", "1", "identity/1/0")
    other = ModelReport(*OTHER)
    other.requests["http"] = type(other.all_requests())(succeeded=1)
    return Report(
        (model_report(), other),
        (
            ProcessReport(executor, Gauges(2, 300, 4096), 3, 0, 1),
            ProcessReport(PageOwner("http-1", "http", 8), Gauges(1, 256, 8192, 5, 1)),
        ),
        {"http": 2, "executor": 4},
        {"executor": 3},
        10_000,
        5000,
        (RegionsReport("system", 2, 4096, 1),),
        gpus=(
            GpuReport("GPU-a", 0, "H200", 0.25, 1 << 30, 1 << 37, 41, 150.5, 700.0, 1234.5),
            GpuReport("GPU-b", 3, "H200", memory_used=5),
        ),
        usage=(
            UsageReport("executor", cpu_s=0.5),  # of models that are gone
            UsageReport("executor", "identity", "1", 1.5, 1000, 3000),
            UsageReport("executor", "other", "1", 2.0, 10, 30),
            UsageReport("http", "", "", 4.0, 7, 8),
        ),
    )


@pytest.fixture
def client():
    made = Client(Settings(metrics_triton_names=True))
    made.dispatcher.coordinator.numbers = report()
    return made


# ------------------------------------------------------------------------ statistics


def test_statistics_in_tritons_shape(client: Client) -> None:
    answers = [
        client.get(path).json
        for path in ("/v2/models/identity/stats", "/v2/models/identity/versions/1/stats")
    ]
    assert answers[0] == answers[1]
    (stats,) = answers[0]["model_stats"]
    assert (stats["name"], stats["version"], stats["last_inference"]) == ("identity", "1", 1234567)
    assert (stats["inference_count"], stats["execution_count"]) == (21, 5)
    assert stats["inference_stats"] == {
        "success": {"count": 5, "ns": 10_000_000},
        "fail": {"count": 3, "ns": 500},
        "queue": {"count": 5, "ns": 1000},
        "compute_input": {"count": 5, "ns": 2000},
        "compute_infer": {"count": 5, "ns": 3000},
        "compute_output": {"count": 5, "ns": 4000},
        "cache_hit": {"count": 4, "ns": 40_000},
        "cache_miss": {"count": 6, "ns": 60_000},
    }
    assert [row["batch_size"] for row in stats["batch_stats"]] == [1, 4]
    assert stats["batch_stats"][1]["compute_infer"] == {"count": 3, "ns": 2}
    assert stats["response_stats"]["0"]["success"] == {"count": 1, "ns": 15}
    assert stats["memory_usage"] == [{"type": "CPU", "id": 0, "byte_size": 4096}]


def test_statistics_of_an_ensemble_are_sums_over_its_runs(client: Client) -> None:
    spec = client.dispatcher.entries["batched"]["1"].spec
    step = EnsembleStep("identity", "", {}, {})
    client.dispatcher.put(msgspec.structs.replace(spec, name="e", steps=(step,)), ModelState.READY)
    model = ModelReport("e", "1")
    for role, last_ms in (("http", 7), ("grpc", 9)):
        batches = {4: [last_ms, 2, 8, 10, 20, 30], 1: [5, 1, 1, 1, 2, 3]}
        batches[OTHER_SIZES] = [6, 1, 70, 0, 0, 0]
        model.requests[role] = RequestCounts(succeeded=4, batches=batches)
    client.dispatcher.coordinator.numbers = msgspec.structs.replace(report(), models=(model,))
    (stats,) = client.get("/v2/models/e/stats").json["model_stats"]
    assert (stats["last_inference"], stats["execution_count"], stats["inference_count"]) == (
        9,
        8,
        158,
    )
    assert stats["inference_stats"]["queue"] == {"count": 8, "ns": 0}
    assert stats["inference_stats"]["compute_infer"] == {"count": 8, "ns": 44}
    assert [row["batch_size"] for row in stats["batch_stats"]] == [1, 4]
    assert stats["batch_stats"][1] == {
        "batch_size": 4,
        "compute_input": {"count": 4, "ns": 20},
        "compute_infer": {"count": 4, "ns": 40},
        "compute_output": {"count": 4, "ns": 60},
    }


def test_statistics_of_all_models_also_of_those_never_asked(client: Client) -> None:
    stats = {row["name"]: row for row in client.get("/v2/models/stats").json["model_stats"]}
    assert stats.keys() == client.dispatcher.entries.keys()
    assert stats["batched"]["inference_stats"]["success"] == {"count": 0, "ns": 0}
    assert stats["batched"]["memory_usage"] == []


def test_what_is_not_ready_has_no_statistics(client: Client) -> None:
    for path in ("nobody/stats", "identity/versions/9/stats", "identity/versions/v1/stats"):
        assert error_of(client.get(f"/v2/models/{path}"), 404)
    spec = client.dispatcher.entries["batched"]["1"].spec
    client.dispatcher.put(spec, ModelState.UNAVAILABLE)
    assert client.get("/v2/models/batched/stats").status == 404
    names = [row["name"] for row in client.get("/v2/models/stats").json["model_stats"]]
    assert "batched" not in names
    assert client.ask("POST", "/v2/models/identity/stats").status == 405


def test_without_a_coordinator_numbers_are_a_503(client: Client) -> None:
    client.dispatcher.coordinator.numbers = None
    for path in ("/v2/models/stats", "/metrics"):
        assert "the coordinator did not answer" in error_of(client.get(path), 503)


# -------------------------------------------------------------------- what is counted


def test_every_request_for_a_known_model_is_accounted_for(client: Client) -> None:
    good = {"inputs": [as_json([1.0])]}
    assert client.infer(good).status == 200
    (call,) = client.dispatcher.calls
    assert call.outcomes == ["answered"]
    assert client.ask("POST", INFER, b"{").status == 400
    assert client.dispatcher.refusals == [("identity", "InvalidArgument")]
    assert client.infer(good, "/v2/models/nobody/infer").status == 404
    assert len(client.dispatcher.refusals) == 1


def test_a_body_that_is_wrong_fails_its_call(client: Client) -> None:
    body = b'{"inputs":[{"name":"INPUT0","shape":[1],"datatype":"FP32","data":["x"]}]}'
    assert client.ask("POST", INFER, body).status == 400
    (call,) = client.dispatcher.calls
    assert (call.outcomes, call.closed) == (["InvalidArgument"], 1)


# ------------------------------------------------------------------------ settings


def test_settings_over_http(client: Client) -> None:
    path = "/v2/models/identity/trace/setting"
    changed = client.ask("POST", path, b'{"trace_rate":"7","trace_level":["TIMESTAMPS"]}')
    assert changed.json == client.get(path).json
    assert (changed.json["trace_rate"], changed.json["trace_level"]) == ("7", ["TIMESTAMPS"])
    assert client.get("/v2/trace/setting").json["trace_rate"] == "1000"
    assert client.ask("POST", path).json == changed.json
    logs = client.ask("POST", "/v2/logging", b'{"log_verbose_level":2}')
    assert logs.json["log_verbose_level"] == client.get("/v2/logging").json["log_verbose_level"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v2/logging", b'{"log_file":"x"}', 501),
        ("/v2/logging", b"[]", 400),
        ("/v2/logging", b"{", 400),
        ("/v2/logging", b'{"log_info":1}', 400),
        ("/v2/trace/setting", b'{"trace_file":"x"}', 501),
        ("/v2/models/nobody/trace/setting", b'{"trace_rate":"1"}', 400),
        ("/v2/models/identity/versions/1/trace/setting", b"{}", 404),
        ("/v2/trace/setting", b'{"trace_rate":"' + b"1" * 100_000 + b'"}', 413),
    ],
)
def test_settings_that_are_refused(client: Client, path: str, body: bytes, status: int) -> None:
    assert error_of(client.ask("POST", path, body), status)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/repository/models/identity/unload",
        "/v2/logging",
        "/v2/systemsharedmemory/region/r/register",
    ],
)
def test_a_body_that_is_too_large_is_told_the_limit(path: str, monkeypatch) -> None:
    monkeypatch.setattr(body_reader, "MAX_SMALL_BODY_BYTES", 100)
    client = Client(Settings(model_control="explicit"))
    assert "setting" not in client.ask("POST", path, b'{"ready":' + b" " * 80).body.decode()
    text = error_of(client.ask("POST", path, b'{"ready":' + b" " * 100), 413)
    assert "109 bytes exceeds the maximum allowed input size of 100 bytes" in text
    assert text.endswith("value of 100 bytes")
    model = "/v2/repository/models/identity/load"
    assert "setting" not in client.ask("POST", model, b"{}" + b" " * 100).body.decode()


# ------------------------------------------------------------------------- metrics


def samples(client: Client) -> dict[str, dict[tuple[str, ...], float]]:
    """Return values by metric name and by label values, ordered by label name."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    for family in text_string_to_metric_families(answer.body.decode()):
        assert family.documentation
        for sample in family.samples:
            # The parser appends _total to Triton's counters, too.
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), f"twice: {sample}"
            found[sample.name][labels] = sample.value
    return found


def test_metrics_on_an_address_of_their_own() -> None:
    client = Client(Settings(metrics_bind=("127.0.0.1:8002", "[::1]:8003")))
    client.dispatcher.coordinator.numbers = report()
    error_of(client.get("/metrics"), 404)
    assert client.get("/v2").status == 200
    for port in ("8002", "8003"):
        there: dict[str, Any] = {"SERVER_PORT": port, "HTTP_HOST": f"localhost:{port}"}
        there |= {"REMOTE_ADDR": "127.0.0.1", "REMOTE_PORT": "5"}
        answer = client.get("/metrics", **there)
        assert answer.status == 200
        assert b"shmserve_requests_total" in answer.body
        assert client.ask("HEAD", "/metrics", **there).status == 200
        error_of(client.ask("POST", "/metrics", **there), 405)
        for path in ("/v2", "/v2/health/live", "/", "//metrics", INFER):
            error_of(client.get(path, **there), 404)
        foreign = {"Origin": "http://elsewhere.example", "Sec-Fetch-Site": "cross-site"}
        error_of(client.get("/metrics", headers=foreign, **there), 403)
        error_of(client.get("/metrics", **{**there, "HTTP_HOST": "evil.example"}), 403)
        unix = {**there, "REMOTE_ADDR": "", "REMOTE_PORT": None}
        assert client.get("/v2", **unix).status == 200, "its client only says so"
        with socket.socket(socket.AF_UNIX) as sock:  # and the proxy before it names another client
            proxied = {**there, "gunicorn.socket": sock}
            assert client.get("/v2", **proxied).status == 200
            error_of(client.get("/metrics", **proxied), 404)


def test_scrapes_that_come_together_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client()
    coordinator = client.dispatcher.coordinator
    coordinator.numbers = report()
    ordinary, reports, go_on = coordinator.report, [], threading.Event()

    def slow() -> Any:
        reports.append(1)
        assert go_on.wait(60)
        return ordinary()

    monkeypatch.setattr(coordinator, "report", slow)
    dispatcher: Any = client.dispatcher
    metrics = Metrics(dispatcher, Settings())
    with ThreadPoolExecutor(20) as threads:
        texts = [threads.submit(metrics.text) for _ in range(20)]
        runs = metrics._runs[False]
        wait_until(lambda: len(runs._waiting) == 19, "scrapes wait")
        go_on.set()
        assert {b"shmserve_requests_total" in text.result(60) for text in texts} == {True}
    assert len(reports) == 2


def test_metrics_of_their_own_are_for_those_who_may_have_them() -> None:
    secret = Settings(metrics_bind=("h:8002",), http_restricted_api=("statistics:x-key=s",))
    client = Client(secret)
    client.dispatcher.coordinator.numbers = report()
    there: dict[str, Any] = {"SERVER_PORT": "8002", "REMOTE_PORT": "5", "HTTP_HOST": "h"}
    error_of(client.get("/metrics", **there), 403)
    assert client.get("/metrics", headers={"x-key": "s"}, **there).status == 200


def test_metrics_of_their_own_without_keys(tmp_path: Path) -> None:
    """Prometheus needs no key, and sees no names of keys."""
    there: dict[str, Any] = {"SERVER_PORT": "8002", "REMOTE_PORT": "5", "HTTP_HOST": "h"}
    key = {"Authorization": f"Bearer {KEY}"}
    for metrics_keys in (True, False):
        own = Settings(metrics_bind=("h:8002",), metrics_keys=metrics_keys, **one_key(tmp_path))
        client = Client(own)
        client.dispatcher.coordinator.numbers = replace(
            report(), keys={"me": 3, "you": 4, "(unknown)": 2}
        )
        assert b'key="me"' in client.get("/metrics", headers=key, **there).body
        answer = client.get("/metrics", **there)
        assert answer.status == (401 if metrics_keys else 200)
        if metrics_keys:
            how = ": send a key as 'Authorization: Bearer KEY', or as 'shmserve-key: KEY'"
            assert answer.json["error"].endswith("; no key was sent" + how)
            answer = client.get("/metrics", headers={"shmserve-key": "wrong"}, **there)
            assert answer.json["error"].endswith("; the key sent is unknown or expired" + how)
            continue
        lines = [line for line in answer.body.splitlines() if b"key=" in line]
        assert lines == [
            b'shmserve_key_requests_total{key="(hidden)"} 7.0',
            b'shmserve_key_requests_total{key="(unknown)"} 2.0',
        ]
        error_of(client.get("/metrics", headers={"Origin": "http://evil.example"}, **there), 403)
        error_of(client.get("/v2", HTTP_HOST="localhost"), 401)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"METRICS_TLS": "false"}, "metrics_tls: needs metrics_bind"),
        ({"METRICS_KEYS": "false"}, "metrics_keys: needs metrics_bind"),
        ({"METRICS_BIND": "unix:/run/m.sock"}, "metrics_bind"),
        ({"METRICS_BIND": "127.0.0.1"}, "metrics_bind"),
        ({"METRICS_BIND": "127.0.0.1:0"}, "metrics_bind"),
        (
            {"METRICS_BIND": "10.0.0.1:8000"},
            "metrics_bind: '10.0.0.1:8000' has a port of http_bind",
        ),
        ({"METRICS_BIND": "h:8002", "METRICS": "false"}, "metrics_bind: there are no metrics"),
        ({"AGENT_BIND": "unix:/run/a.sock"}, "agent_bind"),
        ({"AGENT_BIND": "10.0.0.1:8001"}, "agent_bind: '10.0.0.1:8001' has a port of grpc_bind"),
        (
            {"AGENT_BIND": "h:8002", "METRICS_BIND": "h:8002"},
            "agent_bind: 'h:8002' has a port of metrics_bind",
        ),
    ],
)
def test_addresses_that_metrics_and_the_agent_cannot_have(environ, text) -> None:
    with pytest.raises(ConfigError, match=text):
        load({f"SHMSERVE_{name}": value for name, value in environ.items()})


def test_processor_time_and_memory_of_roles_and_models(client: Client) -> None:
    told = samples(client)
    assert told["shmserve_process_cpu_seconds_total"] == {("executor",): 4.0, ("http",): 4.0}
    assert told["shmserve_process_private_bytes"] == {("executor",): 1010, ("http",): 7}
    assert told["shmserve_process_resident_bytes"] == {("executor",): 3030, ("http",): 8}
    models = [("identity", "1"), ("other", "1")]
    assert told["shmserve_model_cpu_seconds_total"] == dict(zip(models, (1.5, 2.0), strict=True))
    assert told["shmserve_model_private_bytes"] == dict(zip(models, (1000, 10), strict=True))
    assert told["shmserve_model_resident_bytes"] == dict(zip(models, (3000, 30), strict=True))


def test_labels_of_tritons_metrics_stand_in_its_order(client: Client) -> None:
    lines = client.get("/metrics").body.decode().splitlines()
    assert 'nv_inference_request_success{model="identity",version="1"} 5' in lines
    failure = 'nv_inference_request_failure{model="identity",reason="%s",version="1"} %d'
    assert {failure % ("REJECTED", 2), failure % ("BACKEND", 1)} <= set(lines)


def test_metrics_say_what_was_counted(client: Client) -> None:
    told = samples(client)
    requests = told["shmserve_requests_total"]
    assert requests["identity", "http", "1"] == 10
    assert requests["identity", "grpc", "1"] == 1
    assert requests["(other)", "http", ""] == 1
    failures = told["shmserve_request_failures_total"]
    assert failures["identity", "http", "queue_full", "1"] == 2
    assert len(failures) == 3 * len(Reason)
    assert told["shmserve_copied_bytes_total"]["identity", "in", "1"] == 100
    assert told["shmserve_model_executions_total"]["identity", "1"] == 5
    assert told["shmserve_queue_depth"]["identity/1/0", "identity", "1"] == 3
    assert told["shmserve_connections"] == {("http",): 5}
    assert told["shmserve_slots"] == {("executor",): 2, ("http",): 1}
    assert told["shmserve_arena_bytes"] == {("executor",): 4096, ("http",): 8192}
    assert told["shmserve_process_starts_total"] == {("executor",): 4, ("http",): 2}
    assert told["shmserve_process_ends_total"] == {("executor",): 3}
    assert told["shmserve_pool_bytes"] == {(): 10_000}
    assert told["shmserve_pool_used_bytes"] == {(): 5000}
    assert told["shmserve_regions"] == {("system",): 2}
    assert told["shmserve_regions_quarantined"] == {("system",): 1}
    assert told["shmserve_models"]["READY",] == len(client.dispatcher.entries)
    assert told["shmserve_build_info"] == {(shmserve.__version__,): 1}


GPU_VALUES = {  # values of the first GPU, with Triton's name as the parser reads the name
    "shmserve_gpu_utilization_ratio": ("nv_gpu_utilization", 0.25),
    "shmserve_gpu_memory_used_bytes": ("nv_gpu_memory_used_bytes", 1 << 30),
    "shmserve_gpu_memory_total_bytes": ("nv_gpu_memory_total_bytes", 1 << 37),
    "shmserve_gpu_temperature_celsius": ("", 41),
    "shmserve_gpu_power_watts": ("nv_gpu_power_usage", 150.5),
    "shmserve_gpu_power_limit_watts": ("nv_gpu_power_limit", 700),
    "shmserve_gpu_energy_joules_total": ("nv_energy_consumption_total", 1234.5),
}


def test_gpus_are_told_with_what_they_have(client: Client) -> None:
    told = samples(client)
    first, second = ("0", "GPU-a", "H200"), ("3", "GPU-b", "H200")
    for name, (of_triton, value) in GPU_VALUES.items():
        wanted = {first: value}
        if name == "shmserve_gpu_memory_used_bytes":
            wanted[second] = 5
        assert told[name] == wanted, name
        if of_triton:
            assert told[of_triton] == {labels[1:2]: found for labels, found in wanted.items()}
    plain = Client()
    assert not re.search(rb"(nv|shmserve)_(gpu|energy)", plain.get("/metrics").body)


def test_histograms_rise_to_their_count(client: Client) -> None:
    told = samples(client)
    for name, labels in (
        ("shmserve_request_duration_seconds", ("identity", "1")),
        ("shmserve_stage_duration_seconds", ("identity", "queue", "1")),
        ("shmserve_batch_size", ("identity", "1")),
    ):
        buckets = {
            math.inf if key[0] == "+Inf" else float(key[0]): value
            for key, value in told[f"{name}_bucket"].items()
            if key[1:] == labels
        }
        values = [buckets[bound] for bound in sorted(buckets)]
        assert values == sorted(values)
        assert values[-1] == told[f"{name}_count"][labels] == 5
    assert told["shmserve_request_duration_seconds_sum"]["identity", "1"] == pytest.approx(0.01)
    assert told["shmserve_stage_duration_seconds_sum"]["identity", "queue", "1"] == 1e-6
    assert told["shmserve_batch_size_bucket"]["4", "identity", "1"] == 4
    assert told["shmserve_batch_size_sum"]["identity", "1"] == 21


def test_names_that_tritons_dashboards_ask_for(client: Client) -> None:
    told = samples(client)
    for name, value in {
        "nv_inference_request_success_total": 5,
        "nv_inference_count_total": 21,
        "nv_inference_exec_count_total": 5,
        "nv_inference_request_duration_us_total": 10_000,
        "nv_inference_compute_output_duration_us_total": 4,
        "nv_inference_pending_request_count": 2,
        "shmserve_pending_requests": 2,
    }.items():
        assert told[name]["identity", "1"] == value, name
    failures = told["nv_inference_request_failure_total"]
    assert [failures["identity", r, "1"] for r in ("REJECTED", "BACKEND", "OTHER")] == [2, 1, 0]
    lookups = told["shmserve_cache_lookups_total"]
    assert lookups == {("identity", h, "1"): n for h, n in (("hit", 4), ("miss", 6))} | {
        ("(other)", h, ""): 0 for h in ("hit", "miss")
    }
    plain = Client()
    assert b"nv_inference" not in plain.get("/metrics").body


def test_runs_of_an_ensemble_are_counted(client: Client) -> None:
    ensemble = ModelReport("ensemble", "1")
    row = [9, 3, 12, 1000, 7000, 2000]  # three runs on batches of four
    ensemble.requests["grpc"] = RequestCounts(succeeded=3, batches={4: row})
    client.dispatcher.coordinator.numbers = replace(report(), models=(ensemble,))
    told = samples(client)
    for name, value in {
        "nv_inference_count_total": 12,
        "nv_inference_exec_count_total": 3,
        "nv_inference_compute_infer_duration_us_total": 7,
        "shmserve_model_executions_total": 3,
        "shmserve_inferences_total": 12,
        "shmserve_batch_size_count": 3,
    }.items():
        assert told[name]["ensemble", "1"] == value, name


def test_tritons_names_of_cached_models() -> None:
    client = Client(Settings(metrics_triton_names=True, response_cache_bytes=1 << 20))
    client.dispatcher.coordinator.numbers = report()
    assert b"nv_cache" not in client.get("/metrics").body
    spec = client.dispatcher.entries["identity"]["1"].spec
    config = msgspec.structs.replace(spec.config, response_cache={"enable": True})
    cached = msgspec.structs.replace(spec, config=config)
    client.dispatcher.put(cached, ModelState.READY)
    told = samples(client)
    for name, value in {
        "nv_cache_num_hits_per_model_total": 4,
        "nv_cache_hit_duration_per_model_total": 40,
        "nv_cache_num_misses_per_model_total": 6,
        "nv_cache_miss_duration_per_model_total": 60,
    }.items():
        assert told[name] == {("identity", "1"): value}, name
    without = Client(Settings(metrics_triton_names=True))
    without.dispatcher.coordinator.numbers = report()
    without.dispatcher.put(cached, ModelState.READY)
    assert b"nv_cache" not in without.get("/metrics").body


def test_names_and_labels_follow_the_conventions(client: Client) -> None:
    text = client.get("/metrics").body.decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    for name, kind in types.items():
        if name.startswith("shmserve_"):
            assert (kind == "counter") == name.endswith("_total"), name
            assert not re.search(r"_(ms|us|ns|kb|mb)\b", name), name
    assert set(re.findall(r"^(\w+?)(?:_bucket|_count|_sum)?[{ ]", text, re.MULTILINE)) - {"#"}


def test_metrics_can_be_switched_off() -> None:
    assert Client(Settings(metrics=False)).get("/metrics").status == 404


def test_label_values_are_escaped(client: Client) -> None:
    numbers: Any = Report((ModelReport('a"b\\c\nd', "1"),), (), {}, {})
    client.dispatcher.coordinator.numbers = numbers
    assert samples(client)["nv_inference_count_total"] == {('a"b\\c\nd', "1"): 0}


def test_metrics_of_models_stand_behind_the_servers_own(client: Client) -> None:
    def sizes(*values: float) -> Series:
        return Series((("k", "v"),), (0.1, 1.0, 2.5), values)

    series = Series((("a", 'b"\\\n'),), (), (3.0,))
    families = (
        Family("counted_things", "of\n\\all", MetricKind.COUNTER, (series,)),
        Family("level:now", "", MetricKind.GAUGE, (Series((), (), (-math.inf,)),)),
        Family("sizes", "", MetricKind.HISTOGRAM, (sizes(1, 0, 2, 1, 7.55),)),
        Family("without", "", MetricKind.GAUGE),
    )
    numbers = (1 / 3, 1e300, 12345678.0, math.nan)
    others = [Family("sizes", "", MetricKind.HISTOGRAM, (sizes(0, 0, 0, 0, 0.45),))]
    for index, number in enumerate(numbers):
        others.append(Family(f"x{index}", "", MetricKind.GAUGE, (Series((), (), (number,)),)))
    custom = (
        InstanceMetrics("identity", "1", "identity/1/0", families),
        InstanceMetrics("gone", "1", "gone/1/0", tuple(others)),
    )
    client.dispatcher.coordinator.numbers = msgspec.structs.replace(report(), custom=custom)
    text = client.get("/metrics").body.decode()
    told = text[text.index("# HELP counted_things") : text.index("# HELP nv_inference")]
    assert told.splitlines() == [
        "# HELP counted_things of\\n\\\\all",
        "# TYPE counted_things counter",
        'counted_things{a="b\\"\\\\\\n"} 3',
        "# HELP level:now ",
        "# TYPE level:now gauge",
        "level:now -Inf",
        "# HELP sizes ",
        "# TYPE sizes histogram",
        'sizes_count{k="v"} 4',
        'sizes_sum{k="v"} 8',
        'sizes_bucket{k="v",le="0.1"} 1',
        'sizes_bucket{k="v",le="1"} 1',
        'sizes_bucket{k="v",le="2.5"} 3',
        'sizes_bucket{k="v",le="+Inf"} 4',
        *("# HELP x0 ", "# TYPE x0 gauge", "x0 0.3333333333333333"),
        *("# HELP x1 ", "# TYPE x1 gauge", "x1 1e+300"),
        *("# HELP x2 ", "# TYPE x2 gauge", "x2 12345678"),
        *("# HELP x3 ", "# TYPE x3 gauge", "x3 NaN"),
    ]
    assert list(text_string_to_metric_families(text))
