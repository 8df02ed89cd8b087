"""gRPC calls other than inference: metadata, regions, health, reflection."""

import queue
import threading
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import shmserve
from shmserve._generated import grpc_service_pb2 as pb
from shmserve.core.registry import ModelState
from shmserve.frontends.grpc import call_pools
from tests import fake_models
from tests.grpc_client import Rig, request
from tests.running_server import WATCHDOG_S, wait_until

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING, UNKNOWN = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
    health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
)


@pytest.fixture(scope="module")
def rig():
    with Rig() as rig:
        yield rig


def test_server(rig: Rig) -> None:
    assert rig.client.call("ServerLive").live
    assert rig.client.call("ServerReady").ready
    told = rig.client.call("ServerMetadata")
    assert (told.name, told.version) == ("shmserve", shmserve.__version__)
    assert "system_shared_memory" in told.extensions


def test_a_server_without_a_registry_is_live_and_not_ready() -> None:
    with Rig() as rig:
        rig.dispatcher.published = False
        assert rig.client.call("ServerLive").live
        assert not rig.client.call("ServerReady").ready
        assert check(rig) == NOT_SERVING
        assert rig.client.error("ModelReady", pb.ModelReadyRequest(name="x"))[0] == "UNAVAILABLE"


def test_no_model_is_unknown_before_the_repository_has_been_read() -> None:
    with Rig() as rig:
        rig.dispatcher.complete = False
        assert not rig.client.call("ModelReady", pb.ModelReadyRequest(name="x")).ready
        for name, message in (
            ("ModelMetadata", pb.ModelMetadataRequest(name="x")),
            ("ModelStatistics", pb.ModelStatisticsRequest(name="x")),
            ("ModelInfer", request(model="x")),
        ):
            code, text = rig.client.error(name, message)
            assert code == "UNAVAILABLE"
            assert text.startswith("model 'x' is not known yet")


def test_model_ready(rig: Rig) -> None:
    def ready(name: str, version: str = "") -> bool:
        return rig.client.call("ModelReady", pb.ModelReadyRequest(name=name, version=version)).ready

    assert ready("identity")
    assert ready("identity", "1")
    assert not ready("identity", "2")
    assert not ready("nosuch")
    rig.dispatcher.put(fake_models.spec("loading", "FP32", (-1,)), ModelState.LOADING)
    assert not ready("loading")
    del rig.dispatcher.entries["loading"]
    bad = pb.ModelReadyRequest(name="identity", version="abc")
    assert rig.client.error("ModelReady", bad)[0] == "INVALID_ARGUMENT"


def test_model_metadata(rig: Rig) -> None:
    told = rig.client.call("ModelMetadata", pb.ModelMetadataRequest(name="batched"))
    assert (told.name, list(told.versions), told.platform) == ("batched", ["1"], "python")
    (tensor,) = told.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("INPUT0", "FP32", [-1, 4])
    assert told.outputs[0].name == "OUTPUT0"
    for version, code in (("", "NOT_FOUND"), ("x", "INVALID_ARGUMENT")):
        request = pb.ModelMetadataRequest(name="nosuch", version=version)
        assert rig.client.error("ModelMetadata", request)[0] == code


def test_model_config(rig: Rig) -> None:
    told = rig.client.call("ModelConfig", pb.ModelConfigRequest(name="batched", version="1"))
    assert (told.config.name, told.config.max_batch_size) == ("batched", 8)
    assert list(told.config.input[0].dims) == [4]
    assert not told.config.model_transaction_policy.decoupled


def register(name: str = "r", key: str = "/k", offset: int = 0, byte_size: int = 4096) -> Any:
    return pb.SystemSharedMemoryRegisterRequest(
        name=name, key=key, offset=offset, byte_size=byte_size
    )


def test_system_regions(rig: Rig) -> None:
    call, error = rig.client.call, rig.client.error
    call("SystemSharedMemoryRegister", register(offset=64, byte_size=32))
    with Rig(rig.dispatcher, uid=1001) as stranger:
        assert not stranger.client.call("SystemSharedMemoryStatus").regions
    told = call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="r"))
    (region,) = told.regions.values()
    assert (region.name, region.key, region.offset, region.byte_size) == ("r", "/k", 64, 32)
    assert error("SystemSharedMemoryRegister", register())[0] == "ALREADY_EXISTS"
    for bad in (register(name=""), register("x", byte_size=0), register("x", byte_size=1 << 63),
                register("x", key="a/b"), register("x", offset=(1 << 64) - 1)):  # fmt: skip
        assert error("SystemSharedMemoryRegister", bad)[0] == "INVALID_ARGUMENT"
    for bad, text in (
        (register(name=""), "'region name' is necessary to register system shared memory region"),
        (register("x", byte_size=0), "region 'x': unable to process address space"),
    ):
        assert text in error("SystemSharedMemoryRegister", bad)[1]
    unknown = pb.SystemSharedMemoryUnregisterRequest(name="unknown")
    call("SystemSharedMemoryUnregister", unknown)
    call("SystemSharedMemoryUnregister")
    assert not call("SystemSharedMemoryStatus").regions
    named = pb.SystemSharedMemoryStatusRequest(name="r")
    assert error("SystemSharedMemoryStatus", named)[0] == "NOT_FOUND"


def test_cuda_regions(rig: Rig) -> None:
    call, error = rig.client.call, rig.client.error
    assert not call("CudaSharedMemoryStatus").regions
    call("CudaSharedMemoryUnregister")
    named = pb.CudaSharedMemoryStatusRequest(name="r")
    assert error("CudaSharedMemoryStatus", named)[0] == "NOT_FOUND"
    for length, told in ((64, "GPUs not supported"), (63, "cudaIpcMemHandle_t")):
        request = pb.CudaSharedMemoryRegisterRequest(
            name="r", raw_handle=bytes(length), byte_size=64
        )
        code, details = error("CudaSharedMemoryRegister", request)
        assert code == "INVALID_ARGUMENT"
        assert told in details


