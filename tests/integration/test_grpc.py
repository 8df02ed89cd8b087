"""gRPC of a real server: processes, addresses, TLS, and the behaviour of clients."""

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.frontends.http2.grpc_framing import prefix
from shmserve.tensor import bytes_codec
from tests.grpc_client import Client, Sender, put, request, tensor
from tests.holding import Hold, given_up, in_flight
from tests.integration.region_client import Memory
from tests.raw_http2 import RawClient
from tests.running_server import WATCHDOG_S, RunningServer, free_port, open_fds, wait_until
from tests.servers import Server, beside, served, triton
from tests.tls_files import make_certificates

MODELS = Path(__file__).parents[1] / "repositories" / "basic"
REGION_MODELS = Path(__file__).parents[1] / "repositories" / "regions"
shared = served(MODELS, execute_timeout_s=20)


@pytest.fixture
def client(shared: RunningServer) -> Iterator[Client]:
    with Client(shared.grpc_address) as client:
        yield client


def echo(array: np.ndarray, model: str = "echo") -> pb.ModelInferRequest:
    return request(array, model, name="IN")


def command(text: str, id: str = "") -> pb.ModelInferRequest:
    return pb.ModelInferRequest(
        model_name="misbehaving",
        id=id,
        inputs=[tensor(np.zeros(1), "COMMAND", "BYTES")],
        raw_input_contents=[bytes_codec.encode([text])],
    )


def out(answer: pb.ModelInferResponse) -> np.ndarray:
    return np.frombuffer(answer.raw_output_contents[0], np.float32)


def slots(server: RunningServer) -> int:
    return len(server.show("slots"))


@pytest.mark.parametrize("floats", [0, 1, 1000, 1 << 20, 16 << 20])
def test_tensors_of_any_size(client: Client, shared: RunningServer, floats: int) -> None:
    array = np.random.default_rng(1).random(floats, dtype=np.float32)
    answer, call = client.method("ModelInfer").with_call(
        echo(array), metadata=(("shmserve-receipt", "1"),)
    )
    assert answer.raw_output_contents == [array.tobytes()]
    receipt = dict(call.trailing_metadata())["shmserve-receipt"]
    copied = json.loads(receipt)["copied_bytes"]
    if array.nbytes >= 1 << 20:
        assert (copied["in"], copied["out"]) == (0, 0)
    else:  # message to slot and slot to message, nothing else
        assert (copied["in"], copied["out"]) == (array.nbytes, array.nbytes)
    wait_until(lambda: slots(shared) == 0, "slots are left")


def test_tritonclient_sends_and_takes_large_tensors(shared: RunningServer) -> None:
    triton("sizes", shared.grpc_address, timeout_s=180)
    wait_until(lambda: slots(shared) == 0, "slots are left")


def test_http_and_grpc_are_one_server(client: Client, shared: RunningServer) -> None:
    with Memory(4096) as memory:
        client.call(
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(name="r", key=memory.name, byte_size=4096),
        )
        status, regions = shared.get("/v2/systemsharedmemory/region/r/status")
        assert (status, regions[0]["name"]) == (200, "r")
        assert shared.request("POST", "/v2/systemsharedmemory/unregister")[0] == 200
        assert not client.call("SystemSharedMemoryStatus").regions


def test_failures_of_models(client: Client, shared: RunningServer) -> None:
    code, details = client.error("ModelInfer", command("throw"))
    assert code == "INTERNAL"
    assert "no such luck" in details
    code, details = client.error("ModelInfer", command("leave"))
    assert (code, "died" in details) == ("ABORTED", True)
    wait_until(lambda: client_ok(client, command("ok")), "its executor is back")
    wait_until(lambda: slots(shared) == 0, "slots are left")


def client_ok(client: Client, message: Any) -> bool:
    try:
        return bool(client.infer(message).outputs)
    except grpc.RpcError:
        return False


def test_a_deadline_ends_the_wait_and_what_was_not_begun_never_runs(
    client: Client, shared: RunningServer, tmp_path: Path
) -> None:
    before = given_up(shared, "misbehaving")
    with Hold(tmp_path) as hold:
        running = client.method("ModelInfer").future(command(f"hold:{hold.path}"))
        hold.wait_begun()
        code, _ = client.error("ModelInfer", command("leave"), timeout=2)
        assert code == "DEADLINE_EXCEEDED"
        wait_until(lambda: given_up(shared, "misbehaving") == before + 1, "the server knows it")
    pid = shared.pids("executor misbehaving")
    assert running.result().outputs
    wait_until(lambda: slots(shared) == 0, "slots are left")
    assert client.infer(command("ok")).outputs
    assert shared.pids("executor misbehaving") == pid  # the executor was not told to leave


