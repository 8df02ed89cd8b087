"""GET /openapi.json, and the descriptions of the server's own routes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from falcon import Request, Response
from msgspec import UNSET, Struct, UnsetType, field

import shmserve
from shmserve.config import Settings
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http import openapi
from shmserve.frontends.http.openapi import Operation
from shmserve.frontends.http.route_table import Get, Routes
from shmserve.frontends.http.routes.inference import json_routes
from shmserve.frontends.http.routes.regions import ClientSocketPlace
from shmserve.frontends.oip.metadata import ModelMetadata, ServerMetadata
from shmserve.frontends.oip.repository import IndexRow
from shmserve.frontends.oip.shared_memory import CudaStatus, RegionStatus
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.oip.answer import InferAnswer
from shmserve.protocol.oip.json_calls import SCHEMA_PARAMETER, takes_json
from shmserve.protocol.oip.json_request import InputParameters, JsonOutput
from shmserve.tensor.spec import ModelSpec
from shmserve.waiting import beside

Anything = dict[str, Any]


class Live(Struct):
    """The answering process is alive."""

    live: Literal[True]


class Ready(Struct):
    """The server or the model is ready; otherwise the answer is a 503. `name`: the model, if asked
    for."""

    ready: Literal[True]
    name: str | UnsetType = UNSET


class InputDocument(Struct):
    """An input: elements in `data`, nested or flat, or the place of the bytes in `parameters`."""

    name: str
    shape: list[int]
    datatype: str
    parameters: InputParameters | UnsetType = UNSET
    data: list[Any] | UnsetType = UNSET


class InferDocument(Struct):
    """JSON part of an inference request. Without `outputs` the answer has all outputs."""

    inputs: list[InputDocument]
    outputs: list[JsonOutput] | UnsetType = UNSET
    id: str = ""
    parameters: dict[str, Parameter] = field(default_factory=dict)


class Duration(Struct):
    """Number of events, and total time of the events in nanoseconds."""

    count: int
    ns: int


class InferStatistics(Struct):
    """Outcomes of requests, and the time of successful requests by stage."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class ModelStatistics(Struct):
    """Statistics of one version of a model; docs/statistics.md explains the fields."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    response_stats: dict[str, dict[str, Duration]]
    batch_stats: list[Anything]
    memory_usage: list[Anything]


class StatisticsDocument(Struct):
    """Statistics of the ready versions that the request asks for."""

    model_stats: list[ModelStatistics]


class TraceDocument(Struct):
    """Trace settings: all in an answer, the ones to change in a request. In a request, null
    restores the server's value for a model, and the initial value for the server."""

    trace_level: list[str] | str | UnsetType | None = UNSET
    trace_rate: str | UnsetType | None = UNSET
    trace_count: str | UnsetType | None = UNSET
    log_frequency: str | UnsetType | None = UNSET
    trace_file: str | UnsetType = UNSET
    trace_mode: Literal["triton", "opentelemetry"] | UnsetType = UNSET


class LogDocument(Struct):
    """Log settings: all in an answer, the ones to change in a request."""

    log_file: str | UnsetType = UNSET
    log_info: bool | UnsetType = UNSET
    log_warning: bool | UnsetType = UNSET
    log_error: bool | UnsetType = UNSET
    log_verbose_level: int | UnsetType = UNSET
    log_format: str | UnsetType = UNSET


class SystemRegionDocument(Struct):
    """A part of a POSIX shared-memory object that the caller's user owns."""

    key: str
    byte_size: int
    offset: int = 0


class RawHandle(Struct):
    """A cudaIpcMemHandle_t in base64."""

    b64: str


class CudaRegionDocument(Struct):
    """Memory of a GPU."""

    raw_handle: RawHandle
    device_id: int
    byte_size: int


class Index(Struct):
    """Selection of models: all models, or only ready ones."""

    ready: bool = False


class LoadParameters(Struct):
    """`config`: the configuration as JSON. Files are further parameters,
    `file:<version>/<path>`."""

    config: str | UnsetType = UNSET


class Load(Struct):
    """Configuration and files to use in place of the repository's."""

    parameters: LoadParameters | UnsetType = UNSET


class UnloadParameters(Struct):
    """`unload_dependents`: whether to unload models that were loaded for this ensemble alone,
    too."""

    unload_dependents: bool = False


class Unload(Struct):
    """Options of unloading."""

    parameters: UnloadParameters | UnsetType = UNSET


class GenerateParameters(Struct):
    """Inputs and parameters of a generate request, by name: in `parameters`, or as further
    keys."""

    id: str = ""
    parameters: Anything = field(default_factory=dict)


