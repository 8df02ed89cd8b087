"""`connect` and `Client`."""

from __future__ import annotations

import contextlib
import math
import os
import urllib.parse
from collections.abc import Mapping, Sequence, Set
from typing import Any, overload

import msgspec
import numpy as np
from msgspec import Struct

from shmserve.client import device_arrays
from shmserve.client.attempt import RequestAttempt
from shmserve.client.errors import InferenceError
from shmserve.client.http_transport import Reply, Transport
from shmserve.client.lanes import Lanes, converse
from shmserve.client.memory.block_pool import BlockPool
from shmserve.client.memory.shared_memory import SharedMemoryPools
from shmserve.client.output_sizes import ModelOutputs, OutputSizes
from shmserve.client.result import Result
from shmserve.client.tensors import ClientTensor
from shmserve.protocol.control.lane_messages import LaneAnswer

Array = np.ndarray[Any, Any]

_REPEATS = 4
# With these the request has ended or never begun; after others it may still be running.
_ENDED = frozenset({500, 501, 502, 503})
_REFUSED = frozenset({400, 403, 404, 501})
# What is said of an output that is larger than expected, and of one that is over a lane
_TOO_LARGE = ("should be at least", "no window of shared memory")
_HOST, _GPU = "host", "gpu"  # kinds of memory
_NOTHING: Set[str] = frozenset()


def connect(
    url: str,
    control: str | None = None,
    *,
    max_bytes: int = 1 << 30,
    max_device_bytes: int = 1 << 30,
    timeout: float = 300.0,
    lanes: bool = True,
) -> Client:
    """Connect to a server.

    Args:
        url: ``unix:/PATH`` of its HTTP socket, or ``http://HOST:PORT``.
        control: path of its client socket; "": do without shared memory. Default: the
            environment's SHMSERVE_CLIENT_SOCKET, else beside the HTTP socket.
        max_bytes: shared memory that this client may have at most.
        max_device_bytes: the same of each GPU, for device arrays.
        timeout: seconds to wait for an answer, where a call says nothing else.
        lanes: talk to executors directly, where the server lets us; else all goes over HTTP.

    Raises:
        InferenceError: no server answers at `url`. (A client socket that does not answer is
            no error: tensors then travel over HTTP, see `Client.shared_memory`.)
        ValueError: `url` is neither.
    """
    return Client(url, control, max_bytes, max_device_bytes, timeout, lanes)


class _Call(Struct, frozen=True):
    """What `infer` was asked. `timeout_s` 0: the client's."""

    model: str
    version: str
    inputs: Sequence[ClientTensor]
    outputs: tuple[str, ...]
    parameters: Mapping[str, Any] | None
    request_id: str
    timeout_s: float
    receipt: bool
    device: int | None


