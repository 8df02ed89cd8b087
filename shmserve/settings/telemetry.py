"""Settings of logs, numbers and traces."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shmserve.settings.caller_rights import AccessSettings
from shmserve.settings.field_kinds import HeaderPair, NonNegative, Pair, Seconds, SecondsOrNone, Url


class TelemetrySettings(AccessSettings, frozen=True):
    """Logging and numbers"""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        "lowest level of lines in the log; clients may change it while the server runs (POST "
        "`/v2/logging`)",
    ] = "info"
    log_format: Annotated[
        Literal["default", "ISO8601", "json"],
        "form of all processes' lines: `ISO8601`: of their timestamps; `json`: one object a line, "
        "what models print as well ([statistics.md](statistics.md#logs))",
    ] = "default"
    access_log: Annotated[bool, "a line for each request over HTTP, and for each rpc"] = False
    metrics: Annotated[bool, "GET `/metrics` on the HTTP addresses, or `metrics_bind`"] = True
    metrics_triton_names: Annotated[
        bool, "`/metrics` also has the `nv_inference_*` names that dashboards for Triton ask for"
    ] = False
    dashboard: Annotated[
        bool, "the metrics page at `/` and the history it shows ([dashboard.md](dashboard.md))"
    ] = True
    state_dir: Annotated[
        str,
        "where the history of the metrics page outlives the service; empty: `STATE_DIRECTORY` as "
        "systemd sets it, or `run_dir` ([dashboard.md](dashboard.md#what-the-numbers-are))",
    ] = ""
    trace_level: Annotated[
        tuple[Literal["OFF", "TIMESTAMPS", "TENSORS"], ...],
        "what is traced: `TIMESTAMPS`, `TENSORS`; clients may change `trace_level`, `trace_rate` "
        "and `trace_count` while the server runs ([statistics.md](statistics.md#traces))",
    ] = ("OFF",)
    trace_rate: Annotated[
        NonNegative,
        "one of so many requests is traced; 0, with `trace_mode` `opentelemetry`: only requests "
        "whose client says so",
    ] = 1000
    trace_count: Annotated[
        int, Meta(ge=-1), "number of traces, after which tracing ends; -1: no limit"
    ] = -1
    trace_mode: Annotated[
        Literal["triton", "opentelemetry"],
        "`opentelemetry`: traces are spans that go to `otlp_endpoint`, which takes the extra "
        "`otlp` ([statistics.md](statistics.md#opentelemetry))",
    ] = "triton"
    trace_file: Annotated[
        str,
        "file of traces, as Triton writes it; emptied at the start, when files `<trace_file>.<n>` "
        "are removed. Without a file traces are lines of the log",
    ] = ""
    trace_log_frequency: Annotated[
        NonNegative, "traces of each file `<trace_file>.<n>`; 0: all in one file"
    ] = 0
    otlp_endpoint: Annotated[
        Url,
        "where an OpenTelemetry collector takes OTLP over HTTP; `/v1/traces` and `/v1/metrics` "
        "are added to it",
    ] = "http://127.0.0.1:4318"
    otlp_headers: Annotated[
        tuple[HeaderPair, ...],
        "`name=value`, of each request to the collector, such as its key; in the environment "
        "separated by `,`",
    ] = ()
    otlp_timeout_s: Annotated[Seconds, "one export, repeated tries included"] = 10.0
    otlp_service_name: Annotated[str, "`service.name` of all that is exported"] = "shmserve"
    otlp_resource: Annotated[
        tuple[Pair, ...], "`name=value`, further attributes of the resource"
    ] = ()
    otlp_metrics_interval_s: Annotated[
        SecondsOrNone,
        "how often the numbers of `/metrics` are exported, too (extra `otlp`); 0: never",
    ] = 0.0
