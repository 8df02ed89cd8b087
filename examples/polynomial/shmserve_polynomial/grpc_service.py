"""The service example.Polynomial: rpc Value(google.protobuf.Struct) returns (DoubleValue)."""

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import DoubleValue

from shmserve.config import Settings
from shmserve.errors import InvalidArgument
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.grpc.services import Services
from shmserve_polynomial.one_number import value


def add_service(services: Services, dispatcher: DispatchApi, settings: Settings) -> None:
    def run(data: bytes, context: RpcContext) -> bytes:
        try:
            fields = Struct.FromString(data).fields
        except DecodeError:
            raise InvalidArgument("the message is no Struct") from None
        if not {"model", "x"} <= fields.keys():
            raise InvalidArgument("the message needs the fields model and x")
        model, x = fields["model"].string_value, fields["x"].number_value
        return DoubleValue(value=value(dispatcher, settings, model, x)).SerializeToString()

    handler = services.unary("Value", "inference", run, work="inference")
    services.add("example.Polynomial", {"Value": handler})