def test_what_was_cancelled_before_it_began_never_runs(
    client: Client, shared: RunningServer, tmp_path: Path
) -> None:
    before = given_up(shared, "misbehaving")
    with Hold(tmp_path) as hold:
        running = client.method("ModelInfer").future(command(f"hold:{hold.path}"))
        hold.wait_begun()
        waiting = client.method("ModelInfer").future(command("leave"))
        wait_until(lambda: in_flight(shared, "misbehaving/1/0") == 2, "the second waits")
        waiting.cancel()
        wait_until(lambda: given_up(shared, "misbehaving") == before + 1, "the server knows it")
    pid = shared.pids("executor misbehaving")
    assert running.result().outputs
    wait_until(lambda: slots(shared) == 0, "slots are left")
    assert client.infer(command("ok")).outputs
    assert shared.pids("executor misbehaving") == pid


def test_health_is_watched_while_an_executor_comes_and_goes(
    client: Client, shared: RunningServer
) -> None:
    request = health_pb2.HealthCheckRequest(service="echo").SerializeToString()
    watch = client.channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )(request, timeout=2 * WATCHDOG_S)
    status = health_pb2.HealthCheckResponse
    assert next(watch).status == status.SERVING
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.extend(next(watch).status for _ in range(2)))
    reader.start()

    def unwell() -> bool:
        """Kill executors until the watch notices. The first replacement comes faster than the
        watch polls; later ones take longer."""
        for pid in shared.pids("executor echo"):
            with contextlib.suppress(ProcessLookupError):  # the last one's end took a while
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        return bool(seen)

    wait_until(unwell, "the watch told nothing")
    reader.join(WATCHDOG_S)
    assert seen == [status.NOT_SERVING, status.SERVING]
    watch.cancel()


def test_a_stream_of_ordinary_requests(client: Client) -> None:
    arrays = [np.full(1000, n, np.float32) for n in range(50)]
    answers = [out(m.infer_response)[0] for m in client.stream(echo(a) for a in arrays)]
    assert answers == list(range(50))


def test_a_stream_of_small_messages_goes_on_and_on(client: Client) -> None:
    """gRPC's core sends two window updates for each answer: more than the server once forgave."""
    count, outstanding = 10_000, 4
    arrays = (np.full(4, n, np.float32) for n in range(count))
    sender = Sender()
    answers = client.stream(sender)
    for array in itertools.islice(arrays, outstanding):
        sender.send(echo(array))
    for n, message in enumerate(answers):
        assert out(message.infer_response)[0] == n
        if (array := next(arrays, None)) is not None:
            sender.send(echo(array))
        elif n == count - outstanding:
            sender.close()
    assert n == count - 1


def test_stream_clients_that_vanish_leave_nothing(shared: RunningServer) -> None:
    (pid,) = shared.pids("grpc")
    with Client(shared.grpc_address) as first:
        assert first.infer(echo(np.zeros(1 << 20, np.float32))).outputs  # segments stay
    before = open_fds(pid)
    for _ in range(3):
        with beside("-c", VANISHING, shared.grpc_address) as (told, _):
            assert told == "streaming\n"
    wait_until(lambda: slots(shared) == 0, "slots are left")
    wait_until(lambda: open_fds(pid) <= before + 2, "connections are left")


VANISHING = """
import sys, itertools, numpy as np
from tests.integration.test_grpc import echo
from tests.grpc_client import Client
array = np.zeros(1 << 20, np.float32)
client = Client(sys.argv[1])
call = client.stream(echo(array) for _ in itertools.count())
next(call)
print("streaming", flush=True)
for answer in call:
    pass
"""


def test_a_slow_reader_disturbs_nobody(client: Client, shared: RunningServer) -> None:
    array = np.zeros(1 << 20, np.float32)
    with Client(shared.grpc_address) as slow:
        call = slow.stream(echo(array) for _ in range(20))
        next(call)
        for _ in range(20):
            assert client.infer(echo(np.zeros(9, np.float32))).outputs
        assert sum(1 for _ in call) == 19


