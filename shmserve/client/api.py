"""The blocking client: `connect` and `Client`."""

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

from shmserve.client.memory import device_arrays
from shmserve.client.memory.shared_pools import SharedMemoryPools
from shmserve.client.requester import Requester
from shmserve.client.result import ClientCall, Result
from shmserve.client.result_stream import ResultStream
from shmserve.client.service_calls import ServiceCalls
from shmserve.client.tensors import ClientTensor
from shmserve.client.wire.credentials import Credentials, Secret
from shmserve.client.wire.http_transport import Transport
from shmserve.client.wire.inference_error import InferenceError
from shmserve.client.wire.lanes import Lanes
from shmserve.transport import looking

Array = np.ndarray[Any, Any]

_LARGEST = 1 << 20
_warned: set[str] = set()  # URLs of servers that a warning was given for
_LEAST_S = 0.001
_PLAIN = frozenset({list, tuple, int, float, bool})  # types without a dtype


def connect(
    url: str,
    control: str | None = None,
    *,
    max_bytes: int = 1 << 30,
    max_device_bytes: int = 1 << 30,
    timeout: float = 300.0,
    lanes: bool = True,
    require_shared_memory: bool = False,
    look_us: int | None = None,
    key: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    cert_key: str | os.PathLike[str] | None = None,
) -> Client:
    """Connect to a server.

    Without shared memory, tensors travel over HTTP. For a server on this host, a RuntimeWarning
    gives the reason, once per URL (not with `control=""`). If the client found no shared memory,
    for example because the server was still starting, the client looks again from time to time.

    Args:
        url: server address: ``unix:/PATH`` of the HTTP socket, ``http://HOST:PORT`` or
            ``https://HOST:PORT``.
        control: path of the server's client socket; "" turns shared memory off. Default: the
            environment's SHMSERVE_CLIENT_SOCKET. Without the variable, the client asks a server on
            this host, and looks beside the HTTP socket or in usual run directories.
        max_bytes: limit of this client's shared host memory, in bytes.
        max_device_bytes: limit of this client's shared memory on each GPU, in bytes.
        timeout: default seconds to wait for an answer.
        lanes: talk to executors directly if the server allows lanes; False: always use HTTP.
        require_shared_memory: fail, now and in every call, rather than go without shared memory.
        look_us: longest time, in microseconds, to poll for a lane's answer before the calling
            thread sleeps, if the last answer came as soon; 0: never. The first value in a process
            counts; in an executor, the server's setting. Default: `auto` of that setting.
        key: key to send with each request over HTTP; "": none. Default: the key in `key_file`, or
            the environment's SHMSERVE_KEY.
        key_file: path of a file with the key.
        ca: path of a PEM file with the authorities to trust for https:// servers. Default: the
            environment's SSL_CERT_FILE and SSL_CERT_DIR, or the system's authorities.
        cert: path of a PEM file with a certificate for this client, if the server asks for
            certificates.
        cert_key: path of a PEM file with the key of `cert`. Default: `cert` has the key as well.

    Raises:
        InferenceError: no server answers at `url`, or shared memory is required and not available;
            the message gives the reason.
        ValueError: `url` has another form, `look_us` is not between 0 and 1000, or a key or
            a file of TLS cannot be used.
    """
    key = None if key is None else Secret(key)
    looking.permit("auto" if look_us is None else look_us)
    credentials = Credentials(key, key_file, ca, cert, cert_key)
    transport = Transport(url, timeout, credentials)
    client = Client(transport, control, max_bytes, max_device_bytes, lanes, require_shared_memory)
    reason = client.why_no_shared_memory
    if reason and require_shared_memory:
        client.close()
        raise InferenceError(0, f"no shared memory with the server at {url}: {reason}")
    if reason and control != "" and transport.is_local and url not in _warned:
        _warned.add(url)
        text = f"tensors travel over HTTP, and not through shared memory: {reason}"
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:
            client.close()
            raise
    return client


