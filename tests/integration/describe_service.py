"""Print the service and the messages that the generated code of one package registers.

    python describe_service.py shmserve._generated

Two packages register the same names, so each package needs its own process.
"""

import importlib
import json
import sys
from typing import Any

# Module of each package that holds the messages of the service. Messages of the model
# configuration are in model_config_pb2 in both.
SERVICE_MODULES = {"shmserve._generated": "grpc_service_pb2", "tritonclient.grpc": "service_pb2"}


def describe(package: str) -> dict[str, Any]:
    service = importlib.import_module(f"{package}.{SERVICE_MODULES[package]}").DESCRIPTOR
    config = importlib.import_module(f"{package}.model_config_pb2").DESCRIPTOR
    messages: dict[str, Any] = {}
    enums: dict[str, Any] = {}
    for file in (service, config):
        for message in file.message_types_by_name.values():
            _add(message, messages, enums)
        for enum in file.enum_types_by_name.values():
            enums[enum.full_name] = sorted((v.name, v.number) for v in enum.values)
    methods = {
        method.full_name: [
            method.input_type.full_name,
            method.output_type.full_name,
            method.client_streaming,
            method.server_streaming,
        ]
        for method in service.services_by_name["GRPCInferenceService"].methods
    }
    return {"methods": methods, "messages": messages, "enums": enums}


def _add(message: Any, messages: dict[str, Any], enums: dict[str, Any]) -> None:
    messages[message.full_name] = sorted(
        [
            field.number,
            field.name,
            field.type,
            field.is_repeated,
            field.containing_oneof.name if field.containing_oneof else "",
            (field.message_type or field.enum_type).full_name
            if field.message_type or field.enum_type
            else "",
        ]
        for field in message.fields
    )
    for inner in message.nested_types:
        _add(inner, messages, enums)
    for enum in message.enum_types:
        enums[enum.full_name] = sorted((v.name, v.number) for v in enum.values)


if __name__ == "__main__":
    json.dump(describe(sys.argv[1]), sys.stdout)
