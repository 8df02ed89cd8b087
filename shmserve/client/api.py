"""`connect` and `Client`."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, overload
from weakref import WeakSet

import numpy as np

from shmserve.client import device_arrays
from shmserve.client.client_call import ClientCall
from shmserve.client.http_transport import Transport
from shmserve.client.lanes import Lanes
from shmserve.client.memory.shared_memory import SharedMemoryPools
from shmserve.client.requester import Requester
from shmserve.client.result import Result
from shmserve.client.streams import ResultStream
from shmserve.client.tensors import ClientTensor

Array = np.ndarray[Any, Any]

_LARGEST = 1 << 20


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
        self._transport.request("GET", "/v2/health/live")
        self._pools = SharedMemoryPools(self._transport, control, max_bytes, max_device_bytes)
        self._timeout_s = timeout
        on = lanes and self._pools.control is not None
        self._lanes = Lanes(self._pools.control) if on and self._pools.control else None
        self._requester = Requester(self._transport, self._pools, self._lanes)
        self._streams: WeakSet[ResultStream] = WeakSet()
        self._streams_lock = threading.Lock()

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
        tensors = [ClientTensor(name, value) for name, value in inputs.items()]
        names = None if outputs is None else tuple(outputs)
        timeout_s = timeout or self._timeout_s
        asked = (parameters, request_id, timeout_s, receipt, device)
        return ClientCall(model, version, tensors, names, *asked)

    def _check(self, device: int | None = None) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a client cannot be used across a fork: connect in the child")
        if device is not None:
            device_arrays.check(device)