class Client(ServiceCalls):
    """Connection to one server. Thread-safe; must not be used across a fork."""

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
        alive = transport.request("GET", "/v2/health/live")
        if alive.status == 400:
            transport.close()
            raise InferenceError(alive.status, alive.error)
        pools = SharedMemoryPools(transport, control, max_bytes, max_device_bytes)
        self._pools = pools
        self._lanes = Lanes(lambda: pools.control) if lanes and pools.sought else None
        self._requester = Requester(transport, pools, self._lanes, require_shared_memory)
        self._streams: WeakSet[ResultStream] = WeakSet()
        self._streams_lock = threading.Lock()

    @property
    def shared_memory(self) -> bool:
        """Return True if tensors go through shared memory now, False if over HTTP."""
        return self._pools.on(None) is not None

    @property
    def why_no_shared_memory(self) -> str:
        """Return the reason why tensors travel over HTTP; "" if shared memory is in use."""
        return "" if self.shared_memory else self._pools.why_not

    def device_memory(self, device: int = 0) -> bool:
        """Return True if arrays of a GPU stay there, False if arrays are copied to the host and
        back.

        Raises:
            ImportError: CuPy is not installed.
            ValueError: CUDA sees no such GPU.
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
        """Return an uninitialised array in shared memory; `infer` does not copy such an input.

        The memory is used again once neither the array nor a view is referenced. Without shared
        memory, or without room there, the array is an ordinary one.

        Args:
            shape: dimensions.
            dtype: element type.
            device: ordinal of a GPU: return a CuPy array in the memory of this GPU.

        Raises:
            ValueError: arrays of `dtype` cannot lie in shared memory, or CUDA sees no such GPU.
            ImportError: `device` is given and CuPy is not installed.
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
        pool.release(block)  # the array has its own lease
        if device is not None:  # kernels of the block's previous user may still be running
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
        """Run a model and return the outputs.

        Args:
            model: model name.
            inputs: arrays by name, on the host or on GPUs (CuPy, torch, or any array with DLPack
                or ``__cuda_array_interface__``). Lists and numbers get the datatype of the model's
                input. Elements of BYTES tensors are bytes or strings. Inputs must not change until
                `infer` returns.
            outputs: names of the requested outputs; default: all.
            parameters: request parameters.
            version: model version; default: the newest.
            request_id: id that the result repeats.
            timeout: seconds to wait for the server.
            receipt: fill `Result.receipt`, which says how many bytes were copied.
            device: ordinal of a GPU: return CuPy arrays in the memory of this GPU. BYTES outputs
                remain numpy arrays.

        Raises:
            InferenceError: the server refused, failed or did not answer.
            ValueError: an input is no tensor, numbers of a list do not fit the model's datatype,
                or CUDA sees no such GPU.
            ImportError: an input is on a GPU or `device` is given, and CuPy is not installed.
        """
        options = {"parameters": parameters, "request_id": request_id, "receipt": receipt}
        call = self._call(model, inputs, outputs, version, timeout, device, **options)
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
        """Run a model that answers any number of times, such as a decoupled model; other models
        give a stream of one answer. Arguments not listed here are those of `infer`.

        Args:
            inputs: arrays as for `infer`; must not change until the stream ends.
            timeout: seconds from the first `next` until the stream must have ended.
            receipt: fill the receipt of each answer; decoupled models give no receipt over HTTP.
            max_output_bytes: size, in bytes, of one output of one answer, for outputs whose shapes
                leave the size open. A larger output over a lane is an InferenceError for this
                answer.

        Raises:
            ValueError, ImportError: as `infer`. InferenceErrors are raised by the stream.
        """
        options = {"parameters": parameters, "request_id": request_id, "receipt": receipt}
        call = self._call(model, inputs, outputs, version, timeout, device, **options)
        begin = functools.partial(self._requester.begin, call, max_output_bytes)
        stream = ResultStream(begin, self)
        with self._streams_lock:
            self._streams.add(stream)
        return stream

    def close(self) -> None:
        """End streams, unregister all memory and close the connections; results stay readable."""
        # a forked child must leave its parent's requests and regions alone
        ours = os.getpid() == self._pid
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
        version: str,
        timeout: float | None,
        device: int | None,
        **options: Any,
    ) -> ClientCall:
        """Return the call that `infer` or `stream` describes. Raise ValueError or ImportError for
        arguments that are wrong on their own."""
        self._check(device)
        timeout_s = timeout or self._transport.timeout_s
        deadline = time.monotonic() + timeout_s
        tensors = self._tensors(model, version, inputs, deadline)
        names = None if outputs is None else tuple(outputs)
        timeout_s = max(deadline - time.monotonic(), _LEAST_S)
        return ClientCall(model, version, tensors, names, device, timeout_s, **options)

    def _tensors(
        self, model: str, version: str, inputs: Mapping[str, Any], until: float
    ) -> list[ClientTensor]:
        """Convert inputs to tensors. Lists and numbers get the datatype of the model's input."""
        if _PLAIN.isdisjoint(map(type, inputs.values())):
            return [ClientTensor(name, value) for name, value in inputs.items()]
        plain = {name for name, value in inputs.items() if type(value) in _PLAIN}
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
                # the model may have been loaded anew with other datatypes
                self._requester.forget(model, version)
        raise AssertionError("unreachable")

    def _check(self, device: int | None = None) -> None:
        self._check_process()
        if device is not None:
            device_arrays.check(device)