# ------------------------------------------------------------------ processes


def test_a_killed_process_is_back_and_costs_nobody_else_anything(
    threads: ThreadPoolExecutor,
) -> None:
    with Server(MODELS) as server:
        (victim,) = server.pids("grpc")
        stop, counts, codes = threading.Event(), {"right": 0}, set()

        def ask() -> None:
            with Client(server.grpc_address) as client:
                array = np.full(100_000, 7, np.float32)
                while not stop.is_set():
                    try:
                        assert out(client.infer(echo(array)))[0] == 7
                        counts["right"] += 1
                    except grpc.RpcError as ex:
                        codes.add(ex.code().name)
                        time.sleep(0.02)

        tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}
        load = [threads.submit(ask) for _ in range(4)]
        try:
            wait_until(lambda: counts["right"] > 50, "answers")
            os.kill(victim, signal.SIGKILL)
            while not server.pids("grpc") or victim in server.pids("grpc"):
                status, answer = server.infer("echo", {"inputs": [tensor]})
                assert status == 200, answer
            seen = counts["right"]
            wait_until(lambda: counts["right"] > seen + 50, "answers afterwards")
        finally:
            stop.set()
        for client in load:
            client.result()
        assert codes == {"UNAVAILABLE"}
        wait_until(lambda: slots(server) == 0, "slots are left")
        server.wait_linked()
        roles = [row["role"] for row in server.show("processes")]
        assert roles.count("grpc") == 1


def test_a_process_killed_within_a_tensor_leaves_nothing() -> None:
    array = np.zeros(4 << 20, np.float32)
    data = echo(array).SerializeToString()
    with Server(MODELS) as server:
        (victim,) = server.pids("grpc")
        raw = RawClient(server.grpc_address)
        raw.call(None)
        sent = prefix(len(data)) + data[:40_000]
        for start in range(0, len(sent), 16_000):
            raw.send(0, 0, 1, sent[start : start + 16_000])
        wait_until(lambda: held(server, victim) >= array.nbytes, "its tensor has a slot")
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: server.pids("grpc") not in ([], [victim]), "another one is there")
        wait_until(lambda: not held(server, victim), "its memory is given back")
        with Client(server.grpc_address) as client:
            wait_until(lambda: client_ok(client, echo(array)), "it serves")
        raw.close()


def held(server: RunningServer, pid: int) -> int:
    """Return the bytes of the pool that a process holds."""
    return sum(row["held_bytes"] for row in server.show("processes") if row["pid"] == pid)


def test_several_processes_share_an_address() -> None:
    unix = f"/tmp/shmserve-test-{os.getpid()}.sock"
    address = f"127.0.0.1:{free_port()}"
    binds = f"{address},unix:{unix}"
    with Server(MODELS, grpc_processes=2, grpc_bind=binds) as server:
        wait_until(lambda: server.log().count("listening on") == 2, "both listen")
        array = np.arange(5, dtype=np.float32)
        clients = [Client(address) for _ in range(16)]
        for client in clients:
            assert out(client.infer(echo(array))).tolist() == array.tolist()
        served = {row["process"]: row for row in server.show("processes") if row["role"] == "grpc"}
        assert len(served) == 2
        with Client(f"unix:{unix}") as local:
            assert out(local.infer(echo(array))).tolist() == array.tolist()
        os.kill(server.pids("grpc 0")[0], signal.SIGKILL)  # leaves the socket file behind
        wait_until(lambda: server.log().count("listening on") == 3, "it is back")
        with Client(f"unix:{unix}") as local:
            assert out(local.infer(echo(array))).tolist() == array.tolist()
        for client in clients:
            client.close()
    assert not os.path.exists(unix)


def test_another_supervisor_adopts_the_process() -> None:
    with Server(MODELS) as server, Client(server.grpc_address) as client:
        (pid,) = server.pids("grpc")
        (supervisor,) = server.pids("supervisor")
        os.kill(supervisor, signal.SIGKILL)
        wait_until(lambda: server.log().count("adopted grpc 0") == 1, "it is adopted")
        assert client.infer(echo(np.zeros(3, np.float32))).outputs
        assert server.pids("grpc") == [pid]
        os.kill(pid, signal.SIGKILL)  # not the new one's child
        wait_until(lambda: client_ok(client, echo(np.zeros(3, np.float32))), "another")


