"""The configuration of a HAProxy before a cluster: a backend for each model, with empty slots.

Requests over HTTP name their model in the path; over gRPC clients name it in the metadatum
`x-model` as well, as the message itself is nothing that a balancer reads.
"""

from __future__ import annotations

from shmserve.cluster.cluster_file import ClusterFile
from shmserve.cluster.haproxy_slots import NODES, backend

_HEAD = """\
# Made by `shmserve cluster haproxy`. Servers are put into the slots while it runs.
global
    stats socket {socket} mode 600 level admin

defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    timeout queue 5s
    timeout http-request 10s
    # 503 of a service: nothing of the request has run. Without any answer, something may have
    retries 3
    option redispatch 1
    retry-on conn-failure 503
    balance leastconn

frontend http
    bind {http_bind}
    use_backend http_model_%[path,field(4,/)] if {{ path_beg /v2/models/ }}
    default_backend {http_nodes}

frontend grpc
    bind {grpc_bind} proto h2
    use_backend grpc_model_%[req.hdr(x-model)] if {{ req.hdr(x-model) -m found }}
    default_backend {grpc_nodes}
"""

_BACKEND = """
backend {name}
    option httpchk GET {path}
    http-check expect status 200
    server-template s 1-{slots} 127.0.0.1:1 check{check} inter {ms}ms fall 2 rise 1{proto} disabled
"""


def text(file: ClusterFile) -> str:
    """For the first of its `haproxy_sockets`."""
    settings = file.settings
    sockets = settings.haproxy_sockets or ("/run/haproxy/admin.sock",)
    parts = [
        _HEAD.format(
            socket=sockets[0] if "/" in sockets[0] else f"ipv4@{sockets[0]}",
            http_bind=settings.haproxy_http_bind,
            grpc_bind=settings.haproxy_grpc_bind,
            http_nodes=backend("http", NODES),
            grpc_nodes=backend("grpc", NODES),
        )
    ]
    for door, proto, check in (("http", "", ""), ("grpc", " proto h2", " check-proto h1")):
        for name in (NODES, *file.models):
            path = "/v2/health/live" if name == NODES else f"/v2/models/{name}/ready"
            parts.append(
                _BACKEND.format(
                    name=backend(door, name),
                    path=path,
                    slots=settings.haproxy_slots,
                    ms=round(settings.haproxy_check_s * 1000),
                    proto=proto,
                    check=check,
                )
            )
    return "".join(parts)