_MODEL = "/v2/models/{name}"
_HTML = "text/html; charset=utf-8"
_INFER = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}]}
_GENERATE = {"INPUT0": [1, 2]}
_REGIONS = {
    "system": (list[RegionStatus], SystemRegionDocument, {"key": "/my_region", "byte_size": 4096}),
    "cuda": (list[CudaStatus], CudaRegionDocument, None),
}
OPERATIONS: dict[str, Operation] = {
    "GET /openapi.json": Operation("This document", answer=Anything),
    "GET /v2": Operation("Name, version and extensions of the server", answer=ServerMetadata),
    "GET /v2/health/live": Operation("Liveness of the server", answer=Live),
    "GET /v2/health/ready": Operation("Readiness of the server", answer=Ready),
    f"GET {_MODEL}": Operation("Inputs and outputs of a model", answer=ModelMetadata),
    f"GET {_MODEL}/ready": Operation("Readiness of a model", answer=Ready),
    f"GET {_MODEL}/config": Operation("A model's configuration", answer=Anything),
    f"GET {_MODEL}/stats": Operation("Statistics of a model", answer=StatisticsDocument),
    f"POST {_MODEL}/infer": Operation(
        "Inference", InferDocument, InferAnswer, tensors=True, example=_INFER
    ),
    f"POST {_MODEL}/generate": Operation(
        "Inference with one flat object in and one out",
        GenerateParameters,
        Anything,
        example=_GENERATE,
    ),
    f"POST {_MODEL}/generate_stream": Operation(
        "Inference with one flat object in and any number of objects out",
        GenerateParameters,
        media="text/event-stream",
        example=_GENERATE,
    ),
    f"POST {json_routes.PATH}": Operation(
        "A model's function: plain values in, as JSON or a form, plain values out",
        Anything,
        Anything,
        other_media=(openapi.FORM,),
    ),
    "GET /v2/models/stats": Operation("Statistics of all models", answer=StatisticsDocument),
    "GET /v2/trace/setting": Operation("Trace settings", answer=TraceDocument),
    "POST /v2/trace/setting": Operation(
        "Change trace settings", TraceDocument, TraceDocument, required=False
    ),
    f"GET {_MODEL}/trace/setting": Operation("Trace settings of a model", answer=TraceDocument),
    f"POST {_MODEL}/trace/setting": Operation(
        "Change trace settings of a model", TraceDocument, TraceDocument, required=False
    ),
    "GET /v2/logging": Operation("Log settings", answer=LogDocument),
    "POST /v2/logging": Operation("Change log settings", LogDocument, LogDocument, required=False),
    "POST /v2/repository/index": Operation(
        "All versions of all models, and their states", Index, list[IndexRow], required=False
    ),
    "POST /v2/repository/models/{name}/load": Operation(
        "Load a model, for the first time or anew; answers when the model serves",
        Load,
        required=False,
    ),
    "POST /v2/repository/models/{name}/unload": Operation("Unload a model", Unload, required=False),
    "GET /shmserve/client-socket": Operation(
        "Where programs on the server's host pass memory", answer=ClientSocketPlace
    ),
    "GET /metrics": Operation("Metrics in Prometheus' text format", media="text/plain"),
    "GET /": Operation("The metrics page", media=_HTML),
    "GET /monitor/api": Operation("A page that shows this document", media=_HTML),
    "GET /monitor/assets/{name}": Operation("A file of the pages", media="*/*"),
    "GET /monitor/data": Operation(
        "Numbers of the metrics page", answer=Anything, query=("level", "since", "life")
    ),
}
for _kind, (_status, _region, _example) in _REGIONS.items():
    for _which in ("", "/region/{name}"):
        _path = f"/v2/{_kind}sharedmemory{_which}"
        OPERATIONS |= {
            f"GET {_path}/status": Operation(f"The caller's {_kind} regions", answer=_status),
            f"POST {_path}/register": Operation(
                f"Register a {_kind} region", _region, example=_example
            ),
            f"POST {_path}/unregister": Operation(f"Remove {_kind} regions of the caller's"),
        }


def add_routes(routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
    """Add the document, made at the first request, when all routes have been added, and again after
    a change of the models that take plain values."""
    routes.describe(OPERATIONS)
    made: list[dict[str, Any]] = []  # the document without models
    known: dict[Any, bytes] = {}  # the document of the latest models

    def make(specs: list[ModelSpec]) -> bytes:
        if not made:
            table = routes.table()
            made.append(openapi.document(table, settings.server_name, shmserve.__version__))
        return msgspec.json.encode(openapi.with_models(made[0], specs))

    def answer(req: Request, resp: Response) -> None:
        entries = dispatcher.snapshot().ready_entries.items()
        specs = [e.spec for (_, version), e in entries if not version and takes_json(e.spec)]
        key = tuple(
            (spec.name, spec.decoupled, spec.parameters[SCHEMA_PARAMETER]) for spec in specs
        )
        if key not in known:
            known.clear()
            known[key] = beside(make, specs)
        resp.data = known[key]

    routes.add("metadata", "/openapi.json", Get(answer))
