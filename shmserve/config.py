"""Settings: one frozen Struct, read once from a TOML file and the environment.

The file is named by `SHMSERVE_CONFIG`; every key ``a_b`` is also the environment
variable ``SHMSERVE_A_B``, which wins. A table is a prefix: ``[client_shm] mode``
is ``client_shm_mode``. Unknown keys are errors. Nothing else reads the environment.
Sizes (``…_bytes``) and times (``…_s``) may have units; docs/settings.md has every setting.

Extensions have settings of their own: the key ``x_a_b`` is `a_b` of the extension ``x``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from shmserve import extensions
from shmserve.errors import ConfigError
from shmserve.setting_sources import Declared, Sources

PREFIX = "SHMSERVE_"
CONFIG_VARIABLE = "SHMSERVE_CONFIG"
# A reload's own: which folder of the run directory its processes have (`run_dir`)
GENERATION_VARIABLE = "SHMSERVE_GENERATION"
GENERATION = re.compile(r"g[1-9][0-9]*")
COMMAND_VARIABLE = "SHMSERVE_COMMAND"  # what `shmserve serve` was called with, for a reload
_NOT_SETTINGS = {CONFIG_VARIABLE, GENERATION_VARIABLE, COMMAND_VARIABLE}

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Share = Annotated[float, Meta(gt=0, le=1)]
Origin = Annotated[str, Meta(pattern="^[a-z][a-z0-9+.-]*://[^/ ]+$")]  # https://host[:port]
HostRule = Annotated[
    str, Meta(pattern=r"^(cpu-cores=[0-9]{1,4}(-[0-9]{1,4})?|numa-node=[0-9]{1,3})$")
]
ResourceAmount = Annotated[str, Meta(pattern="^[^:]+:[1-9][0-9]{0,8}(:(cpu|[0-9]{1,4}))?$")]
Url = Annotated[str, Meta(pattern=r"^https?://[^/@?#\s]+(/[^@?#\s]*)?$")]  # without secrets
Pair = Annotated[str, Meta(pattern="^[^=]+=.*$")]  # name=value
HeaderPair = Annotated[str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+=[\x20-\x7e]*$")]  # RFC 9110
# A folder, NAME=FOLDER, or a store's address without secrets: those are for the environment
RepositoryPath = Annotated[
    str,
    Meta(
        pattern=r"^(?!([^/]*=)?[A-Za-z][A-Za-z0-9+.-]*://)|^(s3|gs|az|hf|https?)://[^/@?#\s]+(/[^?#\s]*)?$"
    ),
]
TcpAddress = Annotated[str, Meta(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^][:/]+):[1-9][0-9]{0,4}$")]
From = Literal["owner", "local", "anyone"]  # the server's user and root, any user of the host, all
KeysFrom = Literal["nobody", "remote", "local", "anyone"]  # these, and who is further away
MIB = 1 << 20


class ExtensionSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of an extension: a subclass, whose fields all have defaults, is what an extension of
    the group `extensions.SETTINGS` is. Its name there is what their names begin with.

    It is read in every process, the HTTP workers' parent among them, which must stay small: the
    module of such a class imports nothing beyond this one.

    `FLAGS`: names of boolean fields that clients may change while the service runs. What they are
    then is in the registry, which all processes see (`core.registry.Snapshot.flags`, by the
    setting's whole name), and is changed with the message `SetFlag`.
    """

    FLAGS: ClassVar[tuple[str, ...]] = ()


