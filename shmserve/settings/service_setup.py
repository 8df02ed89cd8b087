"""Settings for the models, addresses and memory of a service."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shmserve.settings.field_kinds import (
    MIB,
    FileMode,
    HeaderPair,
    HostRule,
    Names,
    NonNegative,
    Positive,
    RepositoryPath,
    Seconds,
    TcpAddress,
    about,
)


class ServingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What is served"""

    model_repository: Annotated[
        tuple[RepositoryPath, ...],
        about(
            "paths of model repositories; addresses: `s3://`, `gs://`, `az://`, `hf://`, "
            "`http(s)://` ([how](remote_models.md)); `NAME=PATH`: the folder of one model, with "
            "or without version folders, which is served under this name"
        ),
    ] = ("workers",)
    model_control: Annotated[
        Literal["none", "explicit", "poll"],
        about(
            "`none`: every model of the repository at the start; `explicit`: the models that "
            "`load_models` names, then what clients load and unload; `poll`: every model, and the"
            " repository is scanned for changes every `poll_interval_s`"
        ),
    ] = "none"
    load_models: Annotated[
        tuple[str, ...],
        about("names of models, or `*`, that `model_control` `explicit` loads at the start"),
    ] = ()
    poll_interval_s: Annotated[
        Seconds, about("time between two scans of the repository, with `model_control` `poll`")
    ] = 15.0
    repository_cache_dir: Annotated[
        str,
        about(
            "folder where models from `s3://` and so on are kept; empty: `$CACHE_DIRECTORY`, "
            "`$XDG_CACHE_HOME/shmserve`, or `~/.cache/shmserve`. Services of one user on one host"
            " may share the folder"
        ),
    ] = ""
    repository_cache_bytes: Annotated[
        Positive, about("size limit of the cache, for all services that share the folder")
    ] = 64 * 1024 * MIB
    repository_timeout_s: Annotated[Seconds, about("time limit for fetching one model")] = 3600.0
    repository_silence_s: Annotated[
        Seconds,
        about(
            "a transfer is given up after so long without a byte, and so is a listing that has "
            "not arrived by then"
        ),
    ] = 30.0
    repository_transfers: Annotated[
        Annotated[int, Meta(ge=1, le=64)], about("files of one model that are fetched at a time")
    ] = 4
    repository_http_headers: Annotated[
        tuple[HeaderPair, ...],
        about(
            "header fields of each request to an `http(s)://` repository, such as "
            "`Authorization=Bearer …`; never shown"
        ),
    ] = ()
    host_policies: Annotated[
        dict[str, Annotated[tuple[HostRule, ...], Meta(min_length=1)]],
        about(
            "cores and memory of instances, by the name in `instance_group.host_policy`; `cpu` "
            "and `gpu_0` hold for instances that name no policy: "
            '`SHMSERVE_HOST_POLICIES="cpu=cpu-cores=0-3;far=numa-node=1"`, or a TOML table of '
            "lists ([how](model_config.md#host-policies))"
        ),
    ] = {}
    max_override_bytes: Annotated[
        NonNegative, about("size of all files that come with one request to load a model")
    ] = 64 * MIB
    ready_requires: Annotated[
        Names,
        about(
            "when the server is ready: `all`: all models that should be loaded are; `any`: any "
            "model is; or names of models: these are"
        ),
    ] = ("all",)
    server_name: Annotated[
        str, about("name in the server metadata (some Triton examples insist on `triton`)")
    ] = "shmserve"
    pipelines: Annotated[
        dict[str, Names],
        about(
            "models that run one after the other under one name: "
            '`SHMSERVE_PIPELINES="pipe=preprocess,classify"`, or a TOML table of lists (also as '
            "`grps_pipelines`) ([how](grps.md#pipelines)). Triton's ensembles need no setting"
        ),
    ] = {}


