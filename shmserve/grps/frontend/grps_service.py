"""GRPS service without a transport: health, online flag, metadata, prediction.

Metadata are YAML documents that GRPS clients know. The files of a project are repeated verbatim.
For other workers, the same keys are filled in from the registry. Keys without a meaning here are
null.
"""

from functools import partial
from typing import Any

import yaml
from msgspec import UNSET

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.core.scheduling.ensemble_graph import PIPELINE
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import InvalidArgument, NotFound, ShmserveError, Unavailable
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.grps import settings as grps_settings
from shmserve.grps.frontend import payloads
from shmserve.grps.frontend.exchange import Exchange, GrpsSource
from shmserve.grps.frontend.payloads import Body, Payload
from shmserve.grps.protocol import model_parameters
from shmserve.grps.protocol.custom_http import RequestHead
from shmserve.grps.protocol.grps_message import GrpsMessage, success
from shmserve.grps.protocol.names import Names, versions_of
from shmserve.grps.settings import ONLINE
from shmserve.tensor.config_document import BatchingEntry

OK = GrpsMessage(success())
_SHOWN = 128  # limit of characters of a client's value that a message repeats


class ModelNames:
    """The models of a process by all names that clients may use."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._default = grps_settings.of(settings).default_model
        self._names: Names | None = None

    def names(self) -> Names:
        """Return the current names, computed once per change of the registry."""
        snapshot = self._dispatcher.snapshot()
        names = self._names
        if names is None or names.snapshot is not snapshot:
            names = self._names = Names(snapshot)
        return names

    def ready(self, name: str) -> ModelEntry:
        """Return the model of this name, or the default model for an empty name. Raise NotFound if
        there is no such model. Raise InvalidArgument if the name is empty, and there is no default
        model. Raise Unavailable if the model is not ready."""
        if not name:
            return self._default_model()
        match = self.names().find(name)
        if match is None:
            shown = name[:_SHOWN]
            self.names().snapshot.require_complete(f"Model '{shown}'")
            raise NotFound(f"Model '{shown}' not found. ModelNames are named name-version.")
        return self._dispatcher.ready_model(*match)

    def _default_model(self) -> ModelEntry:
        if self._default:
            match = self.names().find(self._default)
            return self._dispatcher.ready_model(*(match or (self._default,)))
        names = self.names()
        if not names.default:
            names.snapshot.require_complete("the default model")
            raise InvalidArgument(
                "the request names no model, and the server has no default model"
                f" ({len(names.snapshot.models)} models, setting grps_default_model)"
            )
        return self._dispatcher.ready_model(names.default)


class Grps:
    """The GRPS service of a process. Methods return answers, or raise errors that the transport
    turns into answers."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self.models = ModelNames(dispatcher, settings)

    def set_online(self, online: bool) -> GrpsMessage:
        """Set whether load balancers should send requests here: one flag for all processes."""
        self._dispatcher.set_flag(ONLINE, online)
        return OK

    def ready(self) -> GrpsMessage:
        """Check that the server is online and every required model is loaded. Raise Unavailable if
        the server is not ready."""
        try:
            snapshot = self._dispatcher.snapshot()
        except ShmserveError:
            raise Unavailable("Service Unavailable") from None
        if not (snapshot.flags.get(ONLINE) and snapshot.ready):
            raise Unavailable("Service Unavailable")
        return OK

    def server_metadata(self) -> GrpsMessage:
        """Return a YAML document of the served models."""
        text = server_document(self._dispatcher.snapshot(), self._settings)
        return GrpsMessage(success(), str_data=text)

    def model_metadata(self, message: GrpsMessage) -> GrpsMessage:
        """Return a YAML document of the model that `str_data` of the message names. Raise
        InvalidArgument if the message names no model. Raise NotFound if there is no such model."""
        name = message.str_data
        if name is None:
            raise InvalidArgument("No model name.")
        if not name:
            raise InvalidArgument("The model name is empty.")
        text = model_document(self.models.names(), name)
        if text is None:
            raise NotFound("Model not found.")
        return GrpsMessage(success(), str_data=text)

    def begin(self, payload: Payload, entry: ModelEntry, options: RunOptions) -> Exchange:
        """Begin an exchange for a payload, which is checked and copied when the exchange runs."""
        body = payload.body.remaining if payload.body is not None else None
        fill = partial(payloads.fill, payload, self._settings)
        source = GrpsSource(body or len(payload.wire or b""), options, fill)
        kind = "bin_data" if payload.body is not None else payload.message.which
        return Exchange(self._dispatcher, entry, source, kind)

    def begin_http(
        self, entry: ModelEntry, head: RequestHead, body: Body, options: RunOptions
    ) -> Exchange:
        """Begin an exchange for a raw HTTP request, for a model that takes such requests."""
        source = GrpsSource(body.remaining or 0, options, partial(payloads.fill_http, head, body))
        return Exchange(self._dispatcher, entry, source)


