"""Host to device and back: an executor's copies, beside bare copies of CUDA's own memory."""

import contextlib
import os
import time

import cupy
import numpy as np

from bench.gpu.timing import FAKE, NO_TIMING, milliseconds, rate, ratio, summary
from bench.turns import in_turn
from shmserve.cuda.device import Device
from shmserve.shm.mappings import Mappings
from shmserve.shm.segment import Mapping, Segment

AIM = 0.9  # of the bare copy's rate
runtime = cupy.cuda.runtime


class Bare:
    """`cudaMemcpyAsync` between device memory and memory of `cudaHostAlloc`."""

    def __init__(self, stack, nbytes):
        self._nbytes = nbytes
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._host = runtime.hostAlloc(nbytes, 0)
        stack.callback(runtime.freeHost, self._host)
        self._device = runtime.malloc(nbytes)
        stack.callback(runtime.free, self._device)

    def bring(self):
        return self._copy(self._device, self._host, runtime.memcpyHostToDevice)

    def take_out(self):
        return self._copy(self._host, self._device, runtime.memcpyDeviceToHost)

    def _copy(self, target, source, kind):
        begin = time.perf_counter()
        runtime.memcpyAsync(target, source, self._nbytes, kind, self._stream.ptr)
        self._stream.synchronize()
        return time.perf_counter() - begin


class Executor:
    """The device as an executor has it, a frontend's segment (mapped read-only), one of its own,
    and memory that it knows nothing of."""

    def __init__(self, stack, nbytes):
        mappings = Mappings()
        self.device = Device(0, mappings)
        own = Segment("bench", nbytes)
        stack.callback(own.close)
        reader = own.reader_fd()
        stack.callback(os.close, reader)
        foreign = Mapping(reader, nbytes, keep=True)
        mappings.mapped(foreign.address, nbytes, writable=False, again=foreign.writable)
        mappings.mapped(own.address, nbytes, writable=True)
        for mapping in (foreign, own):
            stack.callback(mappings.unmapping, mapping.address)
        self.foreign = np.frombuffer(foreign.view, np.float32)
        self.own = np.frombuffer(own.view, np.float32)
        self.own[:] = np.arange(len(self.own), dtype=np.float32)
        self.unknown = np.array(self.own)
        self._array = cupy.asarray(self.own)

    def bring(self, source):
        begin = time.perf_counter()
        array, event = self.device.bring(source)
        event.synchronize()
        taken = time.perf_counter() - begin
        self._array = array
        return taken

    def take_out(self):
        begin = time.perf_counter()
        self.device.take_out(self._array, self.own)
        self.device.synchronize()
        return time.perf_counter() - begin

    def pin(self, array):
        """Return how an array's memory is pinned, and the seconds for pinning."""
        attribute = runtime.cudaDevAttrHostRegisterReadOnlySupported
        before = self.device.pins.nbytes
        begin = time.perf_counter()
        with self.device.pins.pinned(array.ctypes.data, array.nbytes):
            taken = time.perf_counter() - begin
        if self.device.pins.nbytes == before:
            return "not pinned", taken
        if array.flags.writeable:
            return "registered", taken
        read_only = runtime.deviceGetAttribute(attribute, 0)
        return "registered read-only" if read_only else "registered by a writable mapping", taken


def measure(nbytes, rounds):
    with contextlib.ExitStack() as stack:
        bare, executor = Bare(stack, nbytes), Executor(stack, nbytes)
        sources = {
            "segment of a frontend": executor.foreign,
            "own segment, system region": executor.own,
            "unknown memory": executor.unknown,
        }
        pinning = {name: executor.pin(array) for name, array in sources.items()}
        calls = {"bare": bare.bring, "bare, out": bare.take_out}
        calls |= {name: lambda a=array: executor.bring(a) for name, array in sources.items()}
        calls["own segment, out"] = executor.take_out
        taken = in_turn(rounds, calls)
        executor.bring(executor.foreign)
        right = np.array_equal(cupy.asnumpy(executor._array), executor.foreign)
    rows = {}
    for name, seconds in taken.items():
        base = taken["bare, out" if name.endswith("out") else "bare"]
        rows[name] = {
            "ms": summary(seconds),
            "gb_per_s": rate(nbytes, seconds),
            "rate_to_bare": ratio(base, seconds),
        }
    for name, (mode, seconds) in pinning.items():
        rows[name] |= {"pinning": mode, "pinned_in_ms": milliseconds(seconds)}
    ratios = [rows[name]["rate_to_bare"] for name in ("segment of a frontend", "own segment, out")]
    return {
        "bytes": nbytes,
        "rows": rows,
        "aim": AIM,
        "aim_met": NO_TIMING if FAKE else min(ratios) >= AIM,
        "problems": [] if right else ["wrong bytes"],
    }
