"""What each setting does, for `docs/settings.md` (`shmserve settings --markdown`).

In Markdown; links are relative to docs/. Types, defaults and bounds come from the code.
"""

SECTIONS: dict[str, dict[str, str]] = {
    "What is served": {
        "model_repository": (
            "paths of model repositories; addresses: `s3://`, `gs://`, `az://`, `hf://`, "
            "`http(s)://` ([how](remote_models.md)); `NAME=PATH`: the folder of one model, with "
            "or without version folders, which is served under this name"
        ),
        "model_control": (
            "`none`: everything that is there at start; `explicit`: what `load_models` names, "
            "then what clients load and unload; `poll`: whatever is in the repository, looked at"
            " again and again"
        ),
        "load_models": "names, or `*`",
        "poll_interval_s": "how often the repository is looked at",
        "repository_cache_dir": (
            "where models from `s3://` and so on are kept; empty: `$CACHE_DIRECTORY`, "
            "`$XDG_CACHE_HOME/shmserve`, or `~/.cache/shmserve`. Services of one user on one host "
            "may share it"
        ),
        "repository_cache_bytes": "the most it may hold, of all who share it",
        "repository_timeout_s": "how long fetching one model may take",
        "repository_silence_s": (
            "a transfer is given up when nothing has come for so long, a listing when it is not "
            "there by then"
        ),
        "repository_transfers": "files that are fetched at a time, for one model",
        "repository_http_headers": (
            "header fields of each request to an `http(s)://` repository, such as "
            "`Authorization=Bearer …`; never shown"
        ),
        "load_attempts": (
            "processes that may end while they load a model for the first time; then it has failed"
        ),
        "host_policies": (
            "cores and memory of instances by name: "
            '`SHMSERVE_HOST_POLICIES="cpu=cpu-cores=0-3;far=numa-node=1"`, or a TOML table of '
            "lists ([how](compatibility.md#host-policies))"
        ),
        "max_override_bytes": "bytes of the files that come with a request to load a model",
        "max_override_files": "how many files come with a request to load a model",
        "ready_requires": (
            "when the server is ready: `all` models that should be loaded are, `any` model is, or "
            "names: these are"
        ),
        "server_name": "name in the server metadata (some Triton examples insist on `triton`)",
        "pipelines": (
            "models that run one after the other under one name: "
            '`SHMSERVE_PIPELINES="pipe=preprocess,classify"`, or a TOML table of lists (also as '
            "`grps_pipelines`) ([how](grps.md#pipelines)). Triton's ensembles need no setting"
        ),
    },
    "Where it listens": {
        "http_bind": (
            "addresses, also `unix:PATH`. One of these or of `grpc_bind` that is taken ends the "
            "start at once, before anything is launched, and the message says who has it"
        ),
        "http_workers": "HTTP worker processes",
        "http_tls_cert": (
            "PEM file: TLS on HTTP's TCP addresses, with `http_tls_key`; read again when it "
            "changes ([security.md](security.md#tls))"
        ),
        "http_tls_key": "PEM file, for `http_tls_cert`",
        "http_tls_client_ca": "PEM file: clients must show a certificate of this authority",
        "grpc_bind": "addresses, also `unix:PATH` (served by the first process only)",
        "grpc_processes": "gRPC processes; several share the addresses (SO_REUSEPORT); 0: no gRPC",
        "grpc_server": (
            "what serves the rpcs: `http2`, an HTTP/2 engine of our own (less CPU per call; "
            "large tensors go from socket to slot and back uncopied; knows callers over Unix "
            "sockets; checks `:authority`), or the `grpcio` library"
        ),
        "grpc_socket_mode": (
            "mode of gRPC's Unix sockets; with `grpcio` callers over one that is open to others "
            "cannot be told apart and have no regions"
        ),
        "grpc_tls_cert": (
            "PEM file: TLS on gRPC's TCP addresses, with `grpc_tls_key`; read again when it changes"
        ),
        "grpc_tls_key": "PEM file, for `grpc_tls_cert`",
        "grpc_tls_client_ca": "PEM file: clients must show a certificate of this authority",
        "grpc_compression": (
            "of answers: `none`, `deflate`, `gzip`; requests may be compressed anyway"
        ),
        "grpc_reflection": "server reflection, for tools like grpcurl",
        "reload": (
            "what `shmserve reload` replaces: HTTP `workers`, or all by a `handover` to a new "
            "generation, for which there must be memory as well "
            "([operations.md](operations.md#a-new-version-of-the-server))"
        ),
        "agent_bind": (
            "addresses of TCP, such as `10.0.0.5:8009`, where HAProxy's agent check is told how "
            "much of this host is free ([how](load_balancing.md#the-weight)): whoever connects is"
        ),
        "run_dir": (
            "sockets and registry, one service each; empty: `$RUNTIME_DIRECTORY`, "
            "`$XDG_RUNTIME_DIR/shmserve`, or `/tmp/shmserve-<uid>`"
        ),
    },
    "Memory": {
        "pool_bytes": (
            "all shared memory of the service; 0: half of `/dev/shm`. Beyond it requests get "
            "503. Below 1 MiB for each process it is not ready"
        ),
        "arena_bytes": "shared segment of each process; executors on the CPU begin with 1 MiB",
        "response_cache_bytes": (
            "answers of models with `response_cache` that each frontend process may keep, in its"
            " part of the pool, each counted with 1 KiB more; 0: none"
        ),
        "segment_idle_s": (
            "an unused segment of its own is given back after this; the gRPC process gives back "
            "unused heap as often"
        ),
    },
    "Limits on requests": {
        "max_head_bytes": "request line and header fields",
        "max_json_bytes": "JSON part of a request, after decompression",
        "max_small_body_bytes": (
            "body of an HTTP request that has neither tensors nor files: index, unload, regions, "
            "traces, logs"
        ),
        "max_tensor_bytes": "one tensor",
        "max_request_bytes": "a whole request, after decompression",
        "max_heap_bytes": (
            "what bodies of one HTTP worker may take outside shared memory: JSON, counted 16 "
            "times for what decoding takes, and those inflated or chunked before their size is "
            "known, twice; beyond it 503, or 413 where one request takes more. With `http2` also"
            " what messages of one gRPC process take: those of streams, compressed ones (what "
            "they inflate to twice), and tensors without slots; beyond it UNAVAILABLE"
        ),
        "max_elements": "elements of one tensor",
        "max_json_nesting": "depth of a JSON `data` array",
        "max_chunks": "chunks of a chunked body",
        "max_inputs": "inputs, requested outputs, or parameters of a request",
        "max_classes": "classes of one row of an output that a classification may ask for",
        "max_fields": (
            "protobuf fields of a gRPC inference request; each BYTES element outside "
            "`raw_input_contents` is one"
        ),
        "max_connections": (
            "connections of one HTTP worker, or of one gRPC process with `http2`; beyond it the "
            "longest idle one ends (`crowded_idle_s`), or the new one is refused: over HTTP with"
            " 503"
        ),
        "http_threads": (
            "threads of one HTTP worker for what would hold up its connections: segments, large "
            "JSON, inflating"
        ),
        "max_queue": "requests on one instance from one frontend process; beyond it 503 at once",
        "max_model_requests": (
            "about how many requests for one model version from one frontend process run or "
            "wait; with `http2` also those for a model, all versions together, those included "
            "that wait for a thread; beyond it 503 or UNAVAILABLE at once"
        ),
        "max_model_share": (
            "the part of `grpc_threads` that requests for one model may have, with `http2`; its "
            "further ones wait for one another, and no other model for them"
        ),
        "max_caller_share": (
            "the part that one caller may have: of the threads and places for gRPC calls, and "
            "with `http2` of the connections (a user over a Unix socket, an address, or an IPv6 "
            "network of 64 bits); of a model version's requests that run or wait, and of the pool "
            "(a key, else as before): of the pool through each frontend process an equal part of "
            "that, or one request with all of it; 1: the pool is anybody's "
            "([security.md](security.md#how-much-one-caller-may-have))"
        ),
        "grpc_threads": (
            "inferences that run at a time in one gRPC process, and with `http2` its threads for"
            " what would hold up the others"
        ),
        "grpc_max_calls": (
            "inferences of one gRPC process that run, wait for a thread, or whose answers are on"
            " their way; beyond it RESOURCE_EXHAUSTED at once"
        ),
        "grpc_max_streams": "open streams (ModelStreamInfer) of one gRPC process",
        "grpc_stream_requests": "requests to decoupled models that run at a time in one stream",
        "grpc_max_watchers": "clients of one gRPC process that watch health",
        "grpc_max_message_bytes": "one gRPC message, either way",
        "grpc_max_small_message_bytes": "the same, to rpcs that take neither tensors nor files",
        "ensemble_threads": (
            "steps of ensembles that run beside others of the same request, per frontend "
            "process; without a thread they run one after the other"
        ),
        "max_streams": "open streams of one instance of a decoupled model; more wait in its queue",
        "max_sequences": (
            "sequences that one instance knows, with a slot or waiting for one (at most 2048)"
        ),
        "stream_credit": "answers a stream may be ahead of its reader; beyond it the model waits",
        "executor_oom_score_adj": (
            "an executor's `oom_score_adj`, unless it has a higher one: if the host's memory "
            "runs out, executors are killed before what serves others"
        ),
        "rate_limit": (
            "`execution_count`: an instance executes when it holds what `rate_limiter` of its "
            "configuration asks for ([compatibility.md](compatibility.md#rate-limiter))"
        ),
        "rate_limit_resources": (
            "how much there is of its resources, each as `name:count` for every device or "
            "`name:count:device`, the device a number or `cpu`; of others as much as the largest"
            " count that an instance asks for"
        ),
        "max_model_calls": "calls of one instance to other models that run at a time",
        "max_call_depth": "models that call each other on behalf of one request",
    },
    "Deadlines": {
        "head_timeout_s": (
            "from the first byte of a head to its end; the message of a small gRPC call"
        ),
        "idle_timeout_s": "a kept-alive connection between requests",
        "crowded_idle_s": (
            "the same where there is no room (`max_connections`, descriptors) for another "
            "connection: the longest idle one ends"
        ),
        "body_timeout_s": (
            "a body; plus what has come of it over `min_bytes_per_s`. Nobody who stops sending "
            "is waited for much longer than this"
        ),
        "send_timeout_s": (
            "an answer, over gRPC also each of a stream; plus its size over `min_bytes_per_s`, "
            "over HTTP what has been taken of it"
        ),
        "min_bytes_per_s": "the slowest client that is waited for",
        "request_timeout_s": (
            "from admission to the model's answer; then 504. A stream has it for each answer, "
            "and its reader for taking one"
        ),
        "stream_timeout_s": "a whole stream; 0: no limit",
        "restart_wait_s": (
            "how long a request of which nothing has run waits for a model whose only executor has "
            "died or is being replaced, within its own deadline; then 503. 0: not"
        ),
        "execute_timeout_s": (
            "an executor busy longer with one request is killed and replaced; streams: in which "
            "nothing has moved for so long"
        ),
        "load_timeout_s": "loading a model for the first time; then it has failed",
        "drain_timeout_s": "SIGTERM: finish what was accepted",
        "drain_idle_s": (
            "meanwhile, how long kept-alive HTTP connections are left open for their next request, "
            "which is answered with `Connection: close`: longer than busy clients pause"
        ),
        "watchdog_s": (
            "a process (HTTP worker, gRPC process, supervisor, coordinator) that gives no sign "
            "of life for so long is killed and replaced; it gives one four times within that; "
            "while it starts, three times as long"
        ),
        "grpc_message_timeout_s": (
            "receiving the message of a gRPC inference or load, with `http2` without anything of"
            " it coming; once a message has begun it has a body's time (`body_timeout_s`), too. "
            "Small ones have `head_timeout_s`"
        ),
        "grpc_silence_s": (
            "the same where other calls want its place, or with `grpcio` its thread: of "
            "inferences and loads"
        ),
        "grpc_small_silence_s": "the same, of all other calls",
        "grpc_stream_idle_s": "a gRPC stream of inferences that has nothing to do ends after this",
        "grpc_stream_silence_s": "the same where another stream wants its place",
        "grpc_keepalive_time_s": "a gRPC connection that is silent for so long is probed",
        "grpc_keepalive_timeout_s": "and closed if there is no answer within this",
        "grpc_keepalive_without_calls": (
            "probe connections without calls, too, and let clients do so"
        ),
        "grpc_min_ping_interval_s": "clients that probe more often without a call are cut off",
        "grpc_max_connection_age_s": (
            "gRPC connections are asked to end after this (0: never), so that clients spread anew"
        ),
    },
    "Client shared memory": {
        "client_shm_mode": (
            "clients' shared memory: `map`, `copy` (immune to clients that truncate it) or "
            "`off`; a model's parameter `client_shm_mode` narrows it"
        ),
        "client_shm_isolation": "`shared`: one namespace of regions for all users",
        "client_shm_allow_remote": "remote callers count as the server's own user",
        "client_shm_allowed_uids": "users who may register objects that are not theirs",
        "client_shm_reap_dead_owners": (
            "drop regions with the process that registered them, where it is known"
        ),
        "client_socket": (
            "where local programs pass sealed memory; empty: `client.sock` in `run_dir`; a path "
            "set here is open to every user ([client.md](client.md))"
        ),
        "max_lanes": (
            "local programs' own channels to one instance ([client.md](client.md#lanes)), of "
            "which one user has `max_caller_share` at most; 0: none"
        ),
        "client_shm_max_regions": "regions of one user",
        "client_shm_max_region_bytes": "one region",
        "client_shm_max_total_bytes": "all regions of one user",
    },
    "Logging and numbers": {
        "log_level": (
            "debug, info, warning, error; clients may change it while the server runs (POST "
            "`/v2/logging`)"
        ),
        "model_log_lines_per_s": (
            "what a model in one executor prints and logs; lines beyond are dropped and counted."
            " Output of C code is not counted"
        ),
        "log_format": (
            "of all processes' lines: `ISO8601`: their timestamps; `json`: one object a line, what "
            "models print as well ([statistics.md](statistics.md#logs))"
        ),
        "access_log": "a line for each request over HTTP, and for each rpc",
        "metrics": "GET `/metrics` on the HTTP addresses, or `metrics_bind`",
        "metrics_bind": (
            "addresses of TCP, such as `127.0.0.1:8002`, that have `/metrics` and nothing else; "
            "`http_bind` has it no more. Not together with HTTP sockets that systemd passes"
        ),
        "trace_level": (
            "what is traced: `TIMESTAMPS`, `TENSORS`; clients may change it while the server runs, "
            "and the next two ([statistics.md](statistics.md#traces))"
        ),
        "trace_rate": (
            "one of so many requests is traced; 0, with `trace_mode` `opentelemetry`: those alone "
            "whose client says so"
        ),
        "trace_count": "so many are; -1: no limit",
        "trace_mode": (
            "`opentelemetry`: traces are spans that go to `otlp_endpoint`, which takes the extra "
            "`otlp` ([statistics.md](statistics.md#opentelemetry))"
        ),
        "otlp_endpoint": (
            "where an OpenTelemetry collector takes OTLP over HTTP; `/v1/traces` and `/v1/metrics` "
            "are added to it"
        ),
        "otlp_headers": (
            "`name=value`, of each request to the collector, such as its key; in the environment "
            "separated by `,`"
        ),
        "otlp_timeout_s": "one export, with what is tried again",
        "otlp_service_name": "`service.name` of all that is exported",
        "otlp_resource": "`name=value`, further attributes of the resource",
        "otlp_max_queue": "spans that wait for being exported; further ones are dropped",
        "otlp_max_batch": "spans of one export",
        "otlp_delay_s": "how long a batch that is not full waits for more",
        "otlp_metrics_interval_s": (
            "how often the numbers of `/metrics` are exported, too (extra `otlp`); 0: never"
        ),
        "trace_file": (
            "file of traces, as Triton writes it; emptied at the start, when files "
            "`<trace_file>.<n>` are removed. Without one traces are lines of the log"
        ),
        "trace_log_frequency": "traces of each file `<trace_file>.<n>`; 0: all in one",
        "max_trace_file_bytes": "one file of traces; what does not fit is lost",
        "max_trace_files": "files of traces; further ones are lost",
        "max_trace_tensor_bytes": "larger tensors are left out of traces",
        "max_metric_families": (
            "names of metrics that one instance of a Python model may have "
            "([python_models.md](python_models.md#metrics))"
        ),
        "max_metric_series": "the same of names with labels",
        "max_metric_text": "characters of such a name, a label or its value",
        "metrics_triton_names": (
            "`/metrics` also has the `nv_inference_*` names that dashboards for Triton ask for"
        ),
        "dashboard": (
            "the metrics page at `/` and the history it shows ([dashboard.md](dashboard.md))"
        ),
        "state_dir": (
            "where that history outlives the service; empty: `STATE_DIRECTORY` as systemd sets it, "
            "or `run_dir` ([dashboard.md](dashboard.md#what-the-numbers-are))"
        ),
        "max_counted_models": (
            "model versions, and keys, that one frontend process counts apart; further ones are "
            "counted as `(other)`"
        ),
        "max_events": (
            "events that each process keeps for `shmserve show events`, 256 bytes each, also "
            "those of the last 24 processes that have ended; 0: none "
            "([statistics.md](statistics.md#events))"
        ),
    },
    "Who may do what": {
        "allowed_hosts": (
            "hosts (without port; `*`: any) that requests may name in `Host`, and calls in "
            "`:authority` unless `grpc_server` is `grpcio`; empty: localhost's names where only "
            "loopback and Unix sockets are bound, else any ([security.md](security.md))"
        ),
        "allowed_origins": (
            "origins, such as `https://tool.example`, whose pages may do what programs may"
        ),
        "state_changes_from": (
            "`owner` (the server's user and root), `local` (any user of the host) or `anyone`: "
            "who may load and unload models by name, set logs and traces, take GRPS on- and "
            "offline"
        ),
        "model_files_from": (
            "the same: who may load a configuration or files that come with the request, which "
            "are code that runs as the server's user"
        ),
        "remote_binds": (
            "addresses of `http_bind`, `grpc_bind` and `metrics_bind` behind which a proxy is: "
            "whoever comes there is remote, also if the proxy adds no `Forwarded`, `Via` or "
            "`X-Forwarded-For`"
        ),
        "keys_file": (
            "TOML file of hashed keys and what each of them allows; `shmserve key new` adds to "
            "it ([security.md](security.md#keys))"
        ),
        "keys_required_from": (
            "with `keys_file`, who needs a key for all but health: `remote` callers, `local`: "
            "also other users of the host, `anyone`: also the server's user and root; `nobody`: "
            "keys only allow more"
        ),
        "max_keys": "keys in `keys_file`",
        "http_restricted_api": (
            "`<category>[,<category>]:<header>=<secret>`, in the environment separated by `;`: "
            "only requests with that header may use these APIs ([security.md](security.md))"
        ),
        "grpc_restricted_protocol": "the same for gRPC",
        "http_header_forward_pattern": (
            "regular expression: matching request headers become parameters of inference requests "
            "([compatibility.md](compatibility.md#restricted-apis-and-forwarded-headers))"
        ),
        "grpc_header_forward_pattern": "the same of metadata",
    },
    "GRPS": {
        "grps_online": "GRPS readiness before a client says online or offline",
        "grps_default_model": (
            "the model (name-version) of GRPS requests that name none; empty: the only model, or"
            " the only one with GRPS parameters"
        ),
    },
}
