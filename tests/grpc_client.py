"""A gRPC client of the generated messages, for tests in the process or against a server."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from google.protobuf.message_factory import GetMessageClass

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.frontends.grpc.callers import Callers
from shmserve.frontends.grpc.process.server import SERVICE, GrpcServer
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.testing import fake_models
from shmserve.testing.fake_dispatch import FakeDispatcher
from shmserve.testing.running_server import WATCHDOG_S
from shmserve.transport.listen_addresses import listeners, parse

PREFIX = f"/{SERVICE.full_name}/"
VALUES = np.array([1, 2, 3, 4.5], np.float32)


def tensor(
    array: np.ndarray, name: str = "INPUT0", datatype: str = "FP32", **parameters: Any
) -> pb.ModelInferRequest.InferInputTensor:
    made = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=array.shape)
    put(made.parameters, parameters)
    return made


def put(target: Any, parameters: dict[str, Any]) -> None:
    """Set parameters by their Python types; a numpy.uint64 is a uint64_param."""
    kinds = {bool: "bool", int: "int64", str: "string", float: "double", np.uint64: "uint64"}
    for key, value in parameters.items():
        setattr(target[key], f"{kinds[type(value)]}_param", value)


def request(
    array: np.ndarray = VALUES, model: str = "identity", id: str = "", **parameters: Any
) -> pb.ModelInferRequest:
    """Return an inference request with one raw input."""
    made = pb.ModelInferRequest(model_name=model, id=id, inputs=[tensor(array)])
    made.raw_input_contents.append(array.tobytes())
    put(made.parameters, parameters)
    return made


class Client:
    """Client with one channel."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        # gRPC shares connections between equal channels unless told not to.
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_reconnect_backoff_ms", 200),
        ]
        if credentials is not None:
            self.channel = grpc.secure_channel(target, credentials, options)
        else:
            self.channel = grpc.insecure_channel(target, options)

    def method(self, name: str, stream: bool = False) -> Any:
        """A callable; requests are messages or bytes."""
        make = self.channel.stream_stream if stream else self.channel.unary_unary
        found = SERVICE.methods_by_name.get(name)
        return make(
            f"{PREFIX}{name}" if found else name,
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=GetMessageClass(found.output_type).FromString if found else None,
        )

    def call(self, name: str, message: Any = b"", **options: Any) -> Any:
        options.setdefault("timeout", WATCHDOG_S)
        return self.method(name)(message, **options)

    def infer(self, message: Any = None, **options: Any) -> pb.ModelInferResponse:
        return self.call("ModelInfer", request() if message is None else message, **options)

    def error(self, name: str, message: Any = b"", **options: Any) -> tuple[str, str]:
        """Return code and details of a call that must fail."""
        try:
            answer = self.call(name, message, **options)
        except grpc.RpcError as ex:
            return ex.code().name, ex.details()
        raise AssertionError(f"no error: {answer}")

    def stream(self, messages: Iterable[Any], **options: Any) -> Any:
        options.setdefault("timeout", WATCHDOG_S)
        return self.method("ModelStreamInfer", stream=True)(iter(messages), **options)

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sender:
    """Requests of a stream, sent one by one; iteration ends with `close`."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, message: Any) -> None:
        self._items.put(message)

    def close(self) -> None:
        self._items.put(None)

    def __iter__(self) -> Iterator[Any]:
        while (item := self._items.get()) is not None:
            yield item


class OneCaller(Callers):
    """Everybody is the same."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    def of(self, context: RpcContext) -> Caller:
        return self.caller


def listen(served: GrpcServer, address: str) -> str:
    """Let a server listen at an address; return the address for clients."""
    (sock,) = listeners("grpc_bind", parse("grpc_bind", address), 128)
    return served.server.adopt(sock, None)


class Rig:
    """The real gRPC server over the fake dispatcher, and a client. `also`: an address more."""

    def __init__(
        self,
        dispatcher: FakeDispatcher | None = None,
        uid: int = 1000,
        also: str | None = None,
        **settings: Any,
    ) -> None:
        self.dispatcher = dispatcher or fake_models.dispatcher()
        self.served = GrpcServer(self.dispatcher, Settings(**settings), OneCaller(Caller(uid)))  # type: ignore[arg-type]
        self.target = listen(self.served, "127.0.0.1:0")
        if also is not None:
            listen(self.served, also)
        self.served.start()
        self.client = Client(self.target)
        self.threads = ThreadPoolExecutor(16)

    def hold(self, gate: threading.Event) -> None:
        """Have the model `identity` wait for the gate."""

        def wait(given: Any) -> Any:
            assert gate.wait(WATCHDOG_S)
            return fake_models.identity(given)

        self.dispatcher.functions["identity"] = wait

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.served.close()
        self.threads.shutdown()