def test_large_messages_leave_no_memory() -> None:
    """gRPC's core frees memory, but the C library would keep it."""
    array = np.zeros(4 << 20, np.float32)

    def work(address: str) -> None:
        with Client(address) as client:
            for _ in range(2):
                assert client.infer(echo(array)).outputs

    with Server(MODELS, segment_idle_s=1, request_timeout_s=60) as server:
        (pid,) = server.pids("grpc")
        before = anonymous_mib(pid)
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, [server.grpc_address] * 16))
        wait_until(lambda: anonymous_mib(pid) < before + 200, "the memory was kept")


def anonymous_mib(pid: int) -> int:
    told = Path(f"/proc/{pid}/status").read_text()
    return int(told.partition("RssAnon:")[2].split()[0]) >> 10


def test_no_processes() -> None:
    with Server(MODELS, grpc_processes=0) as server:
        assert server.pids("grpc") == []


def test_a_stop_finishes_what_was_accepted(tmp_path: Path) -> None:
    with (
        Server(MODELS, drain_timeout_s=60) as server,
        Client(server.grpc_address) as client,
        Hold(tmp_path) as hold,
    ):
        assert client.infer(command("ok")).outputs
        sender = Sender()
        idle = client.stream(sender)  # delays no other caller
        sender.send(command("ok"))
        next(idle)
        running = client.method("ModelInfer").future(command(f"hold:{hold.path}"))
        hold.wait_begun()
        assert server.master is not None
        server.master.send_signal(signal.SIGTERM)
        server.wait_log("shmserve.grpc: draining")
        hold.let_go()
        assert running.result().outputs
        assert server.stop() == 0
        assert "did not end within drain_timeout_s" not in server.log()
        sender.close()


# ------------------------------------------------------------------ regions


def test_region_to_region_copies_nothing() -> None:
    size, floats = 1 << 20, 1 << 18
    with (
        Server(REGION_MODELS) as server,
        Client(server.grpc_address) as client,
        Memory(size) as source,
        Memory(size) as target,
    ):
        values = np.arange(floats, dtype=np.float32)
        source.put(values)
        for name, memory in (("in", source), ("out", target)):
            client.call(
                "SystemSharedMemoryRegister",
                pb.SystemSharedMemoryRegisterRequest(name=name, key=memory.name, byte_size=size),
            )
        message = pb.ModelInferRequest(
            model_name="touch",
            inputs=[tensor(values, "IN", shared_memory_region="in", shared_memory_byte_size=size)],
            outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="OUT")],
        )
        put(
            message.outputs[0].parameters,
            {"shared_memory_region": "out", "shared_memory_byte_size": size},
        )
        answer, call = client.method("ModelInfer").with_call(
            message, metadata=(("shmserve-receipt", "1"),)
        )
        assert answer.raw_output_contents == [b""]
        receipt = dict(call.trailing_metadata())["shmserve-receipt"]
        assert '"copied_bytes":{"in":0,"batch":0,"out":0,"device":0}' in receipt
        np.testing.assert_array_equal(target.get(floats), values + 1)


# ------------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate authority, and certificates for the server and a client."""
    return make_certificates(tmp_path_factory.mktemp("tls"), "server", "client")


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("mutual", [False, True])
def test_tls(certificates: Path, mutual: bool) -> None:
    def read(name: str) -> bytes:
        return (certificates / name).read_bytes()

    anonymous = grpc.ssl_channel_credentials(read("ca.pem"))
    known = grpc.ssl_channel_credentials(read("ca.pem"), read("client.key"), read("client.pem"))
    large = np.arange(300_000, dtype=np.float32)
    message = echo(large[:3])
    with Server(
        MODELS,
        grpc_tls_cert=certificates / "server.pem",
        grpc_tls_key=certificates / "server.key",
        grpc_tls_client_ca=certificates / "ca.pem" if mutual else "",
    ) as server:
        with Client(server.grpc_address, known) as client:
            assert out(client.infer(message)).tolist() == [0, 1, 2]
            assert np.array_equal(out(client.infer(echo(large))), large)
        with Client(server.grpc_address, anonymous) as client:
            if mutual:
                assert client.error("ModelInfer", message)[0] == "UNAVAILABLE"
            else:
                assert client.infer(message).outputs
        with Client(server.grpc_address) as client:
            assert client.error("ModelInfer", message)[0] == "UNAVAILABLE"