Own = TypeVar("Own", bound=ExtensionSettings)


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting with its default. Sizes are bytes, times are seconds."""

    # What is served
    model_repository: tuple[RepositoryPath, ...] = ("workers",)
    model_control: Literal["none", "explicit", "poll"] = "none"
    load_models: tuple[str, ...] = ()
    poll_interval_s: Seconds = 15.0  # model_control poll: how often the repository is looked at
    # Where what is fetched from s3://, gs://, az://, hf://, http(s):// is kept; default:
    # $CACHE_DIRECTORY, $XDG_CACHE_HOME/shmserve, ~/.cache/shmserve
    repository_cache_dir: str = ""
    repository_cache_bytes: Positive = 64 * 1024 * MIB  # of all services that share the folder
    repository_timeout_s: Seconds = 3600.0  # fetching one model
    repository_silence_s: Seconds = 30.0  # a transfer without a byte; listing a repository
    repository_transfers: Annotated[int, Meta(ge=1, le=64)] = 4  # files fetched at a time
    repository_http_headers: tuple[HeaderPair, ...] = ()  # of each request to http(s)://
    load_attempts: Positive = 3  # processes that may end while they load a model for the first time
    # Cores and memory of instances by name, see instance_group.host_policy; "cpu" and "gpu_0" hold
    # for those that name none. SHMSERVE_HOST_POLICIES: "cpu=cpu-cores=0-3;far=numa-node=1"
    host_policies: dict[str, Annotated[tuple[HostRule, ...], Meta(min_length=1)]] = {}
    max_override_bytes: NonNegative = 64 * MIB  # files sent along with a request to load a model
    max_override_files: NonNegative = 64
    # When the server is ready: "all" models that should be loaded are, "any" model is, or these are
    ready_requires: Annotated[tuple[str, ...], Meta(min_length=1)] = ("all",)
    server_name: str = "shmserve"
    # Models that run one after the other under one name. SHMSERVE_PIPELINES has them as
    # "name=model,model;other=model,model"
    pipelines: dict[str, Annotated[tuple[str, ...], Meta(min_length=1)]] = {}

    # Where it listens
    http_bind: tuple[str, ...] = ("127.0.0.1:8000",)
    http_workers: Positive = 2
    http_tls_cert: str = ""  # PEM files; both or none
    http_tls_key: str = ""
    http_tls_client_ca: str = ""  # clients must show a certificate of this authority
    grpc_bind: tuple[str, ...] = ("127.0.0.1:8001",)
    grpc_processes: NonNegative = 1  # 0: no gRPC
    grpc_server: Literal["http2", "grpcio"] = "http2"  # the engine below the rpcs
    grpc_socket_mode: Annotated[str, Meta(pattern="^[0-7]{3,4}$")] = "0600"  # of Unix sockets
    grpc_tls_cert: str = ""  # PEM files; both or none
    grpc_tls_key: str = ""
    grpc_tls_client_ca: str = ""  # clients must show a certificate of this authority
    grpc_compression: Literal["none", "deflate", "gzip"] = "none"  # of answers
    grpc_reflection: bool = True
    metrics_bind: tuple[TcpAddress, ...] = ()  # /metrics is there, and not on http_bind any more
    reload: Literal["workers", "handover"] = "workers"  # what `shmserve reload` replaces
    agent_bind: tuple[TcpAddress, ...] = ()  # load balancers are told there how much is free
    run_dir: str = ""  # default: $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/shmserve, /tmp/shmserve-<uid>

    # Memory
    pool_bytes: NonNegative = 0  # 0: half of what /dev/shm can hold
    arena_bytes: Annotated[int, Meta(ge=1 * MIB)] = 32 * MIB  # first segment of each process
    response_cache_bytes: NonNegative = 0  # answers each frontend process may keep; 0: none
    segment_idle_s: Seconds = 30.0  # an unused segment of its own is given back after this

    # Limits on requests
    max_head_bytes: Positive = 64 * 1024  # request line and header fields
    max_json_bytes: Positive = 64 * MIB  # JSON part of a request, also after decompression
    max_small_body_bytes: Positive = 64 * 1024  # of HTTP requests without tensors or files
    max_tensor_bytes: Positive = 1024 * MIB  # one tensor
    max_request_bytes: Positive = 4096 * MIB  # a whole request, also after decompression
    max_heap_bytes: Positive = 2048 * MIB  # bodies outside shared memory, per frontend
    max_elements: Positive = 1 << 40  # elements of one tensor
    max_json_nesting: Positive = 100  # depth of a JSON "data" array
    max_chunks: Positive = 65536  # chunks of a chunked body
    max_inputs: Positive = 256  # inputs, requested outputs or parameters of one request
    max_classes: Positive = 65536  # classes of one row that a classification may ask for
    max_fields: Positive = 1 << 20  # protobuf fields of one gRPC inference request
    max_connections: Positive = 16384  # per frontend
    http_threads: Positive = 32  # per HTTP worker, for what would hold up its connections
    max_queue: Positive = 256  # requests waiting for or running on one instance, per frontend
    max_model_requests: Positive = 384  # the same for a model version; gRPC calls for a model
    max_model_share: Share = 0.5  # of grpc_threads that one model may have; its others wait
    max_caller_share: Share = 0.75  # of places for requests and calls, and of the pool, for one
    grpc_threads: Positive = 96  # inferences that run at a time, per gRPC process
    grpc_max_calls: Positive = 512  # inferences that run, wait for a thread, or are being sent
    grpc_max_streams: Positive = 64  # streams of inferences, per gRPC process
    grpc_stream_requests: Positive = 16  # requests to decoupled models that run in one stream
    grpc_max_watchers: Positive = 64  # clients that watch health, per gRPC process
    grpc_max_message_bytes: Annotated[int, Meta(ge=1, le=(1 << 31) - 1)] = (1 << 31) - 1
    grpc_max_small_message_bytes: Positive = 4 * MIB  # to rpcs without tensors or files
    ensemble_threads: NonNegative = 64  # steps that run beside others, per frontend process
    max_streams: Positive = 256  # open streams of one instance of a decoupled model; others wait
    # Sequences that one instance of a model with sequence_batching knows; others may not begin
    max_sequences: Annotated[int, Meta(ge=1, le=2048)] = 1024
    stream_credit: Annotated[int, Meta(ge=1, le=1024)] = 16  # answers a stream may run ahead
    # At least this is an executor's oom_score_adj: if memory runs out, it goes before the others
    executor_oom_score_adj: Annotated[int, Meta(ge=0, le=1000)] = 500
    # Of execution_count, instances wait for what `rate_limiter` of their configurations asks for
    rate_limit: Literal["off", "execution_count"] = "off"
    rate_limit_resources: tuple[ResourceAmount, ...] = ()  # default: the largest count asked for
    max_model_calls: Positive = 256  # calls of one instance to other models that run at a time
    max_call_depth: Positive = 8  # models that call each other on behalf of one request

    # Deadlines
    head_timeout_s: Seconds = 10.0  # from the first byte of a head to its end
    idle_timeout_s: Seconds = 75.0  # a kept-alive connection between requests
    crowded_idle_s: Seconds = 1.0  # the same, where there is no room for another connection
    body_timeout_s: Seconds = 30.0  # a body, plus what has come over min_bytes_per_s
    send_timeout_s: Seconds = 30.0  # an answer, plus what was taken over min_bytes_per_s
    min_bytes_per_s: Positive = 1 * MIB
    request_timeout_s: Seconds = 60.0  # from admission to the answer; streams: to the next one
    stream_timeout_s: Annotated[float, Meta(ge=0)] = 0.0  # a whole stream; 0: no limit
    # A request of which nothing has run, for a model whose executors are being restarted; 0: not
    restart_wait_s: Annotated[float, Meta(ge=0)] = 5.0
    execute_timeout_s: Seconds = 120.0  # an executor busy with one request longer is killed
    load_timeout_s: Seconds = 300.0  # loading a model
    drain_timeout_s: Seconds = 30.0  # SIGTERM: finish what was accepted
    drain_idle_s: Seconds = 2.0  # meanwhile, a kept-alive connection for its next, last request
    # A process that gives no sign of life for so long is killed, and another takes its place
    watchdog_s: Annotated[float, Meta(ge=1)] = 20.0

    grpc_message_timeout_s: Seconds = 300.0  # receiving the message of a gRPC call
    grpc_silence_s: Seconds = 10.0  # the same, where other calls wait for its thread
    grpc_small_silence_s: Seconds = 0.25  # the same, of calls whose messages are small
    grpc_stream_idle_s: Seconds = 3600.0  # a stream of inferences without anything to do
    grpc_stream_silence_s: Seconds = 60.0  # the same, where others want its place
    grpc_keepalive_time_s: Seconds = 7200.0  # a silent connection is probed after this
    grpc_keepalive_timeout_s: Seconds = 20.0  # and closed if it does not answer within this
    grpc_keepalive_without_calls: bool = False  # probe those without calls, too; so may clients
    grpc_min_ping_interval_s: Seconds = 300.0  # of clients without calls; others are cut off
    grpc_max_connection_age_s: Annotated[float, Meta(ge=0)] = 0.0  # 0: as long as they like

    # Client shared memory
    client_shm_mode: Literal["map", "copy", "off"] = "map"  # a model may choose copy or off
    client_shm_isolation: Literal["owner", "shared"] = "owner"  # shared: one namespace for all
    client_shm_allow_remote: bool = False  # remote callers count as the server's own user
    client_shm_allowed_uids: tuple[NonNegative, ...] = ()  # may register what is not theirs
    client_shm_reap_dead_owners: bool = True  # where the registering process is known
    client_socket: str = ""  # where clients pass memory; default: client.sock in run_dir
    max_lanes: NonNegative = 64  # local programs' own channels to one instance; 0: none
    client_shm_max_regions: Positive = 1024  # per owner
    client_shm_max_region_bytes: Positive = 1 << 40  # one region
    client_shm_max_total_bytes: Positive = 1 << 42  # all regions of one owner

    # Who may do what: docs/security.md. Hosts without port; "*" is any host. Default: where all
    # addresses are loopback or Unix sockets, localhost's names, loopback addresses and the host's
    # own name; where others are bound (or fd://, whose address is not known), any.
    allowed_hosts: tuple[str, ...] = ()  # requests must name one of these in Host
    allowed_origins: tuple[Origin, ...] = ()  # pages elsewhere that may do what programs may
    state_changes_from: From = "anyone"  # load and unload by name, logs, traces, GRPS online
    model_files_from: From = "owner"  # load what comes with the request: it is code, run as us
    remote_binds: tuple[str, ...] = ()  # of http_bind, grpc_bind: behind these is a proxy
    keys_file: str = ""  # hashed keys and what their holders may do: `shmserve key new`
    keys_required_from: KeysFrom = "remote"  # with keys_file; health is for everybody
    max_keys: Positive = 1024  # in keys_file
    http_restricted_api: tuple[str, ...] = ()  # <category>[,<category>]:<header>=<value>
    grpc_restricted_protocol: tuple[str, ...] = ()
    # Header fields, and metadata, that become parameters of the request. (?-i)…: case counts
    http_header_forward_pattern: str = ""
    grpc_header_forward_pattern: str = ""

    # Logging and numbers
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # of all processes' lines: their timestamps, or objects of JSON
    log_format: Literal["default", "ISO8601", "json"] = "default"
    access_log: bool = False  # a line for each request over HTTP, and for each rpc
    model_log_lines_per_s: Positive = 1000  # of one executor; others are dropped and counted
    metrics: bool = True  # GET /metrics
    metrics_triton_names: bool = False  # also under the names that Triton's dashboards ask for
    dashboard: bool = True  # GET / shows people what happens, from a history that is kept for it
    state_dir: str = (
        ""  # where the history outlives the service; default: $STATE_DIRECTORY, run_dir
    )
    max_counted_models: Positive = 128  # model versions, and keys, a frontend counts apart
    trace_level: tuple[Literal["OFF", "TIMESTAMPS", "TENSORS"], ...] = ("OFF",)
    trace_rate: NonNegative = 1000  # one of so many requests is traced; 0: see docs
    trace_count: Annotated[int, Meta(ge=-1)] = -1  # so many traces; -1: no limit
    trace_mode: Literal["triton", "opentelemetry"] = "triton"
    trace_file: str = ""  # Triton's JSON; default: traces are lines of the log
    trace_log_frequency: NonNegative = 0  # traces of each file <trace_file>.<n>; 0: all in one
    max_trace_file_bytes: Positive = 256 * MIB  # one file; what does not fit is lost
    max_trace_files: Positive = 1000
    max_trace_tensor_bytes: NonNegative = 64 * 1024  # larger tensors are not in traces
    otlp_endpoint: Url = "http://127.0.0.1:4318"  # a collector that takes OTLP over HTTP
    otlp_headers: tuple[HeaderPair, ...] = ()  # of each request to it
    otlp_timeout_s: Seconds = 10.0  # one export
    otlp_service_name: str = "shmserve"
    otlp_resource: tuple[Pair, ...] = ()  # what else it is told of this server
    otlp_max_queue: Positive = 8192  # spans that wait for being exported; others are dropped
    otlp_max_batch: Positive = 512  # of one export
    otlp_delay_s: Seconds = 5.0  # a batch that is not full waits for so long
    otlp_metrics_interval_s: Annotated[float, Meta(ge=0)] = 0.0  # 0: /metrics is not exported
    max_metric_families: Positive = 64  # metrics of its own one instance of a model may have:
    max_metric_series: Positive = 512  # names, and names with labels; how many characters a name,
    max_metric_text: Positive = 256  # a label or its value may have
    max_events: NonNegative = 1000  # that each process keeps for `shmserve show events`; 0: none

    extensions: dict[str, Any] = {}  # not a key: what `extension` gives, by name

    def extension(self, name: str, kind: type[Own]) -> Own:
        """The settings of an extension, which are of this `kind`."""
        own = self.extensions.get(name)
        return own if isinstance(own, kind) else kind()

    @property
    def exports(self) -> bool:
        """Whether there is something for an OpenTelemetry collector."""
        return self.trace_mode == "opentelemetry" or self.otlp_metrics_interval_s > 0

    def flags(self) -> dict[str, bool]:
        """Flags of extensions by the names of their settings, as they are at the start."""
        return {
            f"{name}_{flag}": getattr(own, flag)
            for name, own in self.extensions.items()
            for flag in own.FLAGS
        }


_FORMER = {"grps_pipelines": "pipelines"}  # names that settings had once: they are still taken
_SEMICOLONS = {"http_restricted_api", "grpc_restricted_protocol"}  # their items have commas
SECRET = _SEMICOLONS | {"otlp_headers", "repository_http_headers"}  # values that are not shown


class Reading(NamedTuple):
    """Settings, and for those that were given, where."""

    settings: Settings
    origins: dict[str, str]


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings. Raises as `read`."""
    return read(environ).settings


