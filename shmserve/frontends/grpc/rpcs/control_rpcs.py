"""Control rpcs: model repository, statistics, trace and log settings."""

from functools import partial
from typing import Any

from google.protobuf import json_format
from msgspec.structs import asdict

from shmserve import waiting
from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.errors import InvalidArgument, NotFound
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.callers import CallAccess
from shmserve.frontends.grpc.request_mapping import checked_version
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.grpc.rpcs.metadata_rpcs import Rpcs
from shmserve.frontends.oip.log_and_trace import ServerSettings
from shmserve.frontends.oip.repository import Repository, refuse_repository
from shmserve.frontends.oip.statistics import Statistics

_SHOWN = 100


class RepositoryResources:
    """Rpcs of the model repository: index, load, unload."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings, access: CallAccess) -> None:
        self._repository = Repository(dispatcher, settings, access.access)
        self._access = access

    def rpcs(self) -> Rpcs:
        return {
            "RepositoryIndex": ("model-repository", self._index),
            "RepositoryModelLoad": ("model-repository", self._load),
            "RepositoryModelUnload": ("model-repository", self._unload),
        }

    def _index(self, request: Any, context: RpcContext) -> Any:
        refuse_repository(request.repository_name)
        self._access.check("use", context)
        rows = [asdict(row) for row in self._repository.index(request.ready)]
        return pb.RepositoryIndexResponse(models=rows)

    def _load(self, request: Any, context: RpcContext) -> Any:
        refuse_repository(request.repository_name)
        self._access.check("change", context)
        caller = partial(self._access.caller, context)
        self._repository.load(request.model_name, _values(request.parameters), caller)
        return pb.RepositoryModelLoadResponse()

    def _unload(self, request: Any, context: RpcContext) -> Any:
        refuse_repository(request.repository_name)
        self._access.check("change", context)
        dependents = _values(request.parameters).get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument("parameter 'unload_dependents' must be a bool_param")
        self._repository.unload(request.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()


class ServerResources:
    def __init__(self, dispatcher: DispatchApi, settings: Settings, access: CallAccess) -> None:
        self._access = access
        self._statistics = Statistics(dispatcher)
        self._settings = ServerSettings(dispatcher, settings)

    def rpcs(self) -> Rpcs:
        return {
            "ModelStatistics": ("statistics", self._model_statistics),
            "TraceSetting": ("trace", self._trace),
            "LogSettings": ("logging", self._log),
        }

    def _model_statistics(self, request: Any, context: RpcContext) -> Any:
        try:
            models = self._statistics.models(request.name, checked_version(request.version))
        except NotFound as ex:  # Triton answers NotFound with this code over gRPC
            raise InvalidArgument(ex.message) from None
        answer = pb.ModelStatisticsResponse()
        return waiting.beside(json_format.ParseDict, {"model_stats": models}, answer)

    def _trace(self, request: Any, context: RpcContext) -> Any:
        self._access.check("change" if request.settings else "use", context)
        # A setting without a value is cleared, like a setting with null over HTTP
        update = {key: list(value.value) or None for key, value in request.settings.items()}
        answer = pb.TraceSettingResponse()
        for key, value in self._settings.trace(request.model_name, update).items():
            answer.settings[key].value.extend([value] if isinstance(value, str) else value)
        return answer

    def _log(self, request: Any, context: RpcContext) -> Any:
        self._access.check("change" if request.settings else "use", context)
        update = _values(request.settings)
        answer = pb.LogSettingsResponse()
        for key, value in self._settings.logging(update).items():
            kind = {bool: "bool", int: "uint32", str: "string"}[type(value)]
            setattr(answer.settings[key], f"{kind}_param", value)
        return answer


def _values(entries: Any) -> dict[str, Any]:
    """Return parameters or settings by name. Raise InvalidArgument if an entry has no value."""
    values = {}
    for key, entry in entries.items():
        (oneof,) = entry.DESCRIPTOR.oneofs
        field = entry.WhichOneof(oneof.name)
        if field is None:
            raise InvalidArgument(f"'{ascii(key[:_SHOWN])[1:-1]}' has no value of a known type")
        values[key] = getattr(entry, field)
    return values