class ListeningSettings(ServingSettings, frozen=True):
    """Where it listens"""

    http_bind: Annotated[
        tuple[str, ...],
        about(
            "addresses for HTTP, also `unix:PATH`. If one of these addresses or of `grpc_bind` is"
            " taken, the start ends at once, before anything is launched, and the message says "
            "which process has it"
        ),
    ] = ("127.0.0.1:8000",)
    http_workers: Annotated[Positive, about("HTTP worker processes")] = 2
    http_tls_cert: Annotated[
        str,
        about(
            "PEM file: TLS on HTTP's TCP addresses, with `http_tls_key`; read again when it "
            "changes ([keys.md](keys.md#tls))"
        ),
    ] = ""
    http_tls_key: Annotated[str, about("PEM file, for `http_tls_cert`")] = ""
    http_tls_client_ca: Annotated[
        str, about("PEM file: HTTP clients must show a certificate of this authority")
    ] = ""
    grpc_bind: Annotated[
        tuple[str, ...],
        about("addresses for gRPC, also `unix:PATH` (served by the first process only)"),
    ] = ("127.0.0.1:8001",)
    grpc_processes: Annotated[
        NonNegative, about("gRPC processes; several share the addresses (SO_REUSEPORT); 0: no gRPC")
    ] = 1
    grpc_socket_mode: Annotated[FileMode, about("mode of gRPC's Unix sockets")] = "0600"
    grpc_tls_cert: Annotated[
        str,
        about(
            "PEM file: TLS on gRPC's TCP addresses, with `grpc_tls_key`; read again when it changes"
        ),
    ] = ""
    grpc_tls_key: Annotated[str, about("PEM file, for `grpc_tls_cert`")] = ""
    grpc_tls_client_ca: Annotated[
        str, about("PEM file: gRPC clients must show a certificate of this authority")
    ] = ""
    grpc_compression: Annotated[
        Literal["none", "deflate", "gzip"],
        about("compression of gRPC's answers; requests may be compressed anyway"),
    ] = "none"
    grpc_reflection: Annotated[bool, about("server reflection, for tools like grpcurl")] = True
    metrics_bind: Annotated[
        tuple[TcpAddress, ...],
        about(
            "addresses of TCP, such as `127.0.0.1:8002`, that have `/metrics` and nothing else; "
            "`http_bind` then has no `/metrics`. Not together with HTTP sockets that systemd "
            "passes"
        ),
    ] = ()
    reload: Annotated[
        Literal["workers", "handover"],
        about(
            "what `shmserve reload` replaces: HTTP `workers`, or all processes by a `handover` to"
            " a new generation, for which there must be memory as well "
            "([reload.md](reload.md#a-new-version-of-the-server))"
        ),
    ] = "workers"
    agent_bind: Annotated[
        tuple[TcpAddress, ...],
        about(
            "addresses of TCP, such as `10.0.0.5:8009`, where HAProxy's agent check is told how "
            "much of this host is free ([how](load_balancing.md#the-weight)); so is everybody who"
            " connects there"
        ),
    ] = ()
    look_us: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=0, le=1000)],
        about(
            "longest time, in microseconds, for which a busy process polls before it sleeps, "
            "where the last wait was as short; 0: never; `auto`: 400, and 0 with fewer than two "
            "processors ([how](performance.md#polling-before-sleeping))"
        ),
    ] = "auto"
    run_dir: Annotated[
        str,
        about(
            "folder of sockets and registry, one for each service; empty: `$RUNTIME_DIRECTORY`, "
            "`$XDG_RUNTIME_DIR/shmserve`, or `/tmp/shmserve-<uid>`"
        ),
    ] = ""


class MemorySettings(ListeningSettings, frozen=True):
    """Memory"""

    pool_bytes: Annotated[
        NonNegative,
        about(
            "all shared memory of the service; 0: half of `/dev/shm`. Requests beyond it get 503."
            " With less than 1 MiB for each process the service is not ready"
        ),
    ] = 0
    arena_bytes: Annotated[
        Annotated[int, Meta(ge=1 * MIB)],
        about("first shared segment of each process; executors on the CPU begin with 1 MiB"),
    ] = 32 * MIB
    response_cache_bytes: Annotated[
        NonNegative,
        about(
            "answers of models with `response_cache` that each frontend process may keep, in its "
            "part of the pool, each counted with 1 KiB more; 0: no cache"
        ),
    ] = 0
    segment_idle_s: Annotated[
        Seconds,
        about(
            "a process gives back an extra segment that was unused for so long; the gRPC process "
            "gives back unused heap as often"
        ),
    ] = 30.0
