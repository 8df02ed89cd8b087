"""HAProxy configuration for a cluster: a backend for each model, with empty slots.

HTTP requests name the model in the path. gRPC clients also name the model in the metadatum
`x-model`, because a balancer cannot read gRPC messages.
"""

from shmserve.cluster.cluster_file import ClusterFile
from shmserve.cluster.haproxy_slots import NODES, backend

_HEAD = """\
# Made by `shmserve cluster haproxy`. Servers are put into the slots while it runs.
# What is decided here, and why: docs/load_balancing.md.
global
    log /dev/log local0
    user haproxy
    group haproxy
    # For whom Ray runs as, in this group. An address and port has no such guard.
    stats socket {socket} level admin
    # What a request may have to be sent again after a 503
    tune.bufsize 65536

defaults
    mode http
    timeout connect 1s
    timeout check 1s
    timeout client 75s
    timeout server 75s
    timeout queue 5s
    timeout http-request 30s
    retries 3
    option redispatch 1
    balance leastconn
"""

# Requests pass HAProxy twice, as in deploy/haproxy: if a host breaks off, clients get 502
_DOOR = """
frontend {door}
    bind {bind}{proto}
    {client}
    default_backend {door}_alone

backend {door}_alone
    http-reuse never
    {alone}
    server alone abns@shmserve-{door}-{port}{proto} send-proxy-v2

frontend {door}_alone
    bind abns@shmserve-{door}-{port} accept-proxy{proto}
    {within}
    {rules}
    default_backend {nodes}
"""

_DOWN = "on-marked-down shutdown-sessions disabled"
_BACKEND = """
backend {name}
    {retry}
    option httpchk
    http-check connect{check}
    http-check send meth GET uri {path} ver HTTP/1.1 hdr Host localhost
    http-check expect error-status L7OKC status 200
    server-template s 1-{slots} 127.0.0.1:1 check inter {ms}ms fall 2 rise 1{proto} {down}
"""

# After a 503 of a service, no part of the request has run. Without an answer, some part may have
_HTTP = {
    "door": "http",
    "proto": "",
    "check": "",
    "client": "option forwardfor",
    "within": "log global",
    "alone": "option http-server-close",
    "rules": "use_backend http_model_%[path,field(4,/)] if { path_beg /v2/models/ }\n"
    "    use_backend http_model_%[path,field(3,/)] if { path_beg /models/ }",
    "retry": "option http-buffer-request\n    retry-on conn-failure 503",
}
# gRPC statuses come in trailers, and streams may be silent for long. HAProxy 2.6 obeys a template's
# `check-proto` for the first server only, so `http-check` names the protocol of checks.
_GRPC = {
    "door": "grpc",
    "proto": " proto h2",
    "check": " proto h1",
    "client": "timeout client 1h",
    "within": "timeout client 1h",
    "alone": "timeout server 1h",
    "rules": "use_backend grpc_model_%[req.hdr(x-model)] if { req.hdr(x-model) -m found }",
    "retry": "timeout server 1h\n    retry-on conn-failure",
}


def text(file: ClusterFile) -> str:
    """Return the configuration of the HAProxy at the first of `haproxy_sockets`."""
    settings = file.settings
    place = (settings.haproxy_sockets or ("/run/haproxy/admin.sock",))[0]
    parts = [_HEAD.format(socket=f"{place} group haproxy mode 660" if "/" in place else place)]
    for words, bind in ((_HTTP, settings.haproxy_http_bind), (_GRPC, settings.haproxy_grpc_bind)):
        door, port = words["door"], bind.rpartition(":")[2]
        parts.append(_DOOR.format(**words, bind=bind, port=port, nodes=backend(door, NODES)))
        parts += [
            _BACKEND.format(
                **words,
                down=_DOWN,
                name=backend(door, name),
                path="/v2/health/live" if name == NODES else f"/v2/models/{name}/ready",
                slots=settings.haproxy_slots,
                ms=round(settings.haproxy_check_s * 1000),
            )
            for name in (NODES, *file.models)
        ]
    return "".join(parts)
