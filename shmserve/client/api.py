"""`connect` and `Client`."""

from __future__ import annotations

import contextlib
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from shmserve.client.control import Control
from shmserve.client.exchange import Exchange, error_text, signature
from shmserve.client.failures import InferenceError
from shmserve.client.http import Reply, Transport
from shmserve.client.memory import Memory
from shmserve.client.result import Result
from shmserve.client.sizes import Model, Sizes
from shmserve.client.tensors import Tensor
from shmserve.errors import ShmserveError
from shmserve.protocol.client_messages import SOCKET_NAME

Array = np.ndarray[Any, Any]

CONTROL_VARIABLE = "SHMSERVE_CLIENT_SOCKET"  # the server's setting of the same meaning
_REPEATS = 3
# With these the request has ended or never begun; after others it may still be running.
_ENDED = frozenset({500, 501, 503})
_REFUSED = frozenset({400, 403, 404, 501})


def connect(
    url: str,
    control: str | None = None,
    *,
    max_bytes: int = 1 << 30,
    timeout: float = 300.0,
) -> Client:
    """Connect to a server.

    Args:
        url: ``unix:/PATH`` of its HTTP socket, or ``http://HOST:PORT``.
        control: path of its client socket; "": do without shared memory. Default: the
            environment's SHMSERVE_CLIENT_SOCKET, else beside the HTTP socket.
        max_bytes: shared memory that this client may have at most.
        timeout: seconds to wait for an answer, where a call says nothing else.

    Raises:
        InferenceError: no server answers at `url`. (A client socket that does not answer is
            no error: tensors then travel over HTTP, see `Client.shared_memory`.)
        ValueError: `url` is neither.
    """
    return Client(url, control, max_bytes, timeout)


class _Call(Struct, frozen=True):
    """What `infer` was asked. `timeout_s` 0: the client's."""

    model: str
    version: str
    inputs: Sequence[Tensor]
    outputs: tuple[str, ...]
    parameters: Mapping[str, Any] | None
    request_id: str
    timeout_s: float
    receipt: bool


