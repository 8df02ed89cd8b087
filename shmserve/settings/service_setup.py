"""Settings for the models, addresses and memory of a service."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shmserve.settings import kinds as kind


class ServingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What is served"""

    model_repository: Annotated[
        tuple[kind.RepositoryPath, ...],
        "folders of models; addresses of stores: `s3://`, `gs://`, `az://`, `hf://`, "
        "`http(s)://` ([how](remote_models.md)); or `NAME=PATH`: the folder of one model, "
        "with or without version folders, or [one Python file](one_file.md), served as NAME",
    ] = ("workers",)
    model_control: Annotated[
        Literal["none", "explicit", "poll"],
        "`none`: load every model of the repository at the start; `explicit`: load the models"
        " of `load_models`, then load and unload on clients' requests; `poll`: load every "
        "model, and look for changes every `poll_interval_s`",
    ] = "none"
    load_models: Annotated[
        tuple[str, ...],
        "models to load at the start with `model_control` `explicit`; `*`: all models",
    ] = ()
    poll_interval_s: Annotated[
        kind.Seconds, "time between two scans of the repository, with `model_control` `poll`"
    ] = 15.0
    repository_cache_dir: Annotated[
        str,
        "folder that keeps models of stores such as `s3://`, and unpacked "
        "[packs](model_config.md#packages-of-a-models-own); empty: `$CACHE_DIRECTORY`, "
        "`$XDG_CACHE_HOME/shmserve`, or `~/.cache/shmserve`. Services of one user on one host"
        " may share the folder",
    ] = ""
    repository_cache_bytes: Annotated[
        kind.Positive, "size limit of the cache, for all services that share the folder"
    ] = 64 * 1024 * kind.MIB
    repository_timeout_s: Annotated[kind.Seconds, "time limit for fetching one model"] = 3600.0
    repository_silence_s: Annotated[
        kind.Seconds,
        "longest silence of a transfer, and longest time for listing a repository",
    ] = 30.0
    repository_transfers: Annotated[
        Annotated[int, Meta(ge=1, le=64)], "files of one model to fetch at a time"
    ] = 4
    repository_http_headers: Annotated[
        tuple[kind.HeaderPair, ...],
        "header fields of each request to an `http(s)://` repository, such as "
        "`Authorization=Bearer …`; `shmserve settings` never shows them, and no redirect takes "
        "them to another origin",
    ] = ()
    host_policies: Annotated[
        dict[str, Annotated[tuple[kind.HostRule, ...], Meta(min_length=1)]],
        "rules for cores and memory, by the name in `instance_group.host_policy`; instances "
        "without a policy use `cpu` or `gpu_0` and so on, if these exist: "
        '`SHMSERVE_HOST_POLICIES="cpu=cpu-cores=0-3;far=numa-node=1"`, or a TOML table of '
        "lists ([how](model_config.md#host-policies))",
    ] = {}
    max_override_bytes: Annotated[
        kind.NonNegative,
        "largest total size of the files that come with one request to load a model",
    ] = 64 * kind.MIB
    allow_model_code: Annotated[
        bool,
        "true: load model files that run code of their own where other formats hold data: "
        "pickles (joblib, `.bin`), native code (AOTInductor packages), Python beside the weights "
        "(`trust_remote_code`) ([which](security.md#models-that-bring-code)). A `model.py` needs "
        "no permission",
    ] = False
    ready_requires: Annotated[
        kind.Names,
        "models that must serve before the server is ready: `all` models that should be "
        "loaded, `any` model, or a list of names",
    ] = ("all",)
    server_name: Annotated[
        str, "name in the server metadata (some Triton examples insist on `triton`)"
    ] = "shmserve"
    pipelines: Annotated[
        dict[str, kind.Names],
        "chains of models, each with a name of its own: "
        '`SHMSERVE_PIPELINES="pipe=preprocess,classify"`, or a TOML table of lists (also as '
        "`grps_pipelines`) ([how](grps.md#pipelines)). Triton's ensembles need no setting",
    ] = {}


