"""Settings of earlier releases, still recognised until release 0.4.

A retired setting may stay in a file if it states the present behaviour: the server only warns. Any
other value is refused, because the server cannot do what the setting asks for.
"""

from typing import Any, NamedTuple

import msgspec

from shmserve.settings import kinds
from shmserve.settings.kinds import KIB, MIB


class Retired(NamedTuple):
    """A setting of an earlier release. `value`: the value that describes the present behaviour.
    `reason`: why the setting was removed, and what to do; "": the value is fixed. `since`: first
    release without the setting."""

    value: Any
    reason: str = ""
    since: str = "0.2"

    def holds(self, name: str, given: Any) -> bool:
        """Return True if the value `given` for setting `name` describes the present behaviour."""
        if isinstance(given, str):
            given = kinds.without_unit(name, given)
        try:
            return bool(msgspec.convert(given, type(self.value), strict=False) == self.value)
        except msgspec.ValidationError:
            return False

    def advice(self, name: str) -> str:
        """Return why the setting was removed, and what to do."""
        shown = self.shown(name)
        fixed = f"it is always {shown}, as no service needed another value; delete the setting"
        return self.reason or fixed

    def shown(self, name: str) -> str:
        """Return the value that holds now, with its unit if the value is a size or a time."""
        return kinds.shown(name, self.value) + ("s" if kinds.is_time(name) else "")

    def explanation(self, name: str) -> str:
        """Return a sentence: since when the setting is gone, why, and what to do."""
        return f"since {self.since} {self.advice(name)}"


FORMER = {"grps_pipelines": "pipelines"}  # former names of settings, still accepted
RETIRED = {
    "grpc_server": Retired(
        "http2", "gRPC has one engine, the one that was called http2; delete the setting"
    ),
    # Repositories
    "load_attempts": Retired(3),
    "max_override_files": Retired(64),
    # Sizes and numbers of one request
    "max_chunks": Retired(65536),
    "max_classes": Retired(65536),
    "max_elements": Retired(1 << 40),
    "max_fields": Retired(1 << 20),
    "max_inputs": Retired(256),
    "max_json_nesting": Retired(100),
    "max_small_body_bytes": Retired(64 * KIB),
    "grpc_max_small_message_bytes": Retired(4 * MIB),
    "grpc_max_message_bytes": Retired(
        (1 << 31) - 1, "max_request_bytes bounds gRPC's messages; set that, delete this"
    ),
    # Calls, sequences, steps
    "ensemble_threads": Retired(64),
    "grpc_max_watchers": Retired(64),
    "max_call_depth": Retired(8),
    "max_model_calls": Retired(256),
    "max_sequences": Retired(1024),
    # Silent clients
    "crowded_idle_s": Retired(1.0),
    "grpc_message_timeout_s": Retired(300.0),
    "grpc_silence_s": Retired(10.0),
    "grpc_small_silence_s": Retired(0.25),
    "grpc_stream_idle_s": Retired(3600.0),
    "grpc_stream_silence_s": Retired(60.0),
    # Client memory, executors, keys
    "client_shm_max_region_bytes": Retired(1 << 40),
    "executor_oom_score_adj": Retired(500),
    "max_keys": Retired(1024),
    # Logs, numbers, traces
    "max_counted_models": Retired(128),
    "max_events": Retired(1000),
    "max_metric_families": Retired(64),
    "max_metric_series": Retired(512),
    "max_metric_text": Retired(256),
    "max_trace_file_bytes": Retired(256 * MIB),
    "max_trace_files": Retired(1000),
    "max_trace_tensor_bytes": Retired(64 * KIB),
    "model_log_lines_per_s": Retired(1000),
    "otlp_delay_s": Retired(
        5.0,
        "the environment variable OTEL_BSP_SCHEDULE_DELAY says how many milliseconds spans wait for"
        " a full batch, 5000 if unset; set the variable, delete the setting",
    ),
    "otlp_max_batch": Retired(
        512,
        "the environment variable OTEL_BSP_MAX_EXPORT_BATCH_SIZE says how many spans go out"
        " together, 512 if unset; set the variable, delete the setting",
    ),
    "otlp_max_queue": Retired(
        8192,
        "the environment variable OTEL_BSP_MAX_QUEUE_SIZE says how many spans may wait, 8192 if"
        " unset; set the variable, delete the setting",
    ),
}
