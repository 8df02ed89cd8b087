"""Settings for the bounds of requests: size, number and time."""

from typing import Annotated, Literal

from msgspec import Meta

from shmserve.settings import kinds as kind
from shmserve.settings.service_setup import MemorySettings


class LimitSettings(MemorySettings, frozen=True):
    """Limits on requests"""

    max_head_bytes: Annotated[
        kind.Positive, "largest request line with header fields of an HTTP request"
    ] = 64 * kind.KIB
    max_json_bytes: Annotated[
        kind.Positive, "largest JSON part of a request, also after decompression"
    ] = 64 * kind.MIB
    max_tensor_bytes: Annotated[kind.Positive, "largest tensor"] = 1024 * kind.MIB
    max_request_bytes: Annotated[
        kind.Positive,
        "largest request, also after decompression. gRPC messages, requests and answers, also"
        " have at most 2 GiB - 1",
    ] = 4096 * kind.MIB
    max_heap_bytes: Annotated[
        kind.Positive,
        "memory outside the pool for bodies of one HTTP worker, and for messages of one gRPC "
        "process. JSON counts 16 times, because of the memory that decoding needs; inflated "
        "bodies, and chunked bodies of unknown size, count twice, forms three times. In gRPC the "
        "limit covers messages of streams, compressed messages by their inflated size, and "
        "tensors without slots. Beyond it 503 (413 if one request alone needs more), over gRPC "
        "UNAVAILABLE",
    ] = 2048 * kind.MIB
    max_connections: Annotated[
        kind.Positive,
        "connections of one HTTP worker or gRPC process. Beyond it the connection that was "
        "idle longest ends, if it was idle for a second; else the new connection is refused, "
        "over HTTP with 503",
    ] = 16384
    http_threads: Annotated[
        kind.Positive,
        "threads of one HTTP worker for work that would hold up its connections: segments, "
        "large JSON, inflating; and as many for routes of extensions",
    ] = 32
    max_queue: Annotated[
        kind.Positive,
        "requests from one frontend process that wait for or run on one instance; beyond it "
        "503 at once",
    ] = 256
    max_model_requests: Annotated[
        kind.Positive,
        "approximate number of requests from one frontend process that wait or run for one "
        "model version. Over gRPC the limit also holds for the calls for a model with all its"
        " versions, waiting calls included. Beyond it 503 or UNAVAILABLE at once",
    ] = 384
    max_model_share: Annotated[
        kind.Share,
        "share of `grpc_threads` for requests to one model; further requests wait for one "
        "another, not for other models",
    ] = 0.5
    max_caller_share: Annotated[
        kind.Share,
        "share of one caller. A caller is a user over a Unix socket, an address, or an IPv6 "
        "network of 64 bits. The share holds for places of gRPC calls, for connections of "
        "the gRPC process, and for sequences of an instance. It also holds for a model version's "
        "requests that run or wait, and for the pool; there the holder of a key is one caller, "
        "too. Each frontend process gives a caller an equal part of the pool's share, or one "
        "request all of the share. "
        "1: no limit ([security.md](security.md#how-much-one-caller-may-have))",
    ] = 0.75
    grpc_threads: Annotated[
        kind.Positive,
        "inferences that run at a time in one gRPC process, and threads of that process for "
        "work that would hold up its connections",
    ] = 96
    grpc_max_calls: Annotated[
        kind.Positive,
        "inferences of one gRPC process that run, wait for their turn, or send their answers;"
        " beyond it RESOURCE_EXHAUSTED at once",
    ] = 512
    grpc_max_streams: Annotated[
        kind.Positive, "open streams (ModelStreamInfer) of one gRPC process"
    ] = 64
    grpc_stream_requests: Annotated[
        kind.Positive,
        "requests of one stream (ModelStreamInfer) that run at a time, or whose answers wait for "
        "answers of earlier requests; further requests wait. While streams of the process run "
        "`grpc_threads` requests to models that are not decoupled, each stream runs one at a time",
    ] = 16
    max_streams: Annotated[
        kind.Positive,
        "open streams of one instance of a decoupled model; further streams wait in the "
        "instance's queue",
    ] = 256
    stream_credit: Annotated[
        Annotated[int, Meta(ge=1, le=1024)],
        "answers by which a stream may be ahead of its reader; then the model waits",
    ] = 16
    rate_limit: Annotated[
        Literal["off", "execution_count"],
        "`execution_count`: an instance executes only while it holds the resources that "
        "`rate_limiter` in its configuration names "
        "([model_config.md](model_config.md#rate-limiter))",
    ] = "off"
    rate_limit_resources: Annotated[
        tuple[kind.ResourceAmount, ...],
        "amounts of the rate limiter's resources: `name:count` on every device, or "
        "`name:count:device` with a number or `cpu` as device. The default amount is the "
        "largest count that an instance asks for",
    ] = ()