def read(environ: Mapping[str, str] | None = None) -> Reading:
    """Read the settings, and remember where they are from.

    Raises:
        ConfigError: a file that cannot be read, unknown keys, values of the wrong type: all that
            is wrong, one to a line.
    """
    environ = os.environ if environ is None else environ
    extensions.check()
    known = declared()
    source = Sources(known, _FORMER)
    if path := environ.get(CONFIG_VARIABLE, ""):
        source.take_file(path, CONFIG_VARIABLE)
    source.take_variables(
        {name: text for name, text in environ.items() if name not in _NOT_SETTINGS}, PREFIX
    )
    values = source.converted()
    problems = source.problems
    if not problems:
        settings = Settings(
            **{key: values[key] for key in Settings.__struct_fields__ if key in values}
        )
        problems = _wrong_binds(settings) + _wrong_traces(settings)
    if problems:
        raise ConfigError("\n".join(problems))
    own = {
        name: kind(**{f: values.pop(f"{name}_{f}") for f in _given(name, kind, values)})
        for name, kind in extensions.load_all(extensions.SETTINGS).items()
    }
    origins = {name: given.origin for name, given in source.given.items()}
    return Reading(Settings(**values, extensions=own), origins)


def _given(name: str, kind: type[ExtensionSettings], values: Mapping[str, Any]) -> list[str]:
    return [field for field in kind.__struct_fields__ if f"{name}_{field}" in values]


