"""Log lines for the operator when the service is ready: addresses, models, and a first request."""

import json
import logging
import shlex
import time
from collections.abc import Iterator, Sequence
from math import prod

from msgspec import UNSET, Struct
from msgspec.structs import replace

from shmserve.core.registry import ALL, ModelState, Snapshot
from shmserve.protocol.oip.json_calls import (
    SCHEMA_PARAMETER,
    decode_schemas,
    sample,
    takes_json,
)
from shmserve.tensor.spec import ModelSpec, TensorSpec

_log = logging.getLogger("shmserve.start")

_MODELS = 12  # names at most
_ELEMENTS = 16  # most elements of an input in a request that fits on a screen
_ZEROS = {"BYTES": "", "BOOL": False}


class Doors(Struct, frozen=True):
    """Addresses of the service for clients, and whether the metrics page is served (`page`)."""

    http: tuple[str, ...] = ()
    grpc: tuple[str, ...] = ()
    page: bool = True

    @property
    def first(self) -> tuple[str, str]:
        """Return curl's options and the beginning of the URL; both are empty without HTTP."""
        for address in self.http:
            if not address.startswith("unix:"):
                return ("-k " if address.startswith("https") else ""), _reachable(address)
        if self.http:
            return f"--unix-socket {self.http[0].removeprefix('unix:')} ", "http://localhost"
        return "", ""


class StartReport:
    """Report, in the log, of a start at time `begun` (`time.monotonic` of any process)."""

    def __init__(self, begun: float, doors: Doors) -> None:
        self._begun = begun
        self._doors = doors
        self._greeted = False
        self._complete = False

    def published(self, snapshot: Snapshot) -> None:
        """Log that the required models are ready, or that some cannot be served, and that all
        models are ready, each once."""
        if self._complete:
            return
        took_s = time.monotonic() - self._begun
        self._complete = replace(snapshot, requires=ALL).ready
        if self._complete and not snapshot.models:
            _log.info("ready after %.1f s, without a model", took_s)
        elif self._complete:
            _log.info("all models ready after %.1f s", took_s)
        if not self._greeted and (snapshot.ready or _is_settled(snapshot)):
            self._greeted = True
            if not snapshot.ready:
                others = "other models serve" if snapshot.ready_entries else "no model serves"
                reason = snapshot.why_not_ready
                _log.warning("not ready after %.1f s, %s: %s", took_s, others, reason)
            elif not self._complete:
                required = ", ".join(snapshot.requires)
                _log.info("ready after %.1f s: ready_requires is %s", took_s, required)
            for line in greeting(snapshot, self._doors):
                _log.info("%s", line)


def _is_settled(snapshot: Snapshot) -> bool:
    """Return True if no model is loading, and every frontend serves."""
    entries = [entry for versions in snapshot.models.values() for entry in versions.values()]
    loading = any(entry.state is ModelState.LOADING for entry in entries)
    return snapshot.complete and not (snapshot.draining or snapshot.unserved or loading)


def greeting(snapshot: Snapshot, doors: Doors) -> Iterator[str]:
    """Yield the log lines that greet the operator."""
    yield f"HTTP: {' '.join(doors.http) or 'none'}, gRPC: {' '.join(doors.grpc) or 'none'}"
    yield f"models: {_models(snapshot)}"
    options, base = doors.first
    if not base:
        return
    if doors.page and "unix-socket" not in options:
        yield f"page: {base}/"
    yield f"try: curl {options}{_first_request(base, snapshot)}"


def _reachable(address: str) -> str:
    """Return an address of all interfaces as a loopback address."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _models(snapshot: Snapshot) -> str:
    names = [
        f"{name}/{version} ({_places(tuple(i.device for i in entry.instances))})"
        for (name, version), entry in sorted(snapshot.ready_entries.items())
        if version
    ]
    more = f" and {len(names) - _MODELS} more" if len(names) > _MODELS else ""
    return f"{', '.join(names[:_MODELS])}{more}" or "none"


def _places(devices: Sequence[str]) -> str:
    counts = {device: devices.count(device) for device in sorted(set(devices))}
    return ", ".join(f"{count} on {device}" for device, count in counts.items()) or "no instance"


def _first_request(base: str, snapshot: Snapshot) -> str:
    """Return curl's arguments: a short inference if a model takes one, else metadata."""
    for (name, version), entry in sorted(snapshot.ready_entries.items()):
        if not version and entry.instances and takes_json(entry.spec):
            schemas = decode_schemas(entry.spec.parameters[SCHEMA_PARAMETER])
            return f"{base}/models/{name} -d {shlex.quote(json.dumps(sample(schemas)))}"
        if not version and entry.instances and (inputs := _inputs(entry.spec)):
            body = shlex.quote(json.dumps({"inputs": inputs}, separators=(",", ":")))
            return f"{base}/v2/models/{name}/infer -d {body}"
    return f"{base}/v2"


def _inputs(spec: ModelSpec) -> list[dict[str, object]]:
    """Return the smallest inputs that a model takes. Return no inputs if these are too large, or
    if the model needs more than a single plain request."""
    if spec.decoupled or spec.config.sequence_batching is not UNSET:
        return []
    required = [tensor for tensor in spec.inputs if not tensor.optional]
    shapes = [[max(1, dim) for dim in tensor.shape] for tensor in required]
    if any(prod(shape) > _ELEMENTS for shape in shapes):
        return []
    return [_input(tensor, shape) for tensor, shape in zip(required, shapes, strict=True)]


def _input(tensor: TensorSpec, shape: list[int]) -> dict[str, object]:
    data = [_ZEROS.get(tensor.datatype, 0)] * prod(shape)
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": data}
