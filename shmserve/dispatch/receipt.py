"""What one request copied and how long each stage took."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.protocol.control.data_messages import Timing

UNTIMED = Timing()
_COUNTS = 8  # fields that are sums, the first ones


class Receipt(Struct):
    """Counts of one request, in bytes and nanoseconds.

    The frontend writes `copied_in`, `receive_ns`, `send_ns`; the executor's answer the
    rest. Source: the copy budget in docs/ARCHITECTURE.md.
    """

    copied_in: int = 0
    copied_batch: int = 0
    copied_out: int = 0
    copied_device: int = 0
    receive_ns: int = 0
    queue_ns: int = 0
    compute_ns: int = 0
    send_ns: int = 0
    executor: str = ""
    timing: Timing = UNTIMED  # of the latest answer
    complete: bool = False  # all of the answer is here

    def copy_in(self, nbytes: int) -> None:
        """Count bytes of the request that the frontend has copied into slots."""
        self.copied_in += nbytes

    def copy_out(self, nbytes: int) -> None:
        """Count bytes of the answer that the frontend has copied."""
        self.copied_out += nbytes

    def finish(self) -> None:
        """All of the answer is here, of whatever executors."""
        self.complete = True

    def add(self, step: Receipt) -> None:
        """Count another one, too: that of a step of the same request."""
        for field in self.__struct_fields__[:_COUNTS]:
            setattr(self, field, getattr(self, field) + getattr(step, field))
        known = self.executor.split(", ")
        new = [name for name in step.executor.split(", ") if name not in known]
        self.executor = ", ".join(filter(None, (self.executor, *new)))

    def as_dict(self) -> dict[str, Any]:
        """The receipt as clients see it."""
        return {
            "copied_bytes": {
                "in": self.copied_in,
                "batch": self.copied_batch,
                "out": self.copied_out,
                "device": self.copied_device,
            },
            "ns": {
                "receive": self.receive_ns,
                "queue": self.queue_ns,
                "compute": self.compute_ns,
                "send": self.send_ns,
            },
            "executor": self.executor,
        }
