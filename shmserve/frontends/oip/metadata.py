"""Metadata of the server and of its models, as plain values."""

from msgspec import Struct

import shmserve
from shmserve.config import Settings
from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.tensor.spec import TensorSpec

# Only extensions of this server, in Triton's order
EXTENSIONS = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)",
    "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
    "binary_tensor_data", "parameters", "statistics", "trace", "logging",
)  # fmt: skip


class ServerMetadata(Struct, frozen=True):
    """Answer of the server metadata API."""

    name: str
    version: str
    extensions: tuple[str, ...] = EXTENSIONS


class TensorMetadata(Struct, frozen=True):
    """An input or output; -1 in the shape is a variable dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(Struct, frozen=True):
    """Answer of the model metadata API."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


def server_metadata(settings: Settings) -> ServerMetadata:
    """Return name, version and extensions of this server."""
    return ServerMetadata(settings.server_name, shmserve.__version__)


def model_metadata(entry: ModelEntry, snapshot: Snapshot) -> ModelMetadata:
    """Return the metadata of a model version. `versions` lists the model's ready versions."""
    spec = entry.spec
    ready = [
        version
        for version, other in snapshot.models.get(spec.name, {}).items()
        if other.state is ModelState.READY
    ]
    return ModelMetadata(
        spec.name,
        tuple(sorted(ready or [spec.version], key=int)),
        spec.platform or spec.backend,
        tuple(_tensor(tensor) for tensor in spec.inputs),
        tuple(_tensor(tensor) for tensor in spec.outputs),
    )


def _tensor(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(spec.name, spec.datatype, spec.shape)
