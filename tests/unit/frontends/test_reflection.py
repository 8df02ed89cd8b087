"""Health and reflection, described by the project's own files, against the official packages."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import grpc_health.v1.health_pb2 as their_health
import grpc_reflection.v1alpha.reflection_pb2 as their_reflection
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha.reflection import ReflectionServicer

from shmserve._generated import grpc_service_pb2, health_pb2
from shmserve._generated import reflection_pb2 as pb
from shmserve.frontends.grpc.rpcs.reflection import SERVICE, Reflection

ROOT = Path(__file__).parents[3]
SERVICES = ("inference.GRPCInferenceService", "grpc.health.v1.Health")
ORDERS = (
    "import grpc_health.v1.health_pb2, grpc_reflection.v1alpha.reflection_pb2;"
    "import shmserve.frontends.grpc.process.server",
    "import shmserve.frontends.grpc.process.server;"
    "import grpc_health.v1.health_pb2, grpc_reflection.v1alpha.reflection_pb2",
)


def proto(module: Any) -> descriptor_pb2.FileDescriptorProto:
    found = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(found)
    return found


def test_the_files_are_those_of_the_packages() -> None:
    for ours, theirs in ((health_pb2, their_health), (pb, their_reflection)):
        described, wanted = proto(ours), proto(theirs)
        for file in (described, wanted):  # the order of declarations means nothing
            file.message_type.sort(key=lambda message: str(message.name))
        assert described == wanted


@pytest.mark.parametrize("imports", ORDERS)
@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_the_packages_can_be_imported_beside_ours(imports: str, implementation: str) -> None:
    program = (
        f"{imports};"
        "from shmserve._generated import health_pb2 as ours;"
        "theirs = grpc_health.v1.health_pb2;"
        "data = ours.HealthCheckResponse(status='NOT_SERVING').SerializeToString();"
        "assert theirs.HealthCheckResponse.FromString(data).status == 2"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT), "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": implementation},
        timeout=60,
        check=True,
    )


def test_the_server_loads_neither_package() -> None:
    program = (
        "import sys, shmserve.frontends.grpc.process.server;"
        "names = 'grpc_health.v1', 'grpc_reflection.v1alpha';"
        "sys.exit(any(name in sys.modules for name in names))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60, check=True)


def test_generated_code_runs_on_the_oldest_protobuf_that_may_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (protobuf,) = [text for text in project["dependencies"] if text.startswith("protobuf")]
    oldest = re.search(r">=(\d+)\.(\d+)", protobuf)
    for path in (ROOT / "shmserve/_generated").glob("*_pb2.py"):
        version = re.search(r"Protobuf Python Version: (\d+)\.(\d+)", path.read_text())
        assert tuple(map(int, version.groups())) <= tuple(map(int, oldest.groups()))


@pytest.fixture(scope="module")
def extended():
    """Return the name of a message with two extensions, in the pool that files share."""
    file = descriptor_pb2.FileDescriptorProto(name="tests/extended.proto", package="extended")
    file.dependency.append("google/protobuf/descriptor.proto")
    message = file.message_type.add(name="Base")
    message.extension_range.add(start=100, end=200)
    for number in (150, 120):
        file.extension.add(name=f"e{number}", number=number, extendee=".extended.Base", type=5)
        file.extension[-1].label = 1  # type: ignore[assignment]
    descriptor_pool.Default().Add(file)
    return "extended.Base"


def answers(requests: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the project's answers and the official package's answers, both parsed by the official
    package."""
    data = [request.SerializeToString() for request in requests]
    ours = list(map(their_reflection.ServerReflectionResponse.FromString, serve(data)))
    servicer = ReflectionServicer([*SERVICES, SERVICE.full_name])
    parsed = map(their_reflection.ServerReflectionRequest.FromString, data)
    return ours, list(servicer.ServerReflectionInfo(parsed, None))


def serve(data: list[bytes]) -> list[bytes]:
    return list(Reflection(SERVICES).serve(data))


def test_answers_are_those_of_the_package(extended: str) -> None:
    def of(message: str, number: int) -> Any:
        wanted = pb.ExtensionRequest(containing_type=message, extension_number=number)
        return pb.ServerReflectionRequest(file_containing_extension=wanted)

    requests = [
        pb.ServerReflectionRequest(list_services=""),
        pb.ServerReflectionRequest(list_services="*", host="somewhere"),
        pb.ServerReflectionRequest(),
        pb.ServerReflectionRequest(file_by_filename="tests/extended.proto"),
        pb.ServerReflectionRequest(file_by_filename="nosuch.proto"),
        pb.ServerReflectionRequest(file_by_filename=grpc_service_pb2.DESCRIPTOR.name),
        *(pb.ServerReflectionRequest(file_containing_symbol=name) for name in SERVICES),
        pb.ServerReflectionRequest(file_containing_symbol=f"{SERVICES[0]}.ModelInfer"),
        pb.ServerReflectionRequest(file_containing_symbol="inference.NoSuch"),
        pb.ServerReflectionRequest(file_containing_symbol=""),
        *(of(extended, number) for number in (120, 150, 199, 0, -1)),
        of("inference.NoSuch", 1),
        of("grpc.health.v1.HealthCheckRequest", 1),
        *(
            pb.ServerReflectionRequest(all_extension_numbers_of_type=name)
            for name in (extended, "inference.NoSuch", "inference.ModelInferRequest", "")
        ),
    ]
    ours, theirs = answers(requests)
    assert len(ours) == len(requests)
    for request, mine, other in zip(requests, ours, theirs, strict=True):
        assert mine == other, request


def test_errors_carry_codes_of_grpc() -> None:
    asked: tuple = ({"file_by_filename": "nosuch.proto"}, {})
    data = serve([pb.ServerReflectionRequest(**each).SerializeToString() for each in asked])
    errors = [pb.ServerReflectionResponse.FromString(each).error_response for each in data]
    codes = [(error.error_code, error.error_message) for error in errors]
    assert codes == [(5, "not found"), (3, "invalid argument")]
