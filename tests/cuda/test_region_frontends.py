"""The CUDA part of the shared-memory extension over both protocols, without processes."""

import base64
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.core.regions.region_book import ObjectFacts
from shmserve.errors import ShmserveError
from shmserve.frontends.oip.shared_memory import SharedMemory
from shmserve.protocol.control.data_messages import RegionRef
from shmserve.protocol.oip.request import RegionWindow
from tests import fake_models, grpc_client
from tests.unit import http_client

HANDLE = bytes(range(64))
B64 = base64.b64encode(HANDLE).decode()
BASE = "/v2/cudasharedmemory"
FAILED = "failed to register shared memory region 'r'"


class Http:
    """HTTP client over a Unix socket, so requests come from this process."""

    def __init__(self, devices: int = 2, **settings: Any) -> None:
        self.client = http_client.Client(Settings(**settings))
        self.coordinator = self.client.dispatcher.coordinator
        self.coordinator.devices = devices
        self.ours, self.theirs = socket.socketpair()

    def ask(self, method: str, path: str, body: bytes = b"") -> http_client.Answer:
        return self.client.ask(method, path, body, **{"gunicorn.socket": self.ours})  # type: ignore[arg-type]

    def register(self, body: str, name: str = "r") -> http_client.Answer:
        return self.ask("POST", f"{BASE}/region/{name}/register", body.encode())

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def http() -> Iterator[Http]:
    made = Http()
    yield made
    made.close()


@pytest.fixture
def grpc() -> Iterator[grpc_client.Rig]:
    with grpc_client.Rig() as rig:
        rig.dispatcher.coordinator.devices = 2
        yield rig


def document(device_id: int | str = 0, byte_size: int | str = 64, handle: str = B64) -> str:
    told = f'"device_id": {device_id}, "byte_size": {byte_size}'
    return f'{{"raw_handle": {{"b64": "{handle}"}}, {told}}}'


def test_http(http: Http) -> None:
    assert http.ask("GET", f"{BASE}/status").json == []
    assert http.register(document(1, 4096)).body == b""
    assert http.register(document(0, 64), "second").status == 200  # the very same handle
    listed = [
        {"name": "r", "device_id": 1, "byte_size": 4096},
        {"name": "second", "device_id": 0, "byte_size": 64},
    ]
    assert http.ask("GET", f"{BASE}/status").json == listed
    assert http.ask("GET", f"{BASE}/region/r/status").json == listed[:1]
    assert http.register(document()).status == 400  # ALREADY_EXISTS
    assert http.ask("POST", f"{BASE}/region/nosuch/unregister").status == 200
    assert http.ask("POST", f"{BASE}/region/r/unregister").status == 200
    assert http.ask("GET", f"{BASE}/status").json == listed[1:]
    assert http.ask("POST", f"{BASE}/unregister").status == 200
    assert http.ask("GET", f"{BASE}/status").json == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (document(handle="!!!"), "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"),
        (document(handle=B64[:-4]), "'raw_handle' must be a valid base64"),
        (document(handle=base64.b64encode(HANDLE + b"x").decode()), "'raw_handle' must be a valid"),
        (document(-1), "'device_id' must be a non-negative integer, got -1"),
        (document('"0"'), "'device_id' must be a non-negative integer"),
        (document("true"), "'device_id' must be a non-negative integer, got true"),
        (document(1 << 64), f"'device_id' must be at most {(1 << 63) - 1}, got {1 << 64}"),
        (document(2), f"{FAILED}: invalid args: device_id 2, but the number of devices is 2"),
        (document(byte_size=0), f"{FAILED}: invalid args: byte_size 0"),
        (
            document(byte_size=1 << 63),
            f"'byte_size' must be at most {(1 << 63) - 1}, got {1 << 63}",
        ),
        (document(byte_size=-1), "'byte_size' must be a non-negative integer"),
        (document(byte_size="1.0"), "'byte_size' must be a non-negative integer"),
        ('{"raw_handle": {}, "device_id": 0, "byte_size": 1}', "no 'b64' field"),
        ('{"raw_handle": "x", "device_id": 0, "byte_size": 1}', "no 'b64' field"),
        ('{"device_id": 0, "byte_size": 1}', "no 'raw_handle' field"),
        ('{"raw_handle": {"b64": ""}, "byte_size": 1}', "no 'device_id' field"),
        ('{"raw_handle": {"b64": ""}, "device_id": 1}', "no 'byte_size' field"),
        ("[]", "no 'raw_handle' field"),
    ],
)
def test_http_refusals(http: Http, body: str, told: str) -> None:
    text = http_client.error_of(http.register(body), 400)
    assert told in text
    assert B64[:8] not in text
    assert http.coordinator.book.regions == {}


def register(
    handle: bytes = HANDLE, device_id: int = 0, byte_size: int = 64, name: str = "r"
) -> Any:
    return pb.CudaSharedMemoryRegisterRequest(
        name=name, raw_handle=handle, device_id=device_id, byte_size=byte_size
    )


