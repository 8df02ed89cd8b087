"""What one request copied and how long each stage took."""

from __future__ import annotations

from typing import Any


class Receipt:
    """Counts of one request, in bytes and nanoseconds.

    The frontend writes `copied_in`, `receive_ns`, `send_ns`; the executor's answer the
    rest. Source: the copy budget in docs/ARCHITECTURE.md.
    """

    __slots__ = (
        "compute_ns",
        "copied_batch",
        "copied_device",
        "copied_in",
        "copied_out",
        "executor",
        "queue_ns",
        "receive_ns",
        "send_ns",
    )

    def __init__(self) -> None:
        self.copied_in = 0
        self.copied_batch = 0
        self.copied_out = 0
        self.copied_device = 0
        self.receive_ns = 0
        self.queue_ns = 0
        self.compute_ns = 0
        self.send_ns = 0
        self.executor = ""

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