def declared() -> dict[str, Declared]:
    """Every setting there is, those of extensions behind the server's own."""
    kinds: dict[str, type[Struct]] = {"": Settings}
    for name, kind in extensions.load_all(extensions.SETTINGS).items():
        kinds[f"{name}_"] = kind
    found = {}
    for prefix, kind in kinds.items():
        for field in msgspec.structs.fields(kind):
            name = prefix + field.name
            factory = field.default_factory
            default = field.default if factory is msgspec.NODEFAULT else factory()
            separator = ";" if name in _SEMICOLONS else ","
            found[name] = Declared(name, field.type, default, separator, name in SECRET)
    del found["extensions"]
    return found


def _wrong_binds(settings: Settings) -> list[str]:
    binds = settings.http_bind + settings.grpc_bind + settings.metrics_bind
    wrong = [
        f"remote_binds: '{bind}' is no address of http_bind, grpc_bind or metrics_bind"
        for bind in settings.remote_binds
        if bind not in binds or bind.startswith("fd://")
    ]
    wrong += _shared_ports("metrics_bind", settings.metrics_bind, "http_bind", settings.http_bind)
    for name in ("http_bind", "grpc_bind", "metrics_bind"):
        wrong += _shared_ports("agent_bind", settings.agent_bind, name, getattr(settings, name))
    if settings.metrics_bind and not settings.metrics:
        wrong.append("metrics_bind: there are no metrics (setting metrics)")
    return wrong


