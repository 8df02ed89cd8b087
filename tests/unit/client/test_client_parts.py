"""Parts of the Python client that need no server."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

from shmserve.client import InferenceError, tensors
from shmserve.client.memory import device_arrays, shared_pools
from shmserve.client.memory.shared_pools import SharedMemoryPools
from shmserve.client.output_sizes import DescribedModel, OutputSizes
from shmserve.client.tensors import ClientTensor
from shmserve.client.wire.client_connection import ControlConnection
from shmserve.client.wire.http_transport import Reply, Transport
from shmserve.errors import Code, PeerDied, ShmserveError
from shmserve.protocol.control import client_messages
from shmserve.tensor.dtypes import DATATYPES


def test_needs_numpy_and_msgspec_only() -> None:
    """The server's dependencies may all be missing."""
    program = textwrap.dedent("""
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in (
                    "gunicorn", "falcon", "posix_ipc", "setproctitle", "google", "ml_dtypes",
                    "onnxruntime", "cupy", "prometheus_client", "grpc",
                ):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Missing())
        import shmserve.client
        from shmserve.client.tensors import ClientTensor, dtype_of
        assert dtype_of("BF16") == "uint16"
        assert ClientTensor("x", [1.5]).device is None
        top = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
        import json
        print(json.dumps(sorted(n for n in top if not n.startswith("_"))))
    """)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    # msgspec looks for typing_extensions, without needing that module. Coverage's own modules are
    # loaded when Coverage measures this test.
    allowed = {"msgspec", "numpy", "shmserve", "typing_extensions", "coverage", "$coverage"}
    assert set(json.loads(done.stdout)) <= allowed


class OnAGpu:
    """The interface of any library's array on a GPU."""

    def __dlpack__(self, **_: object) -> object:
        raise AssertionError

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


def test_a_gpu_without_cupy(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"shmserve-client\[gpu\]"):
        ClientTensor("x", OnAGpu())
    with pytest.raises(ImportError, match=r"shmserve-client\[gpu\]"):
        device_arrays.check(0)


@pytest.mark.parametrize("datatype", [d for d in DATATYPES.values() if d.itemsize])
def test_datatypes_are_the_servers(datatype) -> None:
    assert tensors.dtype_of(datatype.name) == datatype.numpy
    assert tensors.datatype_of(datatype.numpy, "x") == datatype.name
    assert tensors.nbytes_of(datatype.name, (2, 3)) == 6 * datatype.itemsize


def test_tensors_to_bytes_and_back() -> None:
    for value in (
        np.arange(12, dtype=np.float16).reshape(3, 4)[:, ::2],
        np.array([1.5, -2], ml_dtypes.bfloat16),
        np.array(7, np.int64),
        np.zeros((0, 3), np.uint8),
        np.array([[b"a", b""], ["ü".encode(), b"\0\xff"]], object),
    ):
        tensor = ClientTensor("x", value)
        memory = np.empty(tensor.nbytes, np.uint8)
        tensor.write(memory)
        assert memory.tobytes() == bytes(tensor.data())
        again = tensors.from_bytes(memory, tensor.datatype, tensor.shape, "x", "m")
        assert again.dtype == value.dtype
        assert np.array_equal(again, value)


@pytest.mark.parametrize(
    "value", [np.zeros(2, np.complex64), np.zeros(2, ">f4"), [object()], [None], ["\udc80"]]
)
def test_what_is_no_tensor(value) -> None:
    with pytest.raises(ValueError, match="'x'"):
        ClientTensor("x", value)


@pytest.mark.parametrize("shape", [(-4,), (-1,), (2, -2)])
def test_a_server_cannot_leave_a_dimension_open(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="negative dimensions"):
        tensors.from_bytes(np.zeros(16, np.uint8), "FP32", shape, "x", "m")


@pytest.mark.parametrize("url", ["localhost:8000", "https://", "http://", "ftp://a/b"])
def test_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Transport(url, 1.0)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("https://me:hidden@a:1/b", "https://a"),
        ("http://hidden@a", "http://a"),
        ("ftp://me:hidden@a", "ftp://a"),
        ("me:hidden@a:8000", "a:8000"),
        ("http://me:hidden/x@a", "http://a"),
        ("http://me:hidden@a:port", "http://a:port"),
        ("http://me:hidden\u2100@a", "http://a"),
    ],
)
def test_addresses_with_a_password(url: str, place: str) -> None:
    with pytest.raises(ValueError, match=f"address .*[ :]{place}$") as caught:
        Transport(url, 1.0)
    assert "hidden" not in str(caught.value)


def test_a_client_socket_of_nobody_who_may_serve_it(tmp_path) -> None:
    place = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(place)
        listener.listen()
        with pytest.raises(PeerDied, match="another user"):
            ControlConnection(place, {os.geteuid() + 1})


