"""Rpcs answered from the registry, and rpcs about client memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from msgspec import to_builtins

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.core.access import Action
from shmserve.core.caller import Caller
from shmserve.core.region_kinds import CUDA, SYSTEM
from shmserve.core.registry import ModelEntry, ModelState
from shmserve.errors import InvalidArgument, NotFound, Unavailable
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.callers import CallAccess
from shmserve.frontends.grpc.handlers import Unary
from shmserve.frontends.grpc.request_mapping import checked_version
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.oip import metadata
from shmserve.frontends.oip.restricted_apis import Category
from shmserve.frontends.oip.shared_memory import SharedMemory
from shmserve.protocol.oip.strict_parser import uint

Rpc = Callable[[Any, RpcContext], Any]  # takes and returns messages
Rpcs = Mapping[str, tuple[Category, Rpc]]  # by rpc name, with the category of the restricted APIs


def as_message(kind: Any) -> Callable[[bytes], Any]:
    """Return a parser for messages of a generated class.

    Raises (when the parser is called):
        InvalidArgument: malformed bytes.
    """

    def parse(data: bytes) -> Any:
        try:
            return kind.FromString(data)
        except DecodeError:
            raise InvalidArgument(f"the message is no {kind.DESCRIPTOR.name}") from None

    return parse


def as_unary(request: Any, rpc: Rpc) -> Unary:
    """Turn an rpc on messages into an rpc on bytes. `request`: class of the request message."""
    parse = as_message(request)

    def run(data: bytes, context: RpcContext) -> bytes:
        answer: bytes = rpc(parse(data), context).SerializeToString()
        return answer

    return run


class Resources:
    """Rpcs for health and metadata. `ready`: returns True if the server is ready."""

    def __init__(
        self, dispatcher: DispatchApi, settings: Settings, ready: Callable[[], bool]
    ) -> None:
        self._dispatcher = dispatcher
        self._ready = ready
        server = to_builtins(metadata.server_metadata(settings))
        self._server = pb.ServerMetadataResponse(**server)

    def health_rpcs(self) -> Rpcs:
        return {
            "ServerLive": ("health", lambda request, context: pb.ServerLiveResponse(live=True)),
            "ServerReady": ("health", self._server_ready),
            "ModelReady": ("health", self._model_ready),
        }

    def rpcs(self) -> Rpcs:
        return {
            "ServerMetadata": ("metadata", lambda request, context: self._server),
            "ModelMetadata": ("metadata", self._model_metadata),
            "ModelConfig": ("model-config", self._model_config),
        }

    def _server_ready(self, request: Any, context: RpcContext) -> Any:
        return pb.ServerReadyResponse(ready=self._ready())

    def _model_ready(self, request: Any, context: RpcContext) -> Any:
        version = checked_version(request.version)
        snapshot = self._dispatcher.snapshot()
        try:
            entry = snapshot.model(request.name, version)
        except (NotFound, Unavailable):  # no error, unlike over HTTP: the model is not ready
            return pb.ModelReadyResponse(ready=False)
        ready = entry.state is ModelState.READY and bool(entry.instances)
        return pb.ModelReadyResponse(ready=ready)

    def _model_metadata(self, request: Any, context: RpcContext) -> Any:
        model = metadata.model_metadata(self._entry(request), self._dispatcher.snapshot())
        return pb.ModelMetadataResponse(**to_builtins(model))

    def _model_config(self, request: Any, context: RpcContext) -> Any:
        config = self._entry(request).spec.config.as_dict()
        return json_format.ParseDict({"config": config}, pb.ModelConfigResponse())

    def _entry(self, request: Any) -> ModelEntry:
        return self._dispatcher.ready_model(request.name, checked_version(request.version))


class RegionResources:
    def __init__(self, regions: SharedMemory, access: CallAccess) -> None:
        self._regions = regions
        self._access = access

    def rpcs(self) -> Rpcs:
        rpcs: dict[str, Rpc] = {
            "SystemSharedMemoryStatus": partial(
                self._status, self._regions.status, pb.SystemSharedMemoryStatusResponse
            ),
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": partial(
                self._unregister, SYSTEM, pb.SystemSharedMemoryUnregisterResponse
            ),
            "CudaSharedMemoryStatus": partial(
                self._status, self._regions.cuda_status, pb.CudaSharedMemoryStatusResponse
            ),
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": partial(
                self._unregister, CUDA, pb.CudaSharedMemoryUnregisterResponse
            ),
        }
        return {name: ("shared-memory", rpc) for name, rpc in rpcs.items()}

    def _caller(self, action: Action, context: RpcContext) -> Caller:
        self._access.check(action, context)
        return self._access.caller(context)

    def _status(
        self, status: Callable[..., Any], response_type: Any, request: Any, context: RpcContext
    ) -> Any:
        answer = response_type()
        for region in status(self._caller("use", context), request.name):
            json_format.ParseDict(to_builtins(region), answer.regions[region.name])
        return answer

    def _register(self, request: Any, context: RpcContext) -> Any:
        offset = uint(request.offset, "'offset'")
        byte_size = uint(request.byte_size, "'byte_size'")
        caller = self._caller("register", context)
        self._regions.register(caller, request.name, request.key, offset, byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def _unregister(self, kind: str, response_type: Any, request: Any, context: RpcContext) -> Any:
        self._regions.unregister(self._caller("register", context), request.name, kind)
        return response_type()

    def _cuda_register(self, request: Any, context: RpcContext) -> Any:
        caller, memory = self._caller("register", context), (request.device_id, request.byte_size)
        self._regions.register_cuda(caller, request.name, request.raw_handle, *memory)
        return pb.CudaSharedMemoryRegisterResponse()