def _shared_ports(
    name: str, binds: tuple[str, ...], other: str, others: tuple[str, ...]
) -> list[str]:
    ports = {bind.rpartition(":")[2] for bind in others}
    return [
        f"{name}: '{bind}' has a port of {other}, and needs its own"
        for bind in binds
        if bind.rpartition(":")[2] in ports
    ]


def _wrong_traces(settings: Settings) -> list[str]:
    wrong = []
    tensors = "TENSORS" in settings.trace_level
    if "OFF" in settings.trace_level and len(set(settings.trace_level)) > 1:
        wrong.append("trace_level: OFF cannot be together with other levels")
    if settings.trace_log_frequency and not settings.trace_file:
        wrong.append("trace_log_frequency: there is no trace_file")
    if settings.trace_mode == "opentelemetry":
        if tensors:
            wrong.append("trace_level: TENSORS are not traced with trace_mode opentelemetry")
        if settings.trace_file:
            wrong.append("trace_file: trace_mode opentelemetry writes none")
    else:
        if tensors and not settings.trace_file:
            wrong.append("trace_level: TENSORS go to a trace_file, and there is none")
        if not settings.trace_rate:
            wrong.append("trace_rate: 0 is for trace_mode opentelemetry")
    if settings.otlp_max_batch > settings.otlp_max_queue:
        wrong.append("otlp_max_batch: is more than otlp_max_queue")
    return wrong


