"""GRPS metadata: the served models, as the YAML documents that GRPS clients know.

The files of a project are repeated verbatim. For other workers, the same keys are filled in from
the registry. Keys without a meaning here are null.
"""

from __future__ import annotations

from typing import Any

import yaml
from msgspec import UNSET

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.core.scheduling.ensemble_graph import PIPELINE
from shmserve.grps import settings as grps_settings
from shmserve.grps.protocol import model_parameters
from shmserve.grps.protocol.names import Names, versions_of
from shmserve.tensor.config_document import BatchingEntry


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
