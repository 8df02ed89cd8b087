"""The rpcs about the repository, statistics, and what is traced and logged."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import json_format

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.errors import InvalidArgument, NotFound
from shmserve.frontends.grpc.metadata_rpcs import Rpc
from shmserve.frontends.grpc.request_mapping import checked_version
from shmserve.frontends.oip.log_and_trace import ServerSettings
from shmserve.frontends.oip.repository import Repository, refuse_repository
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.frontends.oip.statistics import Statistics

_SHOWN = 100


class RepositoryResources:
    """Load, unload, index."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self._repository = Repository(dispatcher, settings)

    def rpcs(self) -> dict[str, Rpc]:
        return {
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }

    def _index(self, request: Any, context: grpc.ServicerContext) -> Any:
        refuse_repository(request.repository_name)
        answer = pb.RepositoryIndexResponse()
        for row in self._repository.index(request.ready):
            answer.models.add(
                name=row.name, version=row.version, state=row.state, reason=row.reason
            )
        return answer

    def _load(self, request: Any, context: grpc.ServicerContext) -> Any:
        refuse_repository(request.repository_name)
        given = {key: _chosen(key, value) for key, value in request.parameters.items()}
        self._repository.load(request.model_name, given)
        return pb.RepositoryModelLoadResponse()

    def _unload(self, request: Any, context: grpc.ServicerContext) -> Any:
        refuse_repository(request.repository_name)
        given = {key: _chosen(key, value) for key, value in request.parameters.items()}
        dependents = given.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument("parameter 'unload_dependents' must be a bool_param")
        self._repository.unload(request.model_name, dependents)
        return pb.RepositoryModelUnloadResponse()


class ServerResources:
    """Statistics, trace and log settings."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self._statistics = Statistics(dispatcher)
        self._settings = ServerSettings(dispatcher, settings)

    def rpcs(self) -> dict[str, Rpc]:
        return {
            "ModelStatistics": self._model_statistics,
            "TraceSetting": self._trace,
            "LogSettings": self._log,
        }

    def _model_statistics(self, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            models = self._statistics.models(request.name, checked_version(request.version))
        except NotFound as ex:  # Triton's code for it, over gRPC
            raise InvalidArgument(ex.message) from None
        answer = pb.ModelStatisticsResponse()
        json_format.ParseDict({"model_stats": models}, answer)
        return answer

    def _trace(self, request: Any, context: grpc.ServicerContext) -> Any:
        # A setting without a value is cleared, as null does over HTTP
        update = {key: list(value.value) or None for key, value in request.settings.items()}
        answer = pb.TraceSettingResponse()
        for key, told in self._settings.trace(request.model_name, update).items():
            answer.settings[key].value.extend([told] if isinstance(told, str) else told)
        return answer

    def _log(self, request: Any, context: grpc.ServicerContext) -> Any:
        update = {key: _chosen(key, value) for key, value in request.settings.items()}
        answer = pb.LogSettingsResponse()
        for key, told in self._settings.logging(update).items():
            field = "bool" if isinstance(told, bool) else "uint32" if isinstance(told, int) else ""
            setattr(answer.settings[key], f"{field or 'string'}_param", told)
        return answer


def _chosen(key: str, value: Any) -> Any:
    """The value of a parameter or a setting.

    Raises:
        InvalidArgument: it has none.
    """
    (oneof,) = value.DESCRIPTOR.oneofs
    field = value.WhichOneof(oneof.name)
    if field is None:
        raise InvalidArgument(f"'{ascii(key[:_SHOWN])[1:-1]}' has no value of a known type")
    return getattr(value, field)