def server_document(snapshot: Snapshot, settings: Settings) -> str:
    """Return the document about the server: models, dag, interface. If a project is the only served
    worker, its files are returned verbatim."""
    published = [e for versions in snapshot.models.values() for e in versions.values()]
    entries = [entry for entry in published if entry.spec.platform != PIPELINE]
    if len(entries) == 1:
        parameters = entries[0].spec.parameters
        if model_parameters.INFERENCE in parameters:
            interface = parameters.get(model_parameters.SERVER) or dump(_server(settings))
            return f"{parameters[model_parameters.INFERENCE]}\n{interface}"
    models = [model for entry in entries for model in _models(entry, snapshot)]
    return dump({"models": models, "dag": _dag(models, settings), **_server(settings)})


def model_document(names: Names, name: str) -> str | None:
    """Return the document about a model, named by bare name or name-version. Return None for an
    unknown name. If several versions have the bare name, the newest ready version is described, or
    the newest if no version is ready."""
    snapshot = names.snapshot
    match = names.find(name)
    if match is not None:
        entries = [snapshot.models[match[0]][match[1]]]
    elif (newest := snapshot.newest(name)) is not None:
        entries = [newest]
    else:
        entries = [e for versions in snapshot.models.values() for e in versions.values()]
    models = [model for entry in entries for model in _models(entry, snapshot)]
    for model in models:
        if name in (model.get("name"), f"{model.get('name')}-{model.get('version')}"):
            return dump(model, sort=True)
    return dump(models[0], sort=True) if match is not None else None


def _models(entry: ModelEntry, snapshot: Snapshot) -> list[dict[str, Any]]:
    text = entry.spec.parameters.get(model_parameters.INFERENCE)
    if entry.spec.platform == PIPELINE:
        return [_pipeline(entry, snapshot)]
    if text is None:
        return [_model(entry, snapshot)]
    document = yaml.safe_load(text)  # valid: the project could not be served otherwise
    return [{**_EMPTY, **model} for model in document["models"]]


_PART_KEYS = ("type", "name", "path", "args")
_PARTS = [f"{part}_{key}" for part in ("inferer", "converter") for key in _PART_KEYS]
_EMPTY: dict[str, Any] = dict.fromkeys(
    ("name", "version", "device", "inp_device", *_PARTS, "batching")
)


def _model(entry: ModelEntry, snapshot: Snapshot) -> dict[str, Any]:
    spec = entry.spec
    entered = spec.config.dynamic_batching
    batching = {
        "type": "none" if entered is UNSET or entered == BatchingEntry() else "dynamic",
        "max_batch_size": spec.max_batch_size or 1,
        "batch_timeout_us": 0 if entered is UNSET else entered.max_queue_delay_microseconds or 0,
    }
    kinds = [group.kind for group in spec.config.groups]
    return {
        **_EMPTY,
        "name": spec.name,
        "version": versions_of(entry, snapshot)[0],
        "device": "cuda" if "KIND_GPU" in kinds else "cpu",
        "inferer_type": "torch" if spec.backend == "pytorch" else "customized",
        "inferer_name": spec.backend or spec.platform,
        "converter_type": "none",
        "batching": batching,
    }


def _pipeline(entry: ModelEntry, snapshot: Snapshot) -> dict[str, Any]:
    """Return a pipeline's steps, in the form that GRPS uses for its own dags."""
    nodes = [
        {"name": f"node-{number}", "type": "model", "model": step.model}
        for number, step in enumerate(entry.spec.steps, 1)
    ]
    version = versions_of(entry, snapshot)[0]
    return {"name": entry.spec.name, "version": version, "type": "sequential", "nodes": nodes}


def _dag(models: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """Return a chain of one model, the default model."""
    named = {f"{model['name']}-{model['version']}": model for model in models}
    default = grps_settings.of(settings).default_model
    if default not in named:
        default = next((n for n, m in named.items() if m["name"] == default), "")
    if not default and len(named) == 1:
        default = next(iter(named))
    nodes = [{"name": "node-1", "type": "model", "model": default}] if default else []
    return {"type": "sequential", "name": "default", "nodes": nodes}


def _server(settings: Settings) -> dict[str, Any]:
    http = next((b for b in settings.http_bind if not b.startswith("unix:")), "")
    rpc = next((b for b in settings.grpc_bind if not b.startswith("unix:")), "")
    with_rpc = bool(rpc and settings.grpc_processes)
    ports = [address.rpartition(":")[2] for address in (http, rpc if with_rpc else "") if address]
    return {
        "interface": {
            "framework": "http+grpc" if with_rpc else "http",
            "host": http.rpartition(":")[0] or None,
            "port": ",".join(ports),
        },
        "max_connections": settings.max_connections,
        "max_concurrency": settings.max_queue,
        "gpu": None,
        "log": None,
    }


def dump(document: Any, sort: bool = False) -> str:
    """Return a document as YAML, in the form of all answers."""
    text: str = yaml.safe_dump(document, sort_keys=sort, allow_unicode=True)
    return text