def state_dir(settings: Settings, environ: Mapping[str, str] | None = None) -> str:
    """Where files are that outlive the service: the setting, systemd's, or the run directory."""
    environ = os.environ if environ is None else environ
    if settings.state_dir:
        return os.path.abspath(settings.state_dir)
    if environ.get("STATE_DIRECTORY"):
        return environ["STATE_DIRECTORY"].split(":")[0]
    return base_dir(settings, environ)


def run_dir(settings: Settings, environ: Mapping[str, str] | None = None) -> str:
    """The run directory of this process's generation: `base_dir`, or after a reload in it."""
    environ = os.environ if environ is None else environ
    generation = environ.get(GENERATION_VARIABLE, "")
    base = base_dir(settings, environ)
    return os.path.join(base, generation) if generation else base


def base_dir(settings: Settings, environ: Mapping[str, str] | None = None) -> str:
    """The service's run directory: the setting, systemd's, the user's, or one below /tmp."""
    environ = os.environ if environ is None else environ
    if settings.run_dir:
        return os.path.abspath(settings.run_dir)
    if environ.get("RUNTIME_DIRECTORY"):
        return environ["RUNTIME_DIRECTORY"].split(":")[0]
    if environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(environ["XDG_RUNTIME_DIR"], "shmserve")
    return f"/tmp/shmserve-{os.getuid()}"
