"""Settings for the bounds of requests: size, number and time."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from shmserve.settings.field_kinds import (
    KIB,
    MIB,
    Positive,
    ResourceAmount,
    Seconds,
    SecondsOrNone,
    Share,
)
from shmserve.settings.service_setup import MemorySettings


class LimitSettings(MemorySettings, frozen=True):
    """Limits on requests"""

    max_head_bytes: Annotated[Positive, "request line and header fields of an HTTP request"] = (
        64 * KIB
    )
    max_json_bytes: Annotated[Positive, "JSON part of a request, also after decompression"] = (
        64 * MIB
    )
    max_tensor_bytes: Annotated[Positive, "one tensor"] = 1024 * MIB
    max_request_bytes: Annotated[
        Positive,
        "a whole request, also after decompression; a gRPC message, request or answer, has at "
        "most 2 GiB - 1 as well",
    ] = 4096 * MIB
    max_heap_bytes: Annotated[
        Positive,
        "bodies of one HTTP worker outside shared memory: JSON, counted 16 times for what "
        "decoding takes, and bodies inflated or chunked before their size is known, counted "
        "twice; beyond it 503, or 413 where one request takes more. Also messages of one gRPC "
        "process: those of streams, compressed ones (their inflated size counts twice), and "
        "tensors without slots; beyond it UNAVAILABLE",
    ] = 2048 * MIB
    max_connections: Annotated[
        Positive,
        "connections of one HTTP worker or gRPC process; beyond it the connection that was idle "
        "the longest ends, if it was for a second, or else the new one is refused: over HTTP with "
        "503",
    ] = 16384
    http_threads: Annotated[
        Positive,
        "threads of one HTTP worker for what would hold up its connections: segments, large JSON, "
        "inflating; and as many for routes of extensions",
    ] = 32
    max_queue: Annotated[
        Positive,
        "requests waiting for or running on one instance, from one frontend process; beyond it "
        "503 at once",
    ] = 256
    max_model_requests: Annotated[
        Positive,
        "about how many requests for one model version from one frontend process run or wait; "
        "over gRPC also calls for a model, all versions together, those included that wait for "
        "their turn; beyond it 503 or UNAVAILABLE at once",
    ] = 384
    max_model_share: Annotated[
        Share,
        "the part of `grpc_threads` that requests for one model may have; further requests for it "
        "wait for one another, and no other model waits for them",
    ] = 0.5
    max_caller_share: Annotated[
        Share,
        "the part that one caller may have: of places for gRPC calls and of connections to the "
        "gRPC process (caller: a user over a Unix socket, an address, or an IPv6 network of 64 "
        "bits); of a model version's requests that run or wait, and of the pool (caller: a key, "
        "else as before): of the pool through each frontend process an equal part of that, or one "
        "request with all of it; 1: the pool is anybody's "
        "([security.md](security.md#how-much-one-caller-may-have))",
    ] = 0.75
    grpc_threads: Annotated[
        Positive,
        "inferences that run at a time in one gRPC process, and its threads for what would hold "
        "up its connections",
    ] = 96
    grpc_max_calls: Annotated[
        Positive,
        "inferences of one gRPC process that run, wait for their turn, or whose answers are on "
        "their way; beyond it RESOURCE_EXHAUSTED at once",
    ] = 512
    grpc_max_streams: Annotated[Positive, "open streams (ModelStreamInfer) of one gRPC process"] = (
        64
    )
    max_streams: Annotated[
        Positive,
        "open streams of one instance of a decoupled model; further ones wait in its queue",
    ] = 256
    stream_credit: Annotated[
        int,
        Meta(ge=1, le=1024),
        "answers a stream may be ahead of its reader; beyond it the model waits",
    ] = 16
    rate_limit: Annotated[
        Literal["off", "execution_count"],
        "`execution_count`: an instance executes when it holds what `rate_limiter` of its "
        "configuration asks for ([model_config.md](model_config.md#rate-limiter))",
    ] = "off"
    rate_limit_resources: Annotated[
        tuple[ResourceAmount, ...],
        "how much there is of the rate limiter's resources, each as `name:count` for every device "
        "or `name:count:device`, the device a number or `cpu`; of resources not listed as much as "
        "the largest count that an instance asks for",
    ] = ()


class DeadlineSettings(LimitSettings, frozen=True):
    """Deadlines"""

    head_timeout_s: Annotated[
        Seconds,
        "an HTTP head, from its first byte to its end; the message of a gRPC call without tensors "
        "or files",
    ] = 10.0
    idle_timeout_s: Annotated[Seconds, "a kept-alive HTTP connection between requests"] = 75.0
    body_timeout_s: Annotated[
        Seconds,
        "a body, or the message of a gRPC inference or load once its first byte has come; plus "
        "its received bytes divided by `min_bytes_per_s`. A client that stops sending is not "
        "waited for much longer than this",
    ] = 30.0
    send_timeout_s: Annotated[
        Seconds,
        "an answer, over gRPC also each one of a stream; plus its bytes divided by "
        "`min_bytes_per_s`: over HTTP those the client has taken, over gRPC all",
    ] = 30.0
    min_bytes_per_s: Annotated[Positive, "speed of the slowest client that is waited for"] = 1 * MIB
    request_timeout_s: Annotated[
        Seconds,
        "from admission to the model's answer; then 504. A stream has this time for each answer, "
        "and its reader for taking one",
    ] = 60.0
    stream_timeout_s: Annotated[SecondsOrNone, "a whole stream; 0: no limit"] = 0.0
    restart_wait_s: Annotated[
        SecondsOrNone,
        "how long a request of which nothing has run waits for a model whose only executor has "
        "died or is being replaced, within the request's own deadline; then 503. 0: such a "
        "request does not wait",
    ] = 5.0
    execute_timeout_s: Annotated[
        Seconds,
        "an executor busy longer with one request is killed and replaced; so is one with a stream "
        "in which nothing has moved for so long",
    ] = 120.0
    load_timeout_s: Annotated[
        Seconds, "loading a model for the first time; then the load has failed"
    ] = 300.0
    drain_timeout_s: Annotated[Seconds, "after SIGTERM: time to finish the accepted requests"] = (
        30.0
    )
    drain_idle_s: Annotated[
        Seconds,
        "after SIGTERM: how long kept-alive HTTP connections are left open for their next "
        "request, which is answered with `Connection: close`; should be longer than busy clients "
        "pause",
    ] = 2.0
    watchdog_s: Annotated[
        float,
        Meta(ge=1),
        "a process (HTTP worker, gRPC process, supervisor, coordinator) without a sign of life "
        "for so long is killed and replaced; each gives one four times within that; while it "
        "starts, three times as long",
    ] = 20.0
    grpc_keepalive_time_s: Annotated[
        Seconds, "a gRPC connection that is silent for so long is probed"
    ] = 7200.0
    grpc_keepalive_timeout_s: Annotated[
        Seconds, "a probed gRPC connection is closed if there is no answer within this"
    ] = 20.0
    grpc_keepalive_without_calls: Annotated[
        bool, "probe gRPC connections without calls, too, and let clients do so"
    ] = False
    grpc_min_ping_interval_s: Annotated[
        Seconds, "gRPC clients that probe more often without a call are cut off"
    ] = 300.0
    grpc_max_connection_age_s: Annotated[
        SecondsOrNone,
        "gRPC connections are asked to end after this (0: never), so that clients spread anew",
    ] = 0.0
