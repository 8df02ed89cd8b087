"""Lazy streams of the fake driver.

An operation runs only when a wait in the order of its stream requires it. So operations that no
call waited for have not happened, and other streams do not see them. Kernels wait as well as
copies.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable

from cupy import _fake

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
FOREVER = 1 << 62


class Queue:
    """Stream: operations with numbers, which give the order over the whole process."""

    def __init__(self, device: int, number: int, blocking: bool) -> None:
        self.device = device
        self.number = number  # CUDA's number of the stream; 0 is the legacy default stream
        self.blocking = blocking
        self.operations: deque[tuple[int, Callable[[], object]]] = deque()

    def takes_turns_with(self, other: Queue) -> bool:
        """Return True if exactly one of two blocking streams of a device is the default stream."""
        one_is_default = (self.number == 0) != (other.number == 0)
        return one_is_default and self.blocking and other.blocking and self.device == other.device

    def add(self, operation: Callable[[], object]) -> int:
        with _fake.lock:
            order = next(_orders)
            self.operations.append((order, operation))
            return order

    def run(self, until: int = FOREVER) -> None:
        """Run operations up to number `until`, and all operations that must come before."""
        with _fake.lock:
            while self.operations and self.operations[0][0] <= until:
                order, operation = self.operations[0]
                for other in [q for q in list(_queues.values()) if q.takes_turns_with(self)]:
                    other.run(order - 1)
                self.operations.popleft()
                operation()

    def wait(self, until: int = FOREVER) -> None:
        _fake.enter()
        self.run(until)
        _fake.waited()


copied: Counter[int] = Counter()  # bytes really copied, by cudaMemcpyKind
_queues: dict[tuple[int, int], Queue] = {}
_orders = itertools.count(1)
_numbers = itertools.count(0x1000, 0x10)
_current = threading.local()


def create(blocking: bool) -> Queue:
    device, number = _fake.get_device(), next(_numbers)
    return _queues.setdefault((-1, number), Queue(device, number, blocking))


def destroy(number: int) -> None:
    """Destroy a stream. Its pending operations still run when the device is waited for."""
    with _fake.lock:
        if _queues[-1, number].operations:
            _queues[-1, number].add(lambda: _queues.pop((-1, number)))
        else:
            del _queues[-1, number]


def get(number: int) -> Queue:
    """Return the stream of a number; 0 is the default stream of the current device."""
    device = _fake.get_device()
    with _fake.lock:
        if number in (0, 1):
            return _queues.setdefault((device, 0), Queue(device, 0, True))
        if (-1, number) not in _queues:
            raise _fake.CUDARuntimeError(400)
        return _queues[-1, number]


def wait_device(device: int) -> None:
    _fake.enter()
    for queue in [q for q in list(_queues.values()) if q.device == device]:
        queue.run()
    _fake.waited()


def _on_device(address: int, nbytes: int) -> bool:
    """Return True for device memory. Raise an error if the allocation is too short."""
    if not address:
        raise _fake.CUDARuntimeError(1)
    if _fake.find(address) is None:
        return False
    if _fake.find(address, nbytes) is None:
        raise _fake.CUDARuntimeError(1)
    return True


def check_alive(address: int, nbytes: int) -> None:
    if nbytes and _fake.find(address, nbytes) is None:
        raise _fake.lose()


def add_copy(queue: Queue, target: int, source: int, nbytes: int, kind: int) -> int:
    """Queue a copy by address. Memory freed before the copy runs is an illegal address."""
    if nbytes == 0:
        return queue.add(lambda: None)
    to_device, from_device = _on_device(target, nbytes), _on_device(source, nbytes)
    actual = from_device * DEVICE_TO_HOST + to_device
    if kind not in (actual, DEFAULT):
        raise _fake.CUDARuntimeError(1)

    def copy() -> None:
        for address, device in ((target, to_device), (source, from_device)):
            if device:
                check_alive(address, nbytes)
        if abs(target - source) < nbytes:  # undefined
            raise _fake.lose()
        ctypes.memmove(target, source, nbytes)
        copied[actual] += nbytes

    copy.host = source if to_device else target  # type: ignore[attr-defined]
    return queue.add(copy)


def under_way(address: int, nbytes: int) -> bool:
    """Return True if a copy from or to this host memory has not happened yet."""
    operations = [operation for q in list(_queues.values()) for _, operation in q.operations]
    return any(address <= getattr(copy, "host", 0) < address + nbytes for copy in operations)