def test_malformed_messages_and_unknown_methods(rig: Rig) -> None:
    assert rig.client.error("ModelReady", b"\x0a\xff")[0] == "INVALID_ARGUMENT"
    assert rig.client.error("/inference.GRPCInferenceService/Nonsense")[0] == "UNIMPLEMENTED"
    nothing = rig.client.channel.stream_unary("/inference.GRPCInferenceService/ServerLive")
    with pytest.raises(grpc.RpcError) as caught:
        nothing(iter(()), timeout=WATCHDOG_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def check(rig: Rig, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    return health_pb2.HealthCheckResponse.FromString(rig.client.call(CHECK, request)).status


class Watcher:
    """Statuses received from a watch so far, newest last."""

    def __init__(self, rig: Rig, service: str = "") -> None:
        request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
        watch = rig.client.channel.unary_stream(WATCH)
        self.stream = watch(request, timeout=WATCHDOG_S)
        self.told: queue.SimpleQueue[int] = queue.SimpleQueue()
        rig.threads.submit(self._read)

    def _read(self) -> None:
        try:
            for message in self.stream:
                self.told.put(health_pb2.HealthCheckResponse.FromString(message).status)
        except grpc.RpcError as ex:
            self.told.put(ex.code().name)

    def next(self) -> Any:
        return self.told.get(timeout=WATCHDOG_S)


def test_health_is_checked(rig: Rig) -> None:
    assert check(rig) == check(rig, "inference.GRPCInferenceService") == SERVING
    assert check(rig, "identity") == SERVING
    rig.dispatcher.put(fake_models.spec("loading", "FP32", (-1,)), ModelState.LOADING)
    assert check(rig, "loading") == NOT_SERVING
    assert check(rig) == NOT_SERVING  # a model that should be ready is not
    del rig.dispatcher.entries["loading"]
    bad = health_pb2.HealthCheckRequest(service="nosuch").SerializeToString()
    assert rig.client.error(CHECK, bad)[0] == "NOT_FOUND"


def test_health_is_watched() -> None:
    with Rig() as rig:
        server, model = Watcher(rig), Watcher(rig, "later")
        assert server.next() == SERVING
        assert model.next() == UNKNOWN
        rig.dispatcher.put(fake_models.spec("later", "FP32", (-1,)), ModelState.LOADING)
        assert model.next() == NOT_SERVING
        assert server.next() == NOT_SERVING
        rig.dispatcher.put(fake_models.spec("later", "FP32", (-1,)), ModelState.READY)
        assert model.next() == SERVING
        assert server.next() == SERVING
        del rig.dispatcher.entries["later"]
        assert model.next() == UNKNOWN
        server.stream.cancel()
        assert server.next() == "CANCELLED"


def test_watchers_have_a_limit_and_keep_nobody_out(monkeypatch) -> None:
    monkeypatch.setattr(call_pools, "MAX_WATCHERS", 2)
    with Rig() as rig:
        first, second = Watcher(rig), Watcher(rig)
        assert first.next() == second.next() == SERVING
        assert Watcher(rig).next() == "RESOURCE_EXHAUSTED"
        assert check(rig) == SERVING
        second.stream.cancel()
        wait_until(lambda: Watcher(rig).next() == SERVING, "a place for another")


def refused(rig: Rig) -> bool:
    try:
        rig.client.call("ServerLive", timeout=5)
    except grpc.RpcError as ex:
        return ex.code() is grpc.StatusCode.UNAVAILABLE
    return False


def test_a_drain_tells_first_and_finishes_what_it_has() -> None:
    gate, entered = threading.Event(), threading.Event()

    def slow(request: Any) -> Any:
        entered.set()
        gate.wait(WATCHDOG_S)
        return fake_models.identity(request)

    dispatcher = fake_models.dispatcher()
    dispatcher.functions["identity"] = slow
    with Rig(dispatcher) as rig:
        watcher = Watcher(rig)
        assert watcher.next() == SERVING
        running = rig.threads.submit(rig.client.infer)
        assert entered.wait(WATCHDOG_S)
        drained = rig.threads.submit(rig.served.drain, WATCHDOG_S)
        assert watcher.next() == NOT_SERVING
        wait_until(lambda: refused(rig), "new calls are refused")
        assert not drained.done()
        gate.set()
        assert running.result(WATCHDOG_S).outputs
        drained.result(WATCHDOG_S)
        assert watcher.next() in ("UNAVAILABLE", "CANCELLED")


def reflect(rig: Rig, **asked: str) -> Any:
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    call = rig.client.channel.stream_stream(
        method, response_deserializer=reflection_pb2.ServerReflectionResponse.FromString
    )
    request = reflection_pb2.ServerReflectionRequest(**asked).SerializeToString()
    (answer,) = call(iter([request]), timeout=WATCHDOG_S)
    return answer


def test_reflection(rig: Rig) -> None:
    listed = reflect(rig, list_services="").list_services_response.service
    assert {service.name for service in listed} == {
        "inference.GRPCInferenceService",
        "grps.protos.v1.GrpsService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    for symbol in ("inference.GRPCInferenceService", "grpc.health.v1.Health"):
        found = reflect(rig, file_containing_symbol=symbol)
        assert found.file_descriptor_response.file_descriptor_proto
    with Rig(grpc_reflection=False) as closed, pytest.raises(grpc.RpcError) as caught:
        reflect(closed, list_services="")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