class DeadlineSettings(LimitSettings, frozen=True):
    """Deadlines"""

    head_timeout_s: Annotated[
        kind.Seconds,
        "time for an HTTP head, from its first byte to its end; also for the message of a "
        "gRPC call without tensors or files",
    ] = 10.0
    idle_timeout_s: Annotated[
        kind.Seconds, "time that a kept-alive HTTP connection may be idle between requests"
    ] = 75.0
    body_timeout_s: Annotated[
        kind.Seconds,
        "time for a body, or for the message of a gRPC inference or load from its first byte "
        "on, plus the received bytes divided by `min_bytes_per_s`. A client that stops "
        "sending has hardly more time than this",
    ] = 30.0
    send_timeout_s: Annotated[
        kind.Seconds,
        "time for sending an answer, over gRPC also for each answer of a stream, plus bytes "
        "divided by `min_bytes_per_s`: over HTTP the bytes that the client has taken, over "
        "gRPC all bytes",
    ] = 30.0
    min_bytes_per_s: Annotated[
        kind.Positive, "speed of the slowest client that the server waits for"
    ] = 1 * kind.MIB
    request_timeout_s: Annotated[
        kind.Seconds,
        "time from admission to the model's answer; then 504. A stream has this time for each"
        " answer, and its reader for taking an answer",
    ] = 60.0
    stream_timeout_s: Annotated[kind.SecondsOrNone, "time for a whole stream; 0: no limit"] = 0.0
    restart_wait_s: Annotated[
        kind.SecondsOrNone,
        "time that a request waits for a model whose only executor has died or is being "
        "replaced, within the request's own deadline; then 503. Only requests wait of which "
        "nothing has run. 0: requests do not wait",
    ] = 5.0
    execute_timeout_s: Annotated[
        kind.Seconds,
        "time after which an executor that still works on one request, or on a stream without"
        " progress, is killed and replaced",
    ] = 120.0
    load_timeout_s: Annotated[
        kind.Seconds, "time for loading a model for the first time; then the load has failed"
    ] = 300.0
    drain_timeout_s: Annotated[
        kind.Seconds, "time after SIGTERM to finish the accepted requests"
    ] = 30.0
    drain_idle_s: Annotated[
        kind.Seconds,
        "time after SIGTERM for which kept-alive HTTP connections stay open; the answer to "
        "their next request has `Connection: close`. Choose more than the pauses of busy "
        "clients",
    ] = 2.0
    watchdog_s: Annotated[
        Annotated[float, Meta(ge=1)],
        "silence after which an HTTP worker, gRPC process, supervisor or coordinator is "
        "killed and replaced; a starting process has three times as long, gunicorn's master "
        "`drain_timeout_s` longer. Each process gives four signs of life in this time",
    ] = 20.0
    grpc_keepalive_time_s: Annotated[
        kind.Seconds, "silence of a gRPC connection after which the server probes the connection"
    ] = 7200.0
    grpc_keepalive_timeout_s: Annotated[
        kind.Seconds, "time for the answer to a probe; then the gRPC connection is closed"
    ] = 20.0
    grpc_keepalive_without_calls: Annotated[
        bool, "true: also probe gRPC connections without calls, and let clients do so"
    ] = False
    grpc_min_ping_interval_s: Annotated[
        kind.Seconds,
        "shortest time between a gRPC client's probes without a call; clients that probe more"
        " often are cut off",
    ] = 300.0
    grpc_max_connection_age_s: Annotated[
        kind.SecondsOrNone,
        "age at which the server asks a gRPC client to connect anew, perhaps to another host;"
        " 0: never",
    ] = 0.0
