"""GRPS metadata: what is served, as the YAML documents that GRPS clients know.

A project's own files are told as they are. For other workers the same keys are filled in
from the registry; what has no meaning here is null.
"""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.grps.protocol import model_parameters as grps_spec
from shmserve.grps.protocol.names import Names, versions_of


def server_document(snapshot: Snapshot, settings: Settings) -> str:
    """The document about the server: models, dag, interface.

    Where one project is all that is served, its files verbatim.
    """
    entries = [e for versions in snapshot.models.values() for e in versions.values()]
    if len(entries) == 1:
        parameters = entries[0].spec.parameters
        if grps_spec.INFERENCE in parameters:
            interface = parameters.get(grps_spec.SERVER) or _dump(_server(settings))
            return f"{parameters[grps_spec.INFERENCE]}\n{interface}"
    models = [model for entry in entries for model in _models(entry, snapshot)]
    return _dump({"models": models, "dag": _dag(models, settings), **_server(settings)})


def model_document(names: Names, name: str) -> str | None:
    """The document about one model, called by its bare name or name-version; None: unknown.

    Of several versions with one bare name the newest that is there.
    """
    snapshot = names.snapshot
    found = names.find(name)
    if found is not None:
        entries = [snapshot.models[found[0]][found[1]]]
    elif (newest := snapshot.newest(name)) is not None:
        entries = [newest]
    else:
        entries = [e for versions in snapshot.models.values() for e in versions.values()]
    models = [model for entry in entries for model in _models(entry, snapshot)]
    for model in models:
        if name in (model.get("name"), f"{model.get('name')}-{model.get('version')}"):
            return _dump(model, sort=True)
    return _dump(models[0], sort=True) if found is not None else None


def _models(entry: ModelEntry, snapshot: Snapshot) -> list[dict[str, Any]]:
    text = entry.spec.parameters.get(grps_spec.INFERENCE)
    if text is None:
        return [_model(entry, snapshot)]
    document = yaml.safe_load(text)  # it was read before: the project could not be served else
    return [{**_EMPTY, **model} for model in document["models"]]


_EMPTY: dict[str, Any] = {
    "name": None,
    "version": None,
    "device": None,
    "inp_device": None,
    "inferer_type": None,
    "inferer_name": None,
    "inferer_path": None,
    "inferer_args": None,
    "converter_type": None,
    "converter_name": None,
    "converter_path": None,
    "converter_args": None,
    "batching": None,
}


def _model(entry: ModelEntry, snapshot: Snapshot) -> dict[str, Any]:
    spec = entry.spec
    config = msgspec.json.decode(spec.config_json)
    delay = int((config.get("dynamic_batching") or {}).get("max_queue_delay_microseconds") or 0)
    batching = {
        "type": "dynamic" if config.get("dynamic_batching") else "none",
        "max_batch_size": spec.max_batch_size or 1,
        "batch_timeout_us": delay,
    }
    kinds = [group.get("kind") for group in config.get("instance_group") or ()]
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


def _dag(models: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """The default model as a chain of one."""
    named = {f"{model['name']}-{model['version']}": model for model in models}
    default = settings.grps_default_model
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


def _dump(document: Any, sort: bool = False) -> str:
    text: str = yaml.safe_dump(document, sort_keys=sort, allow_unicode=True)
    return text
