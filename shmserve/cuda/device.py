"""CUDA device, as used by one executor process.

Models compute on the device's default stream, which CuPy and torch use by default. Inputs are
copied on a separate stream, so that inputs of the next request arrive during the computation. The
device must be synchronised before an answer is sent.
"""

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shmserve.cuda import runtime
from shmserve.cuda.pins import MappingsApi, Pins
from shmserve.errors import ConfigError, ShmserveError

_log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]
_DEFAULT_STREAM = 0


class Device:
    """Device in use: streams, memory, copies to and from the device. Thread-safe.

    Every method switches the calling thread to this device for the duration of the call, and
    raises CUDA errors as ShmserveErrors.

    Attributes:
        ordinal: number among the devices that this process sees.
        name: product name.
        pins: host memory pinned for DMA.
        lost: reason why the device is unusable in this process; "": usable.
    """

    def __init__(self, ordinal: int, mappings: MappingsApi) -> None:
        """Start to use a device and choose it for the calling thread. `mappings`: shared memory
        that tensors are copied from and to. Raise ConfigError if the device or the driver is
        missing or cannot be used."""
        self.cupy = runtime.cupy()
        self._runtime = self.cupy.cuda.runtime
        self.ordinal = ordinal
        self.lost = ""
        try:
            count = int(self._runtime.getDeviceCount())
            if ordinal >= count:
                raise ConfigError(f"CUDA device {ordinal} is not there: CUDA sees {count}")
            self._runtime.setDevice(ordinal)
            self._ahead = self.cupy.cuda.Stream(non_blocking=True)
            properties = self._runtime.getDeviceProperties(ordinal)
            read_only = bool(
                self._runtime.deviceGetAttribute(
                    self._runtime.cudaDevAttrHostRegisterReadOnlySupported, ordinal
                )
            )
        except self._runtime.CUDARuntimeError as ex:
            reason = runtime.text_of(ex)
            raise ConfigError(f"CUDA device {ordinal} cannot be used: {reason}") from None
        name = properties["name"]
        self.name: str = name.decode() if isinstance(name, bytes) else str(name)
        self.pins = Pins(self._runtime, self.here, mappings, read_only)

    def choose(self) -> None:
        """Make the device current for the calling thread, until the thread chooses another."""
        self._runtime.setDevice(self.ordinal)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Make the device current for the calling thread within the context.

        A thread that had no device keeps this device afterwards. Switching back to CUDA's initial
        device would create a context of hundreds of MB there.
        """
        cuda = self.cupy.cuda
        if self.ordinal and not cuda.driver.ctxGetCurrent():
            self.choose()
        with cuda.Device(self.ordinal):
            yield

    def synchronize(self) -> None:
        """Wait for all work on the device, and raise its error, if any."""
        with self.working():
            self._runtime.deviceSynchronize()

    def check(self) -> None:
        """Raise if the device is lost: every CUDA call then fails. Waits for no work."""
        with self.working():
            self._runtime.memGetInfo()

    def reaches(self, other: int) -> bool:
        """Return True if memory of another device can be copied to and from this device."""
        if other == self.ordinal:
            return True
        with self.working():
            return bool(self._runtime.deviceCanAccessPeer(self.ordinal, other))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Make the device current within the context. CuPy's exceptions become ShmserveErrors."""
        try:
            with self.here():  # leaving the context fails, too, if the device is lost
                yield
        except ShmserveError:
            raise
        except Exception as ex:  # includes errors of compiling or launching a kernel
            raise self.failure(ex) from None

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Make a stream CuPy's current stream within the context. `with stream:` would lose the
        stream that a model has chosen with `use`."""
        before = self.cupy.cuda.get_current_stream()
        stream.use()
        try:
            yield
        finally:
            before.use()

    def failure(self, ex: Exception) -> ShmserveError:
        """Return the error to raise in place of an exception of CuPy. Record a lost device, and
        free cached memory after running out of memory."""
        error = runtime.error_of(ex, self.ordinal)
        is_expected = runtime.is_cuda_error(ex) or runtime.is_out_of_memory(ex)
        _log.error("%s", error.message, exc_info=None if is_expected else ex)
        if runtime.is_lost(ex):
            self.lost = error.message
        elif runtime.is_out_of_memory(ex):
            self.free_unused()
        # A traceback keeps device memory: frames hold arrays, and a frame of contextlib holds `ex`.
        ex.__traceback__ = None
        return error

    # ---------------------------------------------------------------- memory

    def free_unused(self) -> None:
        """Release the device memory that CuPy and torch keep cached."""
        # the next call raises if the device is lost
        with contextlib.suppress(Exception), self.here():
            runtime.free_unused()

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised CuPy array. Raise ResourceExhausted without device memory."""
        with self.working():
            return self.cupy.empty(tuple(shape), dtype)

    def array_at(
        self, address: int, shape: Sequence[int], dtype: np.dtype[Any], owner: object, on: int
    ) -> Any:
        """Return a CuPy array on memory of device `on` that `owner` keeps alive."""
        cuda = self.cupy.cuda
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return self.empty(shape, dtype)
        memory = cuda.UnownedMemory(address, nbytes, owner, on)
        return self.cupy.ndarray(tuple(shape), dtype, memptr=cuda.MemoryPointer(memory, 0))

    def bring(self, source: Array) -> tuple[Any, Any]:
        """Start to copy a row-major host array to new device memory, on the copy stream. Return the
        array, and the event for `await_copy`. The source must stay valid until then. Raise
        ResourceExhausted if the device has no memory left."""
        array = self.room(source.shape, source.dtype)
        self.bring_to(source, array)
        return array, self.arrival()

    def room(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised device array for `bring_to`; raises as `bring`."""
        with self.working(), self._on(self._ahead):
            return self.cupy.empty(tuple(shape), dtype)

    def bring_to(self, source: Array, target: Any) -> None:
        """Start to copy a row-major host array to a row-major part of a `room`, in call order."""
        with self.working():
            if source.nbytes:
                self._from_host(source, target, self._ahead.ptr)

    def arrival(self) -> Any:
        """Return an event for `await_copy` that covers all copies started on the copy stream."""
        with self.working():
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(self._ahead)
        return event

    def await_copy(self, event: Any) -> None:
        """Order later work after a copy, on the default stream and the thread's current stream."""
        with self.working():
            self.cupy.cuda.Stream.null.wait_event(event)
            self._hand_over()

    def _hand_over(self) -> None:
        """Order the calling thread's current stream after the default stream's work so far."""
        cuda = self.cupy.cuda
        current = cuda.get_current_stream()
        if current != cuda.Stream.null:
            current.wait_event(cuda.Stream.null.record(cuda.Event(disable_timing=True)))

    def take_out(self, array: Any, target: Array) -> None:
        """Start to copy a device array to row-major host memory of equal size."""
        with self.working(), self._on(self.cupy.cuda.Stream.null):
            array = self.cupy.ascontiguousarray(array)
            if array.nbytes:
                address = target.__array_interface__["data"][0]
                kind = self._runtime.memcpyDeviceToHost
                with self.pins.pinned(address, array.nbytes) as address:
                    self._runtime.memcpyAsync(
                        address, array.data.ptr, array.nbytes, kind, _DEFAULT_STREAM
                    )

    def to_host(self, array: Any) -> Array:
        """Wait for all earlier work and return a copy of a device array in new host memory."""
        host = np.empty(array.shape, array.dtype)
        self.take_out(array, host)
        self.synchronize()
        return host

    def put_in(self, source: Array, target: Any) -> None:
        """Start to copy a row-major host array to a device array of equal size."""
        with self.working():
            if source.nbytes:
                self._from_host(source, target, _DEFAULT_STREAM)

    def copied(self, source: Any) -> Any:
        """Return a copy of a device array, complete for later computations (as after `await_copy`).
        The source may be on another device, as for `move`. Raise ResourceExhausted if the device
        has no memory left."""
        with self.working():
            with self._on(self.cupy.cuda.Stream.null):
                copy = self.cupy.empty(source.shape, source.dtype)
            self.move(source, copy)
            self._hand_over()
        return copy

    def move(self, source: Any, target: Any) -> None:
        """Start to copy a device array to a row-major device array of equal size. Either array may
        be opened memory of another device, if this device reaches it."""
        with self.working(), self._on(self.cupy.cuda.Stream.null):
            source = self.cupy.ascontiguousarray(source)
            if abs(source.data.ptr - target.data.ptr) < source.nbytes:
                # overlap: the model may return a part of an input in the output's region
                source = source.copy()
            if source.nbytes:
                self._runtime.memcpyAsync(
                    target.data.ptr, source.data.ptr, source.nbytes,
                    self._runtime.memcpyDeviceToDevice, _DEFAULT_STREAM,
                )  # fmt: skip

    def _from_host(self, source: Array, target: Any, stream: int) -> None:
        address = source.__array_interface__["data"][0]
        kind = self._runtime.memcpyHostToDevice
        with self.pins.pinned(address, source.nbytes) as address:
            self._runtime.memcpyAsync(target.data.ptr, address, source.nbytes, kind, stream)
