"""Streams and events of the fake: see cupy/_queues.py."""

from __future__ import annotations

import threading
from typing import Any

from cupy import _queues
from cupy.cuda import runtime

_current = threading.local()
_entered = threading.local()


class _BaseStream:
    ptr: int

    @property
    def _queue(self) -> _queues.Queue:
        return _queues.get(self.ptr)

    def __enter__(self) -> Any:
        _entered.__dict__.setdefault(runtime.getDevice(), [Stream.null]).append(self)
        return self.use()

    def __exit__(self, *_: object) -> None:
        """Return to the stream entered before, and forget streams chosen by `use` meanwhile."""
        entered = _entered.__dict__[runtime.getDevice()]
        entered.pop()
        entered[-1].use()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return hash(self.ptr)

    def use(self) -> Any:
        """Make this the thread's stream for the current device."""
        _current.__dict__[runtime.getDevice()] = self
        return self

    @property
    def done(self) -> bool:
        """Return False if work is left, and do the work, so the next call returns True."""
        was_done = not self._queue.operations
        self._queue.wait()
        return was_done

    def synchronize(self) -> None:
        self._queue.wait()

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event._mark is not None:
            queue, order = event._mark
            self._queue.add(lambda: queue.run(order))


class Stream(_BaseStream):
    null: Stream

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self.ptr = 0
        if not null:
            flags = runtime.streamNonBlocking if non_blocking else runtime.streamDefault
            self.ptr = runtime.streamCreateWithFlags(flags)

    def __del__(self, destroy: Any = _queues.destroy) -> None:
        if self.ptr:
            destroy(self.ptr)


class ExternalStream(_BaseStream):
    def __init__(self, ptr: int, device_id: int = -1) -> None:
        self.ptr = ptr
        self.device_id = device_id


class Event:
    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        runtime.getDevice()
        self._mark: tuple[_queues.Queue, int] | None = None

    def record(self, stream: _BaseStream | None = None) -> None:
        queue = (stream or get_current_stream())._queue
        self._mark = queue, queue.add(lambda: None)

    @property
    def done(self) -> bool:
        """Return False if earlier work is left, and do the work, so the next call returns True."""
        if self._mark is None:
            return True
        queue, order = self._mark
        was_done = not queue.operations or queue.operations[0][0] > order
        self.synchronize()
        return was_done

    def synchronize(self) -> None:
        if self._mark is not None:
            queue, order = self._mark
            queue.wait(order)


def get_current_stream(device_id: int = -1) -> _BaseStream:
    return _current.__dict__.get(runtime.getDevice() if device_id < 0 else device_id, Stream.null)


Stream.null = Stream(null=True)
