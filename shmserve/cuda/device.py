"""One CUDA device, as the one executor process that uses it sees it.

Models compute on the device's default stream, where CuPy and torch work unless they are
told otherwise; inputs are brought in on a stream of their own, so that those of the next
request arrive while this one computes. Whoever lets an answer go synchronises first.
"""

from __future__ import annotations

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
    """A device in use: its streams, its memory, copies to and from it. Any thread.

    Every method makes it the calling thread's device for its time only, and raises what CUDA
    says as one of our errors.

    Attributes:
        ordinal: among the devices this process sees.
        name: of the product.
        pins: the host memory it reaches by DMA.
        lost: why the process can do nothing more on it; empty: it can.
    """

    def __init__(self, ordinal: int, mappings: MappingsApi) -> None:
        """Choose the device for the calling thread, and begin to use it.

        `mappings`: the shared memory that it may be asked to copy from and to.

        Raises:
            ConfigError: there is no such device, or no driver, or it cannot be used.
        """
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
            why = runtime.text_of(ex)
            raise ConfigError(f"CUDA device {ordinal} cannot be used: {why}") from None
        name = properties["name"]
        self.name: str = name.decode() if isinstance(name, bytes) else str(name)
        self.pins = Pins(self._runtime, self.here, mappings, read_only)

    def choose(self) -> None:
        """Make it the calling thread's device until that chooses another."""
        self._runtime.setDevice(self.ordinal)

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """In here it is the calling thread's device. A thread that had none keeps it: going back
        to the device that CUDA begins with would make a context there, of hundreds of MB."""
        cuda = self.cupy.cuda
        if self.ordinal and not cuda.driver.ctxGetCurrent():
            self.choose()
        with cuda.Device(self.ordinal):
            yield

    def synchronize(self) -> None:
        """Wait for everything that was begun on the device; raises what went wrong of it."""
        with self.working():
            self._runtime.deviceSynchronize()

    def check(self) -> None:
        """Raises if the device is lost: then every call fails. Waits for nothing."""
        with self.working():
            self._runtime.memGetInfo()

    def reaches(self, other: int) -> bool:
        """Whether memory of another device can be copied to and from this one."""
        if other == self.ordinal:
            return True
        with self.working():
            return bool(self._runtime.deviceCanAccessPeer(self.ordinal, other))

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """It is the calling thread's device in here, and what CuPy raises is told as our error."""
        try:
            with self.here():  # leaving it fails, too, if the device is lost
                yield
        except ShmserveError:
            raise
        except Exception as ex:  # also of a kernel's launch, or of making it
            raise self.failure(ex) from None

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """CuPy works on a stream in here. (Leaving `with stream:` it would forget which one a
        model had chosen with `use`.)"""
        before = self.cupy.cuda.get_current_stream()
        stream.use()
        try:
            yield
        finally:
            before.use()

    def failure(self, ex: Exception) -> ShmserveError:
        """The error to raise for one of CuPy's; what it means for the device is noted."""
        error = runtime.error_of(ex, self.ordinal)
        known = runtime.is_cuda_error(ex) or runtime.is_out_of_memory(ex)
        _log.error("%s", error.message, exc_info=None if known else ex)
        if runtime.is_lost(ex):
            self.lost = error.message
        elif runtime.is_out_of_memory(ex):
            self.free_unused()
        return error

    # ---------------------------------------------------------------- memory

    def free_unused(self) -> None:
        """Give it back what CuPy and torch keep for later."""
        with contextlib.suppress(Exception), self.here():  # the next call tells if it is lost
            runtime.free_unused()

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """A CuPy array with undefined content.

        Raises:
            ResourceExhausted: the device has no memory left.
        """
        with self.working():
            return self.cupy.empty(tuple(shape), dtype)

    def array_at(
        self, address: int, shape: Sequence[int], dtype: np.dtype[Any], owner: object, on: int
    ) -> Any:
        """A CuPy array on memory of device `on` that `owner` keeps."""
        cuda = self.cupy.cuda
        nbytes = math.prod(shape) * dtype.itemsize
        if not nbytes:
            return self.empty(shape, dtype)
        memory = cuda.UnownedMemory(address, nbytes, owner, on)
        return self.cupy.ndarray(tuple(shape), dtype, memptr=cuda.MemoryPointer(memory, 0))

    def bring(self, source: Array) -> tuple[Any, Any]:
        """Start to copy a row-major host array to new device memory, on the stream that runs
        ahead; the array, and the event to `await_copy` before it is used. The source must
        stay until then.

        Raises:
            ResourceExhausted: the device has no memory left.
        """
        array = self.room(source.shape, source.dtype)
        self.bring_to(source, array)
        return array, self.arrival()

    def room(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Device memory for `bring_to`, with undefined content; raises as `bring`."""
        with self.working(), self._on(self._ahead):
            return self.cupy.empty(tuple(shape), dtype)

    def bring_to(self, source: Array, target: Any) -> None:
        """Start to copy a row-major host array to a row-major part of a `room`; in their order."""
        with self.working():
            if source.nbytes:
                self._from_host(source, target, self._ahead.ptr)

    def arrival(self) -> Any:
        """The event to `await_copy` for everything that was begun to be brought."""
        with self.working():
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(self._ahead)
        return event

    def await_copy(self, event: Any) -> None:
        """What is computed from now on sees the copy: on the default stream, and on the one that
        CuPy uses in the calling thread."""
        with self.working():
            self.cupy.cuda.Stream.null.wait_event(event)
            self._hand_over()

    def _hand_over(self) -> None:
        """What was begun on the default stream is over for the calling thread's own as well."""
        cuda = self.cupy.cuda
        current = cuda.get_current_stream()
        if current != cuda.Stream.null:
            current.wait_event(cuda.Stream.null.record(cuda.Event(disable_timing=True)))

    def take_out(self, array: Any, target: Array) -> None:
        """Start to copy a device array to row-major host memory of the same size."""
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
        """A copy of a device array in memory of its own, once everything before is done."""
        host = np.empty(array.shape, array.dtype)
        self.take_out(array, host)
        self.synchronize()
        return host

    def put_in(self, source: Array, target: Any) -> None:
        """Start to copy a row-major host array to a device array of the same size."""
        with self.working():
            if source.nbytes:
                self._from_host(source, target, _DEFAULT_STREAM)

    def copied(self, source: Any) -> Any:
        """A copy of a device array, complete for what is computed from now on (as
        `await_copy`); the source as for `move`.

        Raises:
            ResourceExhausted: the device has no memory left.
        """
        with self.working():
            with self._on(self.cupy.cuda.Stream.null):
                copy = self.cupy.empty(source.shape, source.dtype)
            self.move(source, copy)
            self._hand_over()
        return copy

    def move(self, source: Any, target: Any) -> None:
        """Start to copy a device array to a row-major one of the same size; either may be opened
        memory of another device, which is reached from this one."""
        with self.working(), self._on(self.cupy.cuda.Stream.null):
            source = self.cupy.ascontiguousarray(source)
            if abs(source.data.ptr - target.data.ptr) < source.nbytes:
                source = source.copy()  # a model may give a part of an input of the same region
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
