"""The rpcs that are answered from the registry, and those about client memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.core.registry import CUDA, ModelEntry, ModelState
from shmserve.errors import InvalidArgument, NotFound
from shmserve.frontends.grpc.callers import Callers
from shmserve.frontends.grpc.methods import Unary
from shmserve.frontends.grpc.request_mapping import checked_version
from shmserve.frontends.oip import metadata
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.frontends.oip.shared_memory import Regions

Rpc = Callable[[Any, grpc.ServicerContext], Any]  # of messages


def as_message(kind: Any) -> Callable[[bytes], Any]:
    """What reads messages of a generated class.

    Raises (what is returned does):
        InvalidArgument: malformed bytes.
    """

    def parse(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            raise InvalidArgument(f"the message is no {kind.DESCRIPTOR.name}") from None

    return parse


def as_unary(request: Any, rpc: Rpc) -> Unary:
    """An rpc on messages as one on bytes; `request`: the class of its request."""
    parse = as_message(request)

    def run(data: bytes, context: grpc.ServicerContext) -> bytes:
        answer: bytes = rpc(parse(data), context).SerializeToString()
        return answer

    return run


class Resources:
    """Health and metadata. `ready`: whether the server is."""

    def __init__(
        self, dispatcher: Dispatcher, settings: Settings, ready: Callable[[], bool]
    ) -> None:
        self._dispatcher = dispatcher
        self._ready = ready
        server = metadata.server_metadata(settings)
        self._server = pb.ServerMetadataResponse(
            name=server.name, version=server.version, extensions=server.extensions
        )

    def health_rpcs(self) -> dict[str, Rpc]:
        return {
            "ServerLive": lambda request, context: pb.ServerLiveResponse(live=True),
            "ServerReady": lambda request, context: pb.ServerReadyResponse(ready=self._ready()),
            "ModelReady": self._model_ready,
        }

    def rpcs(self) -> dict[str, Rpc]:
        return {
            "ServerMetadata": lambda request, context: self._server,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
        }

    def _model_ready(self, request: Any, context: grpc.ServicerContext) -> Any:
        version = checked_version(request.version)
        try:
            entry = self._dispatcher.model(request.name, version)
        except NotFound:  # unlike over HTTP, no error: it is just not ready
            return pb.ModelReadyResponse(ready=False)
        ready = entry.state is ModelState.READY and bool(entry.instances)
        return pb.ModelReadyResponse(ready=ready)

    def _model_metadata(self, request: Any, context: grpc.ServicerContext) -> Any:
        told = metadata.model_metadata(self._entry(request), self._dispatcher.snapshot())
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=told.name,
            versions=told.versions,
            platform=told.platform,
            inputs=[tensor(name=t.name, datatype=t.datatype, shape=t.shape) for t in told.inputs],
            outputs=[tensor(name=t.name, datatype=t.datatype, shape=t.shape) for t in told.outputs],
        )

    def _model_config(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = pb.ModelConfigResponse()
        json_format.Parse(self._entry(request).spec.config_json, answer.config)
        return answer

    def _entry(self, request: Any) -> ModelEntry:
        return self._dispatcher.ready_model(request.name, checked_version(request.version))


class RegionResources:
    """Client memory."""

    def __init__(self, regions: Regions, callers: Callers) -> None:
        self._regions = regions
        self._callers = callers

    def rpcs(self) -> dict[str, Rpc]:
        return {
            "SystemSharedMemoryStatus": self._status,
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
        }

    def _status(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in self._regions.status(self._callers.of(context), request.name):
            told = answer.regions[region.name]
            told.name, told.key = region.name, region.key
            told.offset, told.byte_size = region.offset, region.byte_size
        return answer

    def _register(self, request: Any, context: grpc.ServicerContext) -> Any:
        fields = {"key": request.key, "offset": request.offset, "byte_size": request.byte_size}
        self._regions.register(self._callers.of(context), request.name, fields)
        return pb.SystemSharedMemoryRegisterResponse()

    def _unregister(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._regions.unregister(self._callers.of(context), request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def _cuda_status(self, request: Any, context: grpc.ServicerContext) -> Any:
        answer = pb.CudaSharedMemoryStatusResponse()
        for region in self._regions.cuda_status(self._callers.of(context), request.name):
            told = answer.regions[region.name]
            told.name, told.device_id = region.name, region.device_id
            told.byte_size = region.byte_size
        return answer

    def _cuda_register(self, request: Any, context: grpc.ServicerContext) -> Any:
        caller, memory = self._callers.of(context), (request.device_id, request.byte_size)
        self._regions.register_cuda(caller, request.name, request.raw_handle, *memory)
        return pb.CudaSharedMemoryRegisterResponse()

    def _cuda_unregister(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._regions.unregister(self._callers.of(context), request.name, CUDA)
        return pb.CudaSharedMemoryUnregisterResponse()
