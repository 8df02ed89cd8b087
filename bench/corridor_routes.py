"""Routes measured by `bench.corridor`: a real executor and two real frontends in one process.

The executor runs the shipped native model `identity`. The HTTP frontend is gunicorn's worker with
the project's worker class, the gRPC frontend the project's server. Only the coordinator is the
stand-in of the tests. Threads that carry requests are started with a profile function, all others
without.
"""

import contextlib
import os
import socket
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import grpc
import msgspec
import numpy as np
from gunicorn.config import Config
from gunicorn.glogging import Logger

from shmserve import repository
from shmserve._generated import grpc_service_pb2 as pb
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, Snapshot
from shmserve.executor.process.__main__ import Executor
from shmserve.frontends.grpc.http2_engine.engine import SocketCallers
from shmserve.frontends.grpc.process.server import INFER, SERVICE, GrpcServer
from shmserve.frontends.http.routes.application import create_app
from shmserve.frontends.http.server.worker import ConnectionWorker
from tests.unit.rig import Rig

MODEL = Path(__file__).parent.parent / "workers" / "identity"
TENSOR = np.arange(16384, dtype=np.float32)  # 64 KiB
LIMIT_S = 30.0

EPOCH = "cafe0123"  # the stand-in's
PROCESS = f"executor-{EPOCH}"


@contextlib.contextmanager
def data_plane(profile):
    """Yield a `Rig` that serves the model, with the executor's thread under `profile`."""
    with contextlib.ExitStack() as stack:
        run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corridor-")))
        rig = Rig(run_dir)
        stack.callback(rig.close)
        (instance,) = repository.read_folder(str(MODEL)).instances()
        executor = Executor(instance, PROCESS, rig.settings)
        stack.callback(executor.memory.close)
        stack.callback(executor.status.close)

        def run():
            profile()
            executor.run()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        stack.callback(thread.join, LIMIT_S)
        stack.callback(executor.stop, "measured")
        wait_until(lambda: executor.loaded is not None)
        live = LiveInstance(instance.name, PROCESS, executor.endpoint, os.getpid())
        entry = ModelEntry(executor.loaded.spec, ModelState.READY, (live,))
        models = {instance.spec.name: {instance.spec.version: entry}}
        rig.writer.publish(Snapshot(EPOCH, 0, models=models, complete=True))
        yield rig


def wait_until(condition):
    """Raises TimeoutError after `LIMIT_S`."""
    give_up = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError("a part of the data plane did not start")
        time.sleep(0.005)


@contextlib.contextmanager
def profiled(profile):
    """Run threads started within this context under `profile`."""
    threading.setprofile(lambda *_: profile())
    try:
        yield
    finally:
        threading.setprofile(None)


# ------------------------------------------------------------------------ HTTP


class Worker(ConnectionWorker):
    """A worker in a thread: signals are for the main thread, and for processes."""

    def init_signals(self):
        pass


class Application:
    """Application object that gunicorn loads."""

    def __init__(self, rig):
        self._wsgi = create_app(rig.dispatcher, rig.settings)

    def wsgi(self):
        return self._wsgi


@contextlib.contextmanager
def http(profile):
    """Yield a function that makes one binary inference on a kept-alive connection."""
    with contextlib.ExitStack() as stack:
        rig = stack.enter_context(data_plane(profile))
        # the worker reads settings from the environment
        os.environ["SHMSERVE_RUN_DIR"] = str(rig.run_dir)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = listener.getsockname()
        configured = Config()
        worker = Worker(
            1, os.getppid(), [listener], Application(rig), 0, configured, Logger(configured)
        )
        thread = threading.Thread(target=worker.init_process, daemon=True)
        request = http_request()
        with profiled(profile):  # the worker starts the loop's thread
            thread.start()
            stack.callback(thread.join, LIMIT_S)
            stack.callback(setattr, worker, "alive", False)
            wait_until(lambda: worker.booted)
            client = stack.enter_context(socket.create_connection(address, LIMIT_S))
            ask_http(client, request)
        yield lambda: ask_whole(worker, client, request)


def http_request():
    """The request of tritonclient's `InferInput.set_data_from_numpy`, as bytes."""
    tensor = {"name": "INPUT0", "shape": TENSOR.shape, "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": TENSOR.nbytes}
    wanted = {"name": "OUTPUT0", "parameters": {"binary_data": True}}
    document = msgspec.json.encode({"inputs": [tensor], "outputs": [wanted]})
    fields = (
        f"POST /v2/models/{MODEL.name}/infer HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {len(document)}",
        f"Content-Length: {len(document) + TENSOR.nbytes}",
    )
    return "\r\n".join((*fields, "\r\n")).encode() + document + TENSOR.tobytes()


def ask_whole(worker, client, request):
    """Send a request as `ask_http` does. The loop looks only when everything has been sent, so that
    each request is received in the same number of calls."""
    sent = threading.Event()
    worker.hub.soon(partial(sent.wait, LIMIT_S))
    client.sendall(request)
    sent.set()
    receive_http(client)


def ask_http(client, request):
    client.sendall(request)
    receive_http(client)


def receive_http(client):
    answer, expected = b"", TENSOR.tobytes()
    while not answer.endswith(expected):
        received = client.recv(1 << 20)
        if not received or len(answer) > 2 * len(expected):
            raise RuntimeError(f"no answer but {answer[:500]!r}")
        answer += received
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"no success: {answer[:500]!r}")


# ------------------------------------------------------------------------ gRPC


@contextlib.contextmanager
def rpc(profile):
    """Yield a function that makes one ModelInfer on an open channel."""
    with contextlib.ExitStack() as stack:
        rig = stack.enter_context(data_plane(profile))
        served = GrpcServer(rig.dispatcher, rig.settings, SocketCallers())
        target = served.server.adopt(socket.create_server(("127.0.0.1", 0)), None)
        stack.callback(served.close)
        channel = stack.enter_context(grpc.insecure_channel(target))
        call = channel.unary_unary(f"/{SERVICE.full_name}/{INFER}")
        message = pb.ModelInferRequest(model_name=MODEL.name)
        message.inputs.add(name="INPUT0", datatype="FP32", shape=TENSOR.shape)
        message.raw_input_contents.append(TENSOR.tobytes())
        request = message.SerializeToString()

        def ask():
            answer = pb.ModelInferResponse.FromString(call(request, timeout=LIMIT_S))
            if list(answer.raw_output_contents) != [TENSOR.tobytes()]:
                raise RuntimeError("not the tensor that was sent")

        # The server's pool may start another thread at any time
        with profiled(profile):
            served.start()
            yield ask


ROUTES = {"http": http, "grpc": rpc}