def test_grpc(grpc: grpc_client.Rig) -> None:
    call, error = grpc.client.call, grpc.client.error
    call("CudaSharedMemoryRegister", register(device_id=1, byte_size=4096))
    with grpc_client.Rig(grpc.dispatcher, uid=1001) as stranger:
        assert not stranger.client.call("CudaSharedMemoryStatus").regions
        stranger.client.call("CudaSharedMemoryUnregister")
        # names are per user
        stranger.client.call("CudaSharedMemoryRegister", register())
    told = call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="r"))
    assert list(told.regions) == ["r"]
    region = told.regions["r"]
    assert (region.name, region.device_id, region.byte_size) == ("r", 1, 4096)
    assert error("CudaSharedMemoryRegister", register())[0] == "ALREADY_EXISTS"
    call("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name="r"))
    assert not call("CudaSharedMemoryStatus").regions


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (register(HANDLE[:-1]), "raw_handle has 63 bytes, a cudaIpcMemHandle_t has 64"),
        (register(HANDLE + b"x"), "raw_handle has 65 bytes"),
        (register(b""), "raw_handle has 0 bytes"),
        (register(device_id=-1), "device_id -1 is negative"),
        (register(device_id=99), "device_id 99, but the number of devices is 2"),
        (register(device_id=(1 << 63) - 1), "but the number of devices is 2"),
        (register(byte_size=0), "byte_size 0"),
        (register(byte_size=(1 << 64) - 1), f"byte_size {(1 << 64) - 1}"),
        (register(name=""), "'region name' is necessary"),
        (register(name="a/b"), "forbidden characters"),
    ],
)
def test_grpc_refusals(grpc: grpc_client.Rig, message: Any, told: str) -> None:
    code, text = grpc.client.error("CudaSharedMemoryRegister", message)
    assert code == "INVALID_ARGUMENT"
    assert told in text
    assert grpc.dispatcher.coordinator.book.regions == {}


def test_without_devices(grpc: grpc_client.Rig) -> None:
    told = "failed to register CUDA shared memory region: 'r', GPUs not supported"
    grpc.dispatcher.coordinator.devices = 0
    refused = grpc.client.error("CudaSharedMemoryRegister", register(device_id=99))
    assert refused == ("INVALID_ARGUMENT", told)
    http = Http(devices=0)
    assert http_client.error_of(http.register(document()), 400) == told
    assert http.ask("GET", f"{BASE}/status").json == []
    assert http.ask("POST", f"{BASE}/unregister").status == 200
    http.close()


def test_remote_callers_register_nothing(http: Http) -> None:
    path = f"{BASE}/region/r/register"
    refused = http.client.ask("POST", path, document().encode())
    assert "client_shm_allow_remote" in http_client.error_of(refused, 403)
    assert http.client.ask("GET", f"{BASE}/status").json == []


def test_both_kinds_share_one_namespace() -> None:
    caller = Caller(0)
    dispatcher = fake_models.dispatcher()
    dispatcher.coordinator.devices = 1
    regions = SharedMemory(dispatcher, Settings())  # type: ignore[arg-type]
    regions.register(caller, "host", "/k", 0, 64)
    regions.register_cuda(caller, "gpu", HANDLE, 0, 64)
    told = {}
    for name, register in (
        ("gpu", lambda: regions.register(caller, "gpu", "/k", 0, 64)),
        ("host", lambda: regions.register_cuda(caller, "host", HANDLE, 0, 64)),
        ("as host", lambda: regions.status(caller, "gpu")),
        ("as gpu", lambda: regions.cuda_status(caller, "host")),
        ("no host", lambda: regions.status(caller, "none")),
        ("no gpu", lambda: regions.cuda_status(caller, "none")),
    ):
        with pytest.raises(ShmserveError) as caught:
            register()
        told[name] = f"{type(caught.value).__name__}: {caught.value}"
    assert told == {
        "gpu": "AlreadyExists: shared memory region 'gpu' already in manager",
        "host": "AlreadyExists: shared memory region 'host' already in manager",
        "as host": "NotFound: The region named 'gpu' is registered as CUDA shared memory,"
        " not system shared memory",
        "as gpu": "NotFound: The region named 'host' is registered as system shared memory,"
        " not CUDA shared memory",
        "no host": "NotFound: Unable to find system shared memory region: 'none'",
        "no gpu": "NotFound: Unable to find cuda shared memory region: 'none'",
    }
    regions.unregister(caller, "gpu")
    regions.unregister(caller)
    assert regions.status(caller) == []
    assert [region.name for region in regions.cuda_status(caller)] == ["gpu"]


def test_windows_need_no_alignment() -> None:
    dispatcher = fake_models.dispatcher()
    dispatcher.coordinator.devices = 1
    regions = SharedMemory(dispatcher, Settings())  # type: ignore[arg-type]
    dispatcher.coordinator.book.register(Caller(0), "host", "k", 0, 9, ObjectFacts(1, 1, 9, 0))
    regions.register_cuda(Caller(0), "gpu", HANDLE, 0, 64)
    spec = dispatcher.model("identity").spec
    found = regions.find(lambda: Caller(0), spec, RegionWindow("gpu", 3, 61))
    assert found == RegionRef(2, 3, 61)
    with pytest.raises(ShmserveError, match="Invalid offset"):
        regions.find(lambda: Caller(0), spec, RegionWindow("gpu", 3, 62))


def test_off_means_off() -> None:
    http = Http(client_shm_mode="off")
    for answer in (http.register(document()), http.ask("POST", f"{BASE}/unregister")):
        assert "client_shm_mode" in http_client.error_of(answer, 501)
    assert http.ask("GET", f"{BASE}/status").json == []
    http.close()


def test_the_extension_is_announced(http: Http, grpc: grpc_client.Rig) -> None:
    assert "cuda_shared_memory" in http.ask("GET", "/v2").json["extensions"]
    assert "cuda_shared_memory" in grpc.client.call("ServerMetadata").extensions
