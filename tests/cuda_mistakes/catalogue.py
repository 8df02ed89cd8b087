"""Plausible mistakes in `shmserve/cuda` and around it, each a small substitution.

Mistakes are only applied to a copy of the tree (`python -m tests.cuda_mistakes`).
"""

from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).parent / "README.md"  # with the table of mistakes, and of what caught them
MARK = "<!-- the table, by `make cuda-mistakes` -->"
HEAD = ("mistake", "kind", "in", "caught on the fake by", "caught over the stand-in by")
DEVICE, PINS, IPC = (f"shmserve/cuda/{name}.py" for name in ("device", "pins", "ipc"))
REGION = "shmserve/executor/tensors/cuda_region.py"


@dataclass(frozen=True)
class Mistake:
    """Substitution of `before`, which occurs once in `file`.

    `tests`: files of tests/cuda that could notice, by their names without "test_".
    """

    name: str
    kind: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...] = ("device", "running")


MISTAKES = (
    Mistake(
        "models do not wait for the copies of their inputs", "missing wait", DEVICE,
        "            self.cupy.cuda.Stream.null.wait_event(event)\n", "            pass\n",
    ),
    Mistake(
        "a thread with a stream of its own does not wait for the default one", "missing wait",
        DEVICE, "            current.wait_event(", "            bool(",
    ),
    Mistake(
        "an answer is let go before the device has written it", "missing wait", DEVICE,
        "            self._runtime.deviceSynchronize()\n", "            pass\n",
    ),
    Mistake(
        "a client's copy is used before it is there", "missing wait",
        "shmserve/client/memory/device_arrays.py",
        "            cupy().cuda.get_current_stream().synchronize()\n", "            pass\n",
        ("client_arrays", "client_memory"),
    ),
    Mistake(
        "ONNX Runtime begins before its inputs are there", "missing wait",
        "shmserve/executor/backends/onnx/tensor_places.py",
        "            cuda.Stream.null.synchronize()\n", "            pass\n",
        ("onnx_on_device",),
    ),
    Mistake(
        "inputs are copied on the default stream, and awaited on another", "wrong stream", DEVICE,
        "                self._from_host(source, target, self._ahead.ptr)",
        "                self._from_host(source, target, _DEFAULT_STREAM)",
        ("device", "running", "batches"),
    ),
    Mistake(
        "an array is copied out by its count of elements", "wrong size", DEVICE,
        "array.data.ptr, array.nbytes, kind,", "array.data.ptr, array.size, kind,",
    ),
    Mistake(
        "an array on opened memory is said to be larger", "wrong size", DEVICE,
        "memory = cuda.UnownedMemory(address, nbytes, owner, on)",
        "memory, shape = cuda.UnownedMemory(address, nbytes, owner, on), (2, *shape)",
    ),
    Mistake(
        "the rest of an allocation counts from its base", "wrong size", IPC,
        "return base.value + size.value - address", "return size.value",
        ("sizes_and_lifetimes", "device"),
    ),
    Mistake(
        "half of a mapping is registered", "wrong size", PINS,
        "self._runtime.hostRegister(pin.address, mapped.size, flags)",
        "self._runtime.hostRegister(pin.address, mapped.size // 2, flags)",
        ("sizes_and_lifetimes", "device"),
    ),
    Mistake(
        "windows are not checked against their region", "out of bounds", REGION,
        "if not 0 <= nbytes <= at.nbytes or at.offset < 0 or at.offset + nbytes > size:",
        "if size < 0:",
        ("device", "running", "region_frontends"),
    ),
    Mistake(
        "handles are never closed", "leaked handle", IPC,
        "        weakref.finalize(imported, _close, self._device, address).atexit = False\n", "",
    ),
    Mistake(
        "the same handle is opened for each request", "leaked handle", IPC,
        "                self._open[handle] = imported\n",
        "                self.__dict__.setdefault('_all', []).append(imported)\n",
        ("device", "sizes_and_lifetimes"),
    ),
    Mistake(
        "memory stays registered when it is unmapped", "leaked registration", PINS,
        "                    self._runtime.hostUnregister(pin.address)\n",
        "                    pass\n",
    ),
    Mistake(
        "a client never frees its memory", "leaked memory",
        "shmserve/client/memory/device_blocks.py",
        "            cupy.cuda.runtime.free(address)\n", "            pass\n",
        ("client_memory", "client_arrays"),
    ),
    Mistake(
        "a region is closed while a model has arrays of it", "freed too early", REGION,
        "self.device.array_at(address, shape, dtype, self._imported, self.ordinal)",
        "self.device.array_at(address, shape, dtype, None, self.ordinal)",
        ("sizes_and_lifetimes", "running"),
    ),
    Mistake(
        "a client's memory is freed while its arrays live", "freed too early",
        "shmserve/client/memory/device_blocks.py",
        "cupy.cuda.UnownedMemory(self.address, self.size, alive, self._kind.device)",
        "cupy.cuda.UnownedMemory(self.address, self.size, None, self._kind.device)",
        ("client_memory", "client_arrays"),
    ),
    Mistake(
        "memory is unregistered while it is copied from", "freed too early", PINS,
        "                        self._runtime.deviceSynchronize()  # copies may be running\n",
        "                        pass\n",
    ),
    Mistake(
        "memory of another process is closed twice", "double close", IPC,
        "            cuda.ipcCloseMemHandle(address)\n",
        "            for _ in range(2):\n                cuda.ipcCloseMemHandle(address)\n",
        ("sizes_and_lifetimes", "device"),
    ),
    Mistake(
        "work goes to whatever device the thread has", "wrong device", DEVICE,
        "        with cuda.Device(self.ordinal):\n", "        with contextlib.nullcontext():\n",
        ("sizes_and_lifetimes", "device", "running"),
    ),
    Mistake(
        "a client allocates on whatever device it has", "wrong device",
        "shmserve/client/memory/device_blocks.py",
        "        with cupy.cuda.Device(device):\n            self.address",
        "        if cupy:\n            self.address",
        ("sizes_and_lifetimes", "client_memory"),
    ),
    Mistake(
        "memory of another device is used where it lies", "wrong device", REGION,
        "return aligned and self.ordinal == self.device.ordinal", "return aligned",
        ("device", "running"),
    ),
    Mistake(
        "an answer is copied as if it went to the device", "wrong kind", DEVICE,
        "                kind = self._runtime.memcpyDeviceToHost\n",
        "                kind = self._runtime.memcpyHostToDevice\n",
    ),
    Mistake(
        "memory that may only be read is registered as writable", "wrong flags", PINS,
        "_PORTABLE if mapped.writable or not self._read_only else _PORTABLE | _READ_ONLY",
        "_PORTABLE",
    ),
    Mistake(
        "a part moves within its region over itself", "overlap", DEVICE,
        "            if abs(source.data.ptr - target.data.ptr) < source.nbytes:\n",
        "            if source.nbytes < 0:\n",
    ),
    Mistake(
        "a lost device is taken for a refused request", "unnoticed error",
        "shmserve/cuda/runtime.py",
        'return is_cuda_error(ex) and getattr(ex, "status", 0) in _LOST', "return False",
    ),
)  # fmt: skip
