"""grpc.reflection.v1alpha: lets clients such as grpcurl find services and their messages."""

from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool

from shmserve._generated import health_pb2
from shmserve._generated import reflection_pb2 as pb
from shmserve.frontends.grpc.rpcs.metadata_rpcs import as_message

SERVICE = pb.DESCRIPTOR.services_by_name["ServerReflection"]
_request = as_message(pb.ServerReflectionRequest)


class Reflection:
    """Descriptions of the services with these full names, and of all proto files that this process
    has loaded."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = sorted([*services, SERVICE.full_name])
        # Two files have separate pools (`shmserve._generated`); all other files share a pool.
        shared = descriptor_pool.Default()
        self._pools = (health_pb2.DESCRIPTOR.pool, pb.DESCRIPTOR.pool, shared)

    def serve(self, requests: Iterable[bytes]) -> Iterator[bytes]:
        """ServerReflectionInfo: yield an answer to each request. "Not found" is an answer, too."""
        for data in requests:
            request = _request(data)
            try:
                response = self._response(request)
            except KeyError:
                response = _error(grpc.StatusCode.NOT_FOUND)
            response.original_request.CopyFrom(request)
            encoded: bytes = response.SerializeToString()
            yield encoded

    def _response(self, request: Any) -> Any:
        """Return the answer to a request. Raise KeyError if no loaded file has this name, symbol or
        extension."""
        kind = request.WhichOneof("message_request")
        match kind:
            case "file_by_filename":
                return _files(self._find("FindFileByName", request.file_by_filename))
            case "file_containing_symbol":
                return _files(
                    self._find("FindFileContainingSymbol", request.file_containing_symbol)
                )
            case "file_containing_extension":
                extension = request.file_containing_extension
                message = self._find("FindMessageTypeByName", extension.containing_type)
                pool = message.file.pool
                return _files(pool.FindExtensionByNumber(message, extension.extension_number).file)
            case "all_extension_numbers_of_type":
                name = request.all_extension_numbers_of_type
                return _extensions(self._find("FindMessageTypeByName", name))
            case "list_services":
                services = [pb.ServiceResponse(name=name) for name in self._services]
                listed = pb.ListServiceResponse(service=services)
                return pb.ServerReflectionResponse(list_services_response=listed)
            case _:
                return _error(grpc.StatusCode.INVALID_ARGUMENT)

    def _find(self, method: str, name: str) -> Any:
        """Return the first match for a name in the pools. Raise KeyError if there is none."""
        for pool in self._pools:
            try:
                return getattr(pool, method)(name)
            except KeyError:
                continue
        raise KeyError(name)


def _files(file: Any) -> Any:
    """Return a file and all direct and indirect imports, without duplicates."""
    protos: dict[str, bytes] = {}
    awaiting = [file]
    while awaiting:
        current = awaiting.pop(0)
        if current.name not in protos:
            proto = descriptor_pb2.FileDescriptorProto()
            current.CopyToProto(proto)
            protos[current.name] = proto.SerializeToString()
            awaiting += current.dependencies
    response = pb.FileDescriptorResponse(file_descriptor_proto=protos.values())
    return pb.ServerReflectionResponse(file_descriptor_response=response)


def _extensions(message: Any) -> Any:
    numbers = sorted(field.number for field in message.file.pool.FindAllExtensions(message))
    response = pb.ExtensionNumberResponse(
        base_type_name=message.full_name, extension_number=numbers
    )
    return pb.ServerReflectionResponse(all_extension_numbers_response=response)


def _error(code: grpc.StatusCode) -> Any:
    number, text = code.value
    return pb.ServerReflectionResponse(
        error_response=pb.ErrorResponse(error_code=number, error_message=text)
    )