class ListeningSettings(ServingSettings, frozen=True):
    """Where it listens"""

    http_bind: Annotated[
        tuple[str, ...],
        "addresses for HTTP, also `unix:PATH`. If another process has an address of "
        "`http_bind` or `grpc_bind`, the server does not start, and names that process",
    ] = ("127.0.0.1:8000",)
    http_workers: Annotated[kind.Positive, "number of HTTP worker processes"] = 2
    http_tls_cert: Annotated[
        str,
        "PEM file with the certificate for HTTP's TCP addresses; needs `http_tls_key`. The "
        "server reads changed files again ([keys.md](keys.md#tls))",
    ] = ""
    http_tls_key: Annotated[str, "PEM file with the key of `http_tls_cert`"] = ""
    http_tls_client_ca: Annotated[
        str, "PEM file of an authority: HTTP clients must show one of its certificates"
    ] = ""
    grpc_bind: Annotated[
        tuple[str, ...],
        "addresses for gRPC, also `unix:PATH`. Only the first gRPC process serves Unix sockets",
    ] = ("127.0.0.1:8001",)
    grpc_processes: Annotated[
        kind.NonNegative,
        "number of gRPC processes, which share the addresses (SO_REUSEPORT); 0: no gRPC",
    ] = 1
    grpc_socket_mode: Annotated[kind.FileMode, "mode of gRPC's Unix sockets"] = "0600"
    grpc_tls_cert: Annotated[
        str,
        "PEM file with the certificate for gRPC's TCP addresses; needs `grpc_tls_key`. The "
        "server reads changed files again",
    ] = ""
    grpc_tls_key: Annotated[str, "PEM file with the key of `grpc_tls_cert`"] = ""
    grpc_tls_client_ca: Annotated[
        str, "PEM file of an authority: gRPC clients must show one of its certificates"
    ] = ""
    grpc_compression: Annotated[
        Literal["none", "deflate", "gzip"],
        "compression of gRPC's answers; clients may compress requests with any setting",
    ] = "none"
    grpc_reflection: Annotated[bool, "server reflection, for tools like grpcurl"] = True
    metrics_bind: Annotated[
        tuple[kind.TcpAddress, ...],
        "TCP addresses, such as `127.0.0.1:8002`, for `/metrics` alone; `http_bind` then has "
        "no `/metrics`. Not allowed together with HTTP sockets that systemd passes",
    ] = ()
    metrics_tls: Annotated[
        bool, "false: no TLS on `metrics_bind`, also if HTTP's other addresses have TLS"
    ] = True
    metrics_keys: Annotated[
        bool,
        "false: `metrics_bind` asks for no key, and hides the names of keys from callers without "
        "a key ([how](monitoring.md#prometheus))",
    ] = True
    reload: Annotated[
        Literal["workers", "handover"],
        "processes that `shmserve reload` replaces: the HTTP `workers`, or all of them by a "
        "`handover` to a new generation, which needs memory for two generations "
        "([reload.md](reload.md#a-new-version-of-the-server))",
    ] = "workers"
    agent_bind: Annotated[
        tuple[kind.TcpAddress, ...],
        "TCP addresses, such as `10.0.0.5:8009`, for HAProxy's agent check: whoever connects "
        "reads how much of this host is free ([how](load_balancing.md#the-weight))",
    ] = ()
    look_us: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=0, le=1000)],
        "longest time, in microseconds, for which a busy process polls before it sleeps; 0: "
        "never; `auto`: 400, or 0 with fewer than two processors "
        "([how](performance.md#polling-before-sleeping))",
    ] = "auto"
    run_dir: Annotated[
        str,
        "folder of the service's sockets and registry; each service needs its own. Empty: "
        "`$RUNTIME_DIRECTORY`, `$XDG_RUNTIME_DIR/shmserve`, or `/tmp/shmserve-<uid>`",
    ] = ""


class MemorySettings(ListeningSettings, frozen=True):
    """Memory"""

    pool_bytes: Annotated[
        kind.NonNegative,
        "limit of all shared memory of the service; 0: half of `/dev/shm`. Requests that need"
        " more get 503. With less than 1 MiB per process the service is not ready",
    ] = 0
    arena_bytes: Annotated[
        Annotated[int, Meta(ge=1 * kind.MIB)],
        "size of the first shared segment of each process; executors on the CPU begin with 1 MiB",
    ] = 32 * kind.MIB
    response_cache_bytes: Annotated[
        kind.NonNegative,
        "limit of each frontend process for kept answers of models with `response_cache`; "
        "each answer counts 1 KiB more than its size. The memory is part of the pool. 0: no "
        "cache",
    ] = 0
    segment_idle_s: Annotated[
        kind.Seconds,
        "idle time after which a process gives back an extra segment; gRPC processes also "
        "give back unused heap this often",
    ] = 30.0
