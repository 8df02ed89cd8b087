"""Small values of `pb_utils` around a request: preferred memory, traces, release flags."""

from __future__ import annotations

import json
from enum import IntEnum


class MemoryType(IntEnum):
    """Kind of memory in which a tensor lies."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU

TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class PreferredMemory:
    """Preferred memory for the answer of a call to another model."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        if not isinstance(preferred_memory_type, MemoryType):
            raise TypeError("preferred_memory_type must be a TRITONSERVER_MEMORY_ constant")
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """Trace of a request, if the request is traced with `trace_mode = opentelemetry`."""

    def __init__(self, traceparent: str = "") -> None:
        self._traceparent = traceparent

    def get_context(self) -> str | None:
        """Return the OpenTelemetry context as JSON, an object with `traceparent`; None without a
        trace."""
        return json.dumps({"traceparent": self._traceparent}) if self._traceparent else None