class Client:
    """A connection to one server. Thread-safe; not to be used across a fork."""

    def __init__(
        self,
        url: str,
        control: str | None,
        max_bytes: int,
        max_device_bytes: int,
        timeout: float,
        lanes: bool,
    ) -> None:
        self._pid = os.getpid()
        self._transport = Transport(url, timeout)
        self._models: dict[tuple[str, str], ModelOutputs] = {}
        self._barred: dict[str, set[str]] = {}  # kinds of memory that a model does not take
        self._sizes = OutputSizes()
        self._transport.request("GET", "/v2/health/live")
        self._pools = SharedMemoryPools(self._transport, control, max_bytes, max_device_bytes)
        self._timeout_s = timeout
        on = lanes and self._pools.control is not None
        self._lanes = Lanes(self._pools.control) if on and self._pools.control else None

    @property
    def shared_memory(self) -> bool:
        """Whether tensors go through shared memory; else they travel over HTTP."""
        return self._pools.host is not None

    def device_memory(self, device: int = 0) -> bool:
        """Whether arrays of a GPU stay there; else they are copied to the host and back.

        Raises:
            ImportError: CuPy is not installed.
            ValueError: there is no such GPU.
        """
        self._check(device)
        return self._pools.on(device) is not None

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any = ...) -> Array: ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any = ..., *, device: int | None) -> Any: ...

    def empty(
        self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: int | None = None
    ) -> Any:
        """An array to produce an input in; what lies in it is not copied by `infer`.

        Its memory is used again when neither it nor a view of it is referenced any more.
        Without shared memory, or room in it, it is an ordinary array.

        Args:
            shape: dimensions.
            dtype: of the elements.
            device: a GPU's ordinal: the array is CuPy's, in the memory of that GPU.

        Raises:
            ValueError: no such array can lie in shared memory, or there is no such GPU.
            ImportError: `device` without CuPy.
        """
        self._check(device)
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        if dtype.hasobject or dtype.itemsize == 0:
            raise ValueError(f"arrays of {dtype} cannot lie in shared memory")
        nbytes = math.prod(dims) * dtype.itemsize
        pool = self._pools.on(device)
        block = pool.acquire(nbytes) if pool is not None and nbytes else None
        if block is None or pool is None:
            if device is None:
                return np.empty(dims, dtype)
            return device_arrays.empty(dims, dtype, device)
        array = pool.array(block, 0, nbytes)
        pool.release(block)  # the array has a lease of its own
        if device is not None:  # an earlier user's kernels may still be at work on it
            device_arrays.synchronize(device)
        return array.view(dtype).reshape(dims)

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
        device: int | None = None,
    ) -> Result:
        """Run a model.

        Args:
            model: its name.
            inputs: arrays by name, on the host or on GPUs (CuPy's, torch's, any with DLPack or
                ``__cuda_array_interface__``); elements of BYTES tensors are bytes or strings.
                They must not change until this returns.
            outputs: names of those that are wanted; default: all.
            parameters: of the request.
            version: of the model; default: the newest.
            request_id: is given back in the result.
            timeout: seconds to wait for the server.
            receipt: have `Result.receipt` tell what was copied.
            device: a GPU's ordinal: the results are CuPy arrays in its memory (BYTES: numpy's).

        Raises:
            InferenceError: the server refused or failed, or did not answer.
            ValueError: an input is no tensor, or there is no such GPU.
            ImportError: a GPU is meant, and CuPy is not installed.
        """
        self._check(device)
        tensors = [ClientTensor(name, value) for name, value in inputs.items()]
        described = self._model(model, version)
        names = tuple(described.outputs) if outputs is None else tuple(outputs)
        call = _Call(
            model, version, tensors, names, parameters, request_id, timeout or 0.0, receipt, device
        )
        return self._run(call, described)

    def close(self) -> None:
        """Unregister all memory and end the connections; results stay readable."""
        ours = os.getpid() == self._pid  # a forked child must not undo its parent's doing
        if self._lanes is not None:
            self._lanes.close()
        self._pools.close(unregister=ours)
        self._transport.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, call: _Call, described: ModelOutputs) -> Result:
        """Try, and try again where the reason of a refusal was our memory."""
        key = (call.model, call.version)
        shapes = tuple(sorted([tensor.signature for tensor in call.inputs]))
        barred = self._barred.get(call.model, _NOTHING)

        def pool_of(device: int | None) -> BlockPool | None:
            kind = _HOST if device is None else _GPU
            return self._pools.on(device) if kind not in barred else None

        for repeat in range(_REPEATS + 1):
            expected = self._sizes.expected(key, shapes, described, call.outputs)
            known = self._lanes is not None and expected.known
            attempt = RequestAttempt(
                pool_of, call.inputs, expected.sizes, call.device, inline=known
            )
            reply: Reply | LaneAnswer
            try:
                answer, result = self._over_lane(attempt, call, known)
                if answer is None:
                    reply = self._send(attempt, call)
                    result = attempt.result(reply, call.model) if reply.status == 200 else None
                else:
                    reply = answer
                if result is not None:
                    self._sizes.learn(key, shapes, result)
                    return result
            finally:
                attempt.close()
            ours = reply.status in _REFUSED and attempt.is_blamed(reply.error)
            if not ours or repeat == _REPEATS:
                break
            if any(
                words in reply.error for words in _TOO_LARGE
            ):  # an output is larger than expected
                self._sizes.mistaken(key, call.outputs)
            elif repeat or reply.status != 404 or not self._pools.register_again():
                barred = barred | self._bar(call.model, attempt, reply.error)
        if 400 <= reply.status < 500:  # perhaps for what we remember of the model
            self._models.pop(key, None)
        raise InferenceError(reply.status, reply.error)

    def _bar(self, model: str, attempt: RequestAttempt, reason: str) -> set[str]:
        """Which memory to try without; what the model itself does not take is remembered."""
        if attempt.on_gpu and "CUDA" in reason:
            self._barred.setdefault(model, set()).add(_GPU)
            return {_GPU}
        if "takes no client shared memory" in reason:
            self._barred[model] = {_HOST, _GPU}
        return {_HOST, _GPU}

    def _over_lane(
        self, attempt: RequestAttempt, call: _Call, known: bool
    ) -> tuple[LaneAnswer | None, Result | None]:
        """The answer of a lane, and what it means if that is a result. None: it is not the way,
        or there is none."""
        timeout_s = call.timeout_s or self._timeout_s
        request = None
        if self._lanes is not None and known:
            request = attempt.lane_request(call.parameters, call.request_id, timeout_s)
        if self._lanes is None or request is None:
            return None, None
        key = (call.model, call.version)
        try:
            found = converse(self._lanes, key, request, attempt.shared, timeout_s)
        except BaseException:
            attempt.taint()
            raise
        if found is None:
            return None, None
        answer, opened = found
        if answer.status != 200:
            return answer, None
        return answer, attempt.lane_result(
            answer, call.model, call.request_id, opened, call.receipt
        )

    def _send(self, attempt: RequestAttempt, call: _Call) -> Reply:
        headers, body = attempt.request(call.parameters, call.request_id)
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
                attempt.taint()

    def _model(self, model: str, version: str) -> ModelOutputs:
        described = self._models.get((model, version))
        if described is None:
            reply = self._transport.request("GET", _path(model, version))
            if reply.status != 200:
                raise InferenceError(reply.status, reply.error)
            described = ModelOutputs.from_metadata(msgspec.json.decode(reply.body.data))
            self._models[model, version] = described
        return described

    def _check(self, device: int | None = None) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a client cannot be used across a fork: connect in the child")
        if device is not None:
            device_arrays.check(device)


def _path(model: str, version: str) -> str:
    path = "/v2/models/" + urllib.parse.quote(model, safe="")
    return path + "/versions/" + urllib.parse.quote(version, safe="") if version else path
