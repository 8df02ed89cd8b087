"""`connect` and `Client`."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, overload
from weakref import WeakSet

import numpy as np

from shmserve.client.client_call import ClientCall
from shmserve.client.memory import device_arrays
from shmserve.client.memory.shared_pools import SharedMemoryPools
from shmserve.client.requester import Requester
from shmserve.client.result import Result
from shmserve.client.result_stream import ResultStream
from shmserve.client.service_calls import ServiceCalls
from shmserve.client.tensors import ClientTensor
from shmserve.client.wire.http_transport import Transport
from shmserve.client.wire.inference_error import InferenceError
from shmserve.client.wire.lanes import Lanes

Array = np.ndarray[Any, Any]

_LARGEST = 1 << 20
_warned: set[str] = set()  # addresses: of each it is told once
_LEAST_S = 0.001
_PLAIN = frozenset({list, tuple, int, float, bool})  # what has no dtype of its own


def connect(
    url: str,
    control: str | None = None,
    *,
    max_bytes: int = 1 << 30,
    max_device_bytes: int = 1 << 30,
    timeout: float = 300.0,
    lanes: bool = True,
    require_shared_memory: bool = False,
) -> Client:
    """Connect to a server.

    Without shared memory tensors travel over HTTP: of a server on this host a RuntimeWarning says
    so, once, and why (not with `control=""`). Where it is missing because the server is just
    starting, it is asked for again from time to time.

    Args:
        url: ``unix:/PATH`` of its HTTP socket, or ``http://HOST:PORT``.
        control: path of its client socket; "": do without shared memory. Default: the
            environment's SHMSERVE_CLIENT_SOCKET, else beside the HTTP socket or, of a server on
            this host, in the run directory that one started like this program has.
        max_bytes: shared memory that this client may have at most.
        max_device_bytes: the same of each GPU, for device arrays.
        timeout: seconds to wait for an answer, where a call says nothing else.
        lanes: talk to executors directly, where the server lets us; else all goes over HTTP.
        require_shared_memory: refuse to do without, now and in every call.

    Raises:
        InferenceError: no server answers at `url`, or there is no shared memory with it and that is
            required: it says why.
        ValueError: `url` is neither.
    """
    transport = Transport(url, timeout)
    client = Client(transport, control, max_bytes, max_device_bytes, lanes, require_shared_memory)
    why = client.why_no_shared_memory
    if why and require_shared_memory:
        client.close()
        raise InferenceError(0, f"no shared memory with the server at {url}: {why}")
    if why and control != "" and transport.is_local and url not in _warned:
        _warned.add(url)
        text = f"tensors travel over HTTP, and not through shared memory: {why}"
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:
            client.close()
            raise
    return client


class Client(ServiceCalls):
    """A connection to one server. Thread-safe; not to be used across a fork."""

    def __init__(
        self,
        transport: Transport,
        control: str | None,
        max_bytes: int,
        max_device_bytes: int,
        lanes: bool,
        require_shared_memory: bool,
    ) -> None:
        super().__init__(transport)
        transport.request("GET", "/v2/health/live")
        pools = SharedMemoryPools(transport, control, max_bytes, max_device_bytes)
        self._pools = pools
        self._lanes = Lanes(lambda: pools.control) if lanes and pools.sought else None
        self._requester = Requester(transport, pools, self._lanes, require_shared_memory)
        self._streams: WeakSet[ResultStream] = WeakSet()
        self._streams_lock = threading.Lock()

    @property
    def shared_memory(self) -> bool:
        """Whether tensors go through shared memory now; else they travel over HTTP."""
        return self._pools.on(None) is not None

    @property
    def why_no_shared_memory(self) -> str:
        """What keeps tensors from going through shared memory; "": nothing."""
        return "" if self.shared_memory else self._pools.why_not

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
                ``__cuda_array_interface__``), or lists and numbers, which get the datatype that the
                model says; elements of BYTES tensors are bytes or strings. They must not change
                until this returns.
            outputs: names of those that are wanted; default: all.
            parameters: of the request.
            version: of the model; default: the newest.
            request_id: is given back in the result.
            timeout: seconds to wait for the server.
            receipt: have `Result.receipt` tell what was copied.
            device: a GPU's ordinal: the results are CuPy arrays in its memory (BYTES: numpy's).

        Raises:
            InferenceError: the server refused or failed, or did not answer.
            ValueError: an input is no tensor, a list's numbers do not fit the model's datatype, or
                there is no such GPU.
            ImportError: a GPU is meant, and CuPy is not installed.
        """
        call = self._call(
            *(model, inputs, outputs, parameters, version, request_id, timeout, receipt, device)
        )
        return self._requester.run(call)

    def stream(
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
        max_output_bytes: int = _LARGEST,
    ) -> ResultStream:
        """Run a model that answers any number of times, such as a decoupled one; the answer of
        another is a stream of one. Arguments are those of `infer`, but for these.

        Args:
            inputs: they must not change until the stream ends.
            timeout: seconds until the stream must have ended, from its first `next` on.
            receipt: as of `infer`, for each answer; over HTTP decoupled models give none.
            max_output_bytes: of one output of one answer, where the model does not tell. Over a
                lane a larger one is an InferenceError of that answer.

        Raises:
            ValueError, ImportError: as `infer`; its InferenceErrors come from the stream.
        """
        call = self._call(
            *(model, inputs, outputs, parameters, version, request_id, timeout, receipt, device)
        )
        begin = functools.partial(self._requester.begin, call, max_output_bytes)
        stream = ResultStream(begin, self)
        with self._streams_lock:
            self._streams.add(stream)
        return stream

    def close(self) -> None:
        """End streams, unregister all memory and end the connections; results stay readable."""
        ours = os.getpid() == self._pid  # a forked child must not undo its parent's doing
        with self._streams_lock:
            streams = list(self._streams) if ours else []
        for stream in streams:
            stream.close()
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

    def _call(
        self,
        model: str,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None,
        parameters: Mapping[str, Any] | None,
        version: str,
        request_id: str,
        timeout: float | None,
        receipt: bool,
        device: int | None,
    ) -> ClientCall:
        """What `infer` and `stream` were asked; raises what is wrong with it by itself."""
        self._check(device)
        timeout_s = timeout or self._transport.timeout_s
        until = time.monotonic() + timeout_s
        tensors = self._tensors(model, version, inputs, until)
        names = None if outputs is None else tuple(outputs)
        timeout_s = max(until - time.monotonic(), _LEAST_S)
        asked = (parameters, request_id, timeout_s, receipt, device)
        return ClientCall(model, version, tensors, names, *asked)

    def _tensors(
        self, model: str, version: str, inputs: Mapping[str, Any], until: float
    ) -> list[ClientTensor]:
        """What has no datatype of its own gets the one that the model says."""
        plain = {name for name, value in inputs.items() if type(value) in _PLAIN}
        if not plain:
            return [ClientTensor(name, value) for name, value in inputs.items()]
        for again in (True, False):
            types = self._requester.input_types(model, version, until)
            try:
                return [
                    ClientTensor(name, value, types.get(name) if name in plain else None)
                    for name, value in inputs.items()
                ]
            except ValueError:
                if not again or not types:
                    raise
                self._requester.forget(model, version)  # it may have been loaded anew
        raise AssertionError("unreachable")

    def _check(self, device: int | None = None) -> None:
        self._check_process()
        if device is not None:
            device_arrays.check(device)
