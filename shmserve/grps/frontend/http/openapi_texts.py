"""OpenAPI texts: the part of the OpenAPI document that describes the GRPS routes."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from shmserve.frontends.http.openapi import BINARY, Operation

_BASE = "/grps/v1"


class GrpsStatusDocument(Struct):
    """Result of a request; `code` is the HTTP status of a failure."""

    code: int = 0
    msg: str = ""
    status: Literal["UNKNOWN", "SUCCESS", "FAILURE"] = "UNKNOWN"


class GrpsTensors(Struct):
    """Tensors: each has a name, a dtype, a shape and its elements, as `flat_float32` and the
    like."""

    tensors: list[dict[str, Any]] = []


class GrpsDocument(Struct):
    """protobuf's JSON of grps.protos.v1.GrpsMessage: a model, and one kind of payload."""

    status: GrpsStatusDocument | UnsetType = UNSET
    model: str | UnsetType = UNSET
    str_data: str | UnsetType = UNSET
    bin_data: str | UnsetType = UNSET
    gtensors: GrpsTensors | UnsetType = UNSET
    ndarray: Any = UNSET
    gmap: dict[str, Any] | UnsetType = UNSET


def _message(summary: str, body: Any = None, **more: Any) -> Operation:
    return Operation(summary, body, GrpsDocument, GrpsDocument, **more)


_QUICK = {
    "health/live": "Liveness of the server",
    "health/ready": "Readiness: the service is online, and required models are loaded",
    "health/online": "Set the service online",
    "health/offline": "Set the service offline",
    "metadata/server": "Served models, as YAML in str_data",
}
OPERATIONS = {
    f"{method} {_BASE}/{path}": _message(summary)
    for path, summary in _QUICK.items()
    for method in ("GET", "POST")
} | {
    f"POST {_BASE}/infer/predict": _message(
        "A prediction",
        GrpsDocument,
        query=("model", "streaming", "return-ndarray"),
        other_media=(BINARY,),
    ),
    f"POST {_BASE}/metadata/model": _message("A model named in str_data, as YAML", GrpsDocument),
    f"GET {_BASE}/monitor/metrics": Operation(
        "The metrics page", error=GrpsDocument, media="text/html; charset=utf-8"
    ),
    f"GET {_BASE}/monitor/series": Operation(
        "A series of the metrics page", answer=list[Any], error=GrpsDocument, query=("name",)
    ),
}