class Client:
    """A connection to one server. Thread-safe; not to be used across a fork."""

    def __init__(self, url: str, control: str | None, max_bytes: int, timeout: float) -> None:
        self._pid = os.getpid()
        self._transport = Transport(url, timeout)
        self._control: Control | None = None
        self._memory: Memory | None = None
        self._models: dict[tuple[str, str], Model] = {}
        self._plain: set[str] = set()  # models that take no client memory
        self._sizes = Sizes()
        self._transport.request("GET", "/v2/health/live")
        self._share(control, max_bytes)

    @property
    def shared_memory(self) -> bool:
        """Whether tensors go through shared memory; else they travel over HTTP."""
        return self._memory is not None

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32) -> Array:
        """An array to produce an input in; what lies in it is not copied by `infer`.

        Its memory is used again when neither it nor a view of it is referenced any more.
        Without shared memory, or room in it, it is an ordinary array.
        """
        self._check()
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = np.dtype(dtype)
        if kind.hasobject or kind.itemsize == 0:
            raise ValueError(f"arrays of {kind} cannot lie in shared memory")
        nbytes = int(np.prod(dims, dtype=object)) * kind.itemsize
        block = self._memory.acquire(nbytes) if self._memory is not None and nbytes else None
        if block is None or self._memory is None:
            return np.empty(dims, kind)
        array = self._memory.array(block, 0, nbytes)
        self._memory.release(block)  # the array has a lease of its own
        shaped: Array = array.view(kind).reshape(dims)
        return shaped

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        parameters: Mapping[str, Any] | None = None,
        *,
        version: str = "",
        request_id: str = "",
        timeout: float | None = None,
        receipt: bool = False,
    ) -> Result:
        """Run a model.

        Args:
            model: its name.
            inputs: arrays by name; elements of BYTES tensors are bytes or strings. They
                must not change until this returns.
            outputs: names of those that are wanted; default: all.
            parameters: of the request.
            version: of the model; default: the newest.
            request_id: is given back in the result.
            timeout: seconds to wait for the server.
            receipt: have `Result.receipt` tell what was copied.

        Raises:
            InferenceError: the server refused or failed, or did not answer.
            ValueError: an input is no tensor.
        """
        self._check()
        tensors = [Tensor(name, value) for name, value in inputs.items()]
        described = self._model(model, version)
        names = tuple(described.outputs) if outputs is None else tuple(outputs)
        call = _Call(
            model, version, tensors, names, parameters, request_id, timeout or 0.0, receipt
        )
        return self._run(call, described)

    def close(self) -> None:
        """Unregister all memory and end the connections; results stay readable."""
        ours = os.getpid() == self._pid  # a forked child must not undo its parent's doing
        if self._memory is not None:
            self._memory.close(unregister=ours)
        if self._control is not None:
            self._control.close()
        self._transport.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -------------------------------------------------------------------- inside

    def _run(self, call: _Call, described: Model) -> Result:
        """Try, and try again where the reason of a refusal was our memory."""
        key, shapes = (call.model, call.version), signature(call.inputs)
        memory = None if call.model in self._plain else self._memory
        for repeat in range(_REPEATS + 1):
            sizes = self._sizes.expected(key, shapes, described, call.outputs)
            exchange = Exchange(memory, call.inputs, sizes)
            try:
                reply = self._send(exchange, call)
                if reply.status == 200:
                    result = exchange.result(reply, call.model)
                    self._sizes.learn(key, shapes, result)
                    return result
            finally:
                exchange.close()
            text = error_text(reply)
            ours = reply.status in _REFUSED and "shared memory" in text and exchange.shared
            if not ours or repeat == _REPEATS:
                break
            if "should be at least" in text:  # an output is larger than expected
                self._sizes.mistaken(key, call.outputs)
            elif repeat or memory is None or not self._found_again(reply, memory):
                memory = None
                if "takes no client shared memory" in text:
                    self._plain.add(call.model)
        if 400 <= reply.status < 500:  # perhaps for what we remember of the model
            self._models.pop(key, None)
        raise InferenceError(reply.status, text)

    def _send(self, exchange: Exchange, call: _Call) -> Reply:
        headers, body = exchange.request(call.parameters, call.request_id)
        if call.receipt:
            headers["shmserve-receipt"] = "1"
        path = _path(call.model, call.version) + "/infer"
        ended = False
        try:
            reply = self._transport.request("POST", path, headers, body, call.timeout_s)
            ended = reply.status < 499 or reply.status in _ENDED
            return reply
        finally:
            if not ended:
                exchange.taint()

    def _found_again(self, reply: Reply, memory: Memory) -> bool:
        """After a restart of the server: whether it knows our regions now."""
        return reply.status == 404 and memory.register_again()

    def _model(self, model: str, version: str) -> Model:
        found = self._models.get((model, version))
        if found is None:
            reply = self._transport.request("GET", _path(model, version))
            if reply.status != 200:
                raise InferenceError(reply.status, error_text(reply))
            found = Model.of(msgspec.json.decode(reply.body.data))
            self._models[model, version] = found
        return found

    def _share(self, control: str | None, max_bytes: int) -> None:
        """Use shared memory if the server we talk to over HTTP sees what we register."""
        path = _control_path(self._transport.unix_path) if control is None else control
        if not path:
            return
        try:
            self._control = Control(path)
        except ShmserveError:
            return
        memory = Memory(self._control, max_bytes)
        block = memory.acquire(1)
        if block is not None:
            memory.release(block)
            with contextlib.suppress(InferenceError):
                status = f"/v2/systemsharedmemory/region/{block.name}/status"
                if self._transport.request("GET", status).status == 200:
                    self._memory = memory
                    return
        memory.close()
        self._control.close()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a client cannot be used across a fork: connect in the child")


def _control_path(unix_path: str) -> str:
    named = os.environ.get(CONTROL_VARIABLE, "")
    if named or not unix_path:
        return named
    return os.path.join(os.path.dirname(unix_path), SOCKET_NAME)


def _path(model: str, version: str) -> str:
    path = "/v2/models/" + urllib.parse.quote(model, safe="")
    return path + "/versions/" + urllib.parse.quote(version, safe="") if version else path