@contextmanager
def replying(path: str, reply: client_messages.FromServer, fd: int) -> Iterator[None]:
    """Serve one connection: hello, and a reply with a descriptor to each question."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                hello = client_messages.ServerHello(client_messages.VERSION, lanes=True)
                connection.send(client_messages.encode(hello))
                while connection.recv(1 << 16):
                    socket.send_fds(connection, [client_messages.encode(reply)], [fd])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        thread.join()


def test_a_failure_whose_code_only_newer_servers_know(tmp_path) -> None:
    reply = client_messages.Failed("OF_A_NEWER_SERVER", "the text")
    path = str(tmp_path / "c.sock")
    with open(os.devnull) as file, replying(path, reply, file.fileno()):
        control = ControlConnection(path)
        with pytest.raises(ShmserveError, match="the text") as failed:
            control.open_lane("m", "", 30.0)
        assert failed.value.code == Code.UNKNOWN
        control.close()


def test_a_descriptor_that_is_no_lane(tmp_path) -> None:
    reply = client_messages.LaneOpened("1", "m-1-0", False, 10**9)
    path = str(tmp_path / "c.sock")
    with open(os.devnull) as file, replying(path, reply, file.fileno()):
        control = ControlConnection(path)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(PeerDied, match="lane"):
            control.open_lane("m", "", 30.0)
        assert os.listdir("/proc/self/fd") == before
        control.close()


@pytest.mark.parametrize(("status", "user"), [(200, 77), (404, 77), (404, None)])
def test_who_may_serve_a_client_socket(tmp_path, monkeypatch, status, user) -> None:
    tried: list[object] = []

    def connect(path: str, owners: object) -> None:
        tried.append((path, owners))
        raise PeerDied("nobody")

    monkeypatch.setattr(shared_pools, "ControlConnection", connect)
    monkeypatch.delenv("SHMSERVE_CLIENT_SOCKET", raising=False)
    transport = Transport(f"unix:{tmp_path}/http.sock", 1.0)
    body = np.frombuffer(b'{"client_socket": "/told"}', np.uint8)
    monkeypatch.setattr(transport, "request", lambda *_, **__: Reply(status, {}, body, user))
    owners = {0, os.geteuid()} | ({user} if user else set())
    SharedMemoryPools(transport, None, 1, 1).close()
    told = [("/told", owners)] if status == 200 else []
    assert tried == [*told, (f"{tmp_path}/client.sock", owners)]
    tried.clear()
    SharedMemoryPools(transport, "/named", 1, 1).close()
    assert tried == [("/named", None)]


def test_a_closed_client_asks_nothing() -> None:
    transport = Transport("unix:/nonexistent/http.sock", 1.0)
    with pytest.raises(InferenceError, match="No such file"):
        transport.request("GET", "/")
    transport.close()
    for ask in (
        lambda: transport.request("GET", "/"),
        lambda: transport.events("/", b"", time.monotonic() + 1),
    ):
        with pytest.raises(InferenceError, match="the client is closed") as caught:
            ask()
        assert caught.value.status == 0


@pytest.mark.parametrize(("method", "ends", "sent"), [("GET", 1, 2), ("GET", 2, 2), ("POST", 1, 1)])
def test_only_a_get_is_sent_once_more(method: str, ends: int, sent: int) -> None:
    """A worker may die with a request that it has read."""
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def serve() -> None:
            for count in range(sent):
                peer, _ = listener.accept()
                with peer:
                    peer.recv(1 << 16)
                    if count >= ends:
                        peer.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        transport = Transport(f"http://127.0.0.1:{listener.getsockname()[1]}", 10.0)
        if sent > ends:
            assert transport.request(method, "/").body.tobytes() == b"ok"
        else:
            with pytest.raises(InferenceError, match="no answer from the server"):
                transport.request(method, "/")
        thread.join()
        transport.close()
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_sizes_are_guessed_from_shapes_or_earlier_answers() -> None:
    model = DescribedModel({"a": ("FP32", (2000,)), "b": ("FP32", (-1,)), "s": ("BYTES", (4,))})
    sizes = OutputSizes()
    names = ("a", "b", "s")
    expected = sizes.expected("m", 1, model, names)
    assert (expected.sizes, expected.known) == ({"a": 8000, "b": None, "s": None}, False)
    assert sizes.expected("m", 1, model, ("a",)).known
    answer = {"b": np.zeros(5000, np.uint8), "s": np.empty(4, object)}
    sizes.learn("m", 1, answer)
    expected = sizes.expected("m", 1, model, names)
    assert (expected.sizes, expected.known) == ({"a": 8000, "b": 5000, "s": None}, False)
    assert sizes.expected("m", 1, model, ("b",)).known
    assert not sizes.expected("m", 2, model, ("b",)).known
    described_again = DescribedModel({"b": ("FP32", (3000,))})
    assert sizes.expected("m", 2, described_again, ("b",)).sizes == {"b": 12000}
    sizes.mistaken("m", ["b"])
    expected = sizes.expected("m", 1, model, ("b",))
    assert (expected.sizes, expected.known) == ({"b": None}, False)


@pytest.mark.parametrize(
    ("value", "datatype", "dtype"),
    [
        ([1, 2], "FP32", "float32"),
        ([1, 2], "UINT8", "uint8"),
        ([1.5], "FP16", "float16"),
        (7, "INT64", "int64"),
        ([1.5], "BF16", "bfloat16"),
        ([2**63, 1], "UINT64", "uint64"),
        ([float("inf"), float("nan")], "FP32", "float32"),
        ([True], "BOOL", "bool"),
        ([True], "INT32", "bool"),  # what is of another kind is left to the server
        ([1], "BOOL", "int64"),
        (["a"], "FP32", "<U1"),
        ([1], "STRANGE", "int64"),
        (np.array([1.5]), "FP32", "float64"),  # the datatype of float64 is FP64
    ],
)
def test_lists_take_a_datatype(value: object, datatype: str, dtype: str) -> None:
    assert ClientTensor("x", value, datatype).array.dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    ("value", "datatype", "reason"),
    [
        ([1.5], "INT32", "fractions do not fit INT32"),
        ([256], "UINT8", "beyond UINT8"),
        ([-1], "UINT16", "beyond UINT16"),
        ([70000], "FP16", "beyond FP16"),
        ([1.0, 1e300], "FP32", "beyond FP32"),
    ],
)
def test_numbers_that_do_not_fit(value: object, datatype: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"'x'.*{reason}"):
        ClientTensor("x", value, datatype)
