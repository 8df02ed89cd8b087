"""Settings of logs, numbers and traces."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shmserve.settings.caller_rights import AccessSettings
from shmserve.settings.field_kinds import (
    HeaderPair,
    NonNegative,
    Pair,
    Seconds,
    SecondsOrNone,
    Url,
)


class TelemetrySettings(AccessSettings, frozen=True):
    """Logging and numbers"""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        "lowest level of the log's lines; clients may change the level while the server runs "
        "(POST `/v2/logging`)",
    ] = "info"
    log_format: Annotated[
        Literal["default", "ISO8601", "json"],
        "form of the log's lines, of models' prints as well: `ISO8601` changes timestamps; "
        "`json` writes one object a line ([statistics.md](statistics.md#logs))",
    ] = "default"
    access_log: Annotated[bool, "true: a log line for each HTTP request and for each rpc"] = False
    metrics: Annotated[bool, "true: `GET /metrics` on the HTTP addresses, or on `metrics_bind`"] = (
        True
    )
    metrics_triton_names: Annotated[
        bool,
        "true: `/metrics` also has the `nv_inference_*` names of Triton's dashboards",
    ] = False
    dashboard: Annotated[
        bool,
        "true: the metrics page at `/`, with its history ([dashboard.md](dashboard.md))",
    ] = True
    state_dir: Annotated[
        str,
        "folder in which the metrics page's history outlives the service; empty: "
        "`STATE_DIRECTORY` from systemd, else `run_dir` "
        "([dashboard.md](dashboard.md#what-the-numbers-are))",
    ] = ""
    trace_level: Annotated[
        tuple[Literal["OFF", "TIMESTAMPS", "TENSORS"], ...],
        "content of traces: `TIMESTAMPS`, `TENSORS`; clients may change `trace_level`, "
        "`trace_rate` and `trace_count` while the server runs "
        "([statistics.md](statistics.md#traces))",
    ] = ("OFF",)
    trace_rate: Annotated[
        NonNegative,
        "N: trace one of N requests; 0, with `trace_mode` `opentelemetry`: only requests "
        "whose client asks",
    ] = 1000
    trace_count: Annotated[
        Annotated[int, Meta(ge=-1)],
        "number of traces, after which tracing ends; -1: no limit",
    ] = -1
    trace_mode: Annotated[
        Literal["triton", "opentelemetry"],
        "`opentelemetry`: traces are spans that go to `otlp_endpoint`; needs the extra `otlp`"
        " ([statistics.md](statistics.md#opentelemetry))",
    ] = "triton"
    trace_file: Annotated[
        str,
        "file of traces in Triton's format; a start empties the file, and removes files "
        "`<trace_file>.<n>`. Without a file traces are lines of the log",
    ] = ""
    trace_log_frequency: Annotated[
        NonNegative, "number of traces in each file `<trace_file>.<n>`; 0: all in one file"
    ] = 0
    otlp_endpoint: Annotated[
        Url,
        "address of an OpenTelemetry collector that takes OTLP over HTTP; the server appends "
        "`/v1/traces` and `/v1/metrics`",
    ] = "http://127.0.0.1:4318"
    otlp_headers: Annotated[
        tuple[HeaderPair, ...],
        "header fields of each request to the collector, such as its key, as `name=value`; in"
        " the environment separated by `,`",
    ] = ()
    otlp_timeout_s: Annotated[Seconds, "time for one export, with all attempts"] = 10.0
    otlp_service_name: Annotated[str, "`service.name` of all exported spans and metrics"] = (
        "shmserve"
    )
    otlp_resource: Annotated[
        tuple[Pair, ...], "further attributes of the exported resource, as `name=value`"
    ] = ()
    otlp_metrics_interval_s: Annotated[
        SecondsOrNone,
        "time between two exports of the numbers of `/metrics` (extra `otlp`); 0: no export",
    ] = 0.0
