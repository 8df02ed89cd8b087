"""GPUs in ``/metrics``: under the server's own names, and under Triton's names.

A value that the GPU lacks, or the driver does not deliver at the moment, has no sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shmserve.protocol.control.stats_messages import GpuReport


class _Value(NamedTuple):
    """A value of `GpuReport`.

    Attributes:
        field: field of `GpuReport`.
        name: end of the server's name.
        triton: Triton's name; empty if Triton has none.
        what: help text.
    """

    field: str
    name: str
    triton: str
    what: str

    @property
    def counts(self) -> bool:
        return self.name.endswith("_total")


_VALUES = (
    _Value(
        "utilization",
        "utilization_ratio",
        "nv_gpu_utilization",
        "Share of the last moments with work on the GPU",
    ),
    _Value("memory_used", "memory_used_bytes", "nv_gpu_memory_used_bytes", "GPU memory in use"),
    _Value("memory_total", "memory_total_bytes", "nv_gpu_memory_total_bytes", "GPU memory"),
    _Value("temperature", "temperature_celsius", "", "Temperature of the GPU"),
    _Value("power", "power_watts", "nv_gpu_power_usage", "Power of the GPU, in watts"),
    _Value("power_limit", "power_limit_watts", "nv_gpu_power_limit", "Power limit, in watts"),
    _Value(
        "energy",
        "energy_joules_total",
        "nv_energy_consumption",
        "Energy of the GPU since its driver was loaded, in joules",
    ),
)


def gpu_families(gpus: Sequence[GpuReport]) -> Iterator[Metric]:
    """Yield metric families under the server's names; nothing at all without GPUs."""
    for value in _VALUES if gpus else ():
        name = f"shmserve_gpu_{value.name}"
        make = CounterMetricFamily if value.counts else GaugeMetricFamily
        family = make(name, value.what, labels=("gpu_uuid", "gpu", "name"))
        for gpu in gpus:
            number = getattr(gpu, value.field)
            if number is not None:
                family.add_metric((gpu.uuid, str(gpu.index), gpu.name), number)
        yield family


def triton_gpu_lines(gpus: Sequence[GpuReport]) -> Iterator[str]:
    """Yield lines of text under Triton's names; nothing at all without GPUs."""
    for value in _VALUES if gpus else ():
        if not value.triton:
            continue
        yield f"# HELP {value.triton} {value.what}"
        yield f"# TYPE {value.triton} {'counter' if value.counts else 'gauge'}"
        for gpu in gpus:
            number = getattr(gpu, value.field)
            if number is not None:
                yield f'{value.triton}{{gpu_uuid="{gpu.uuid}"}} {number}'
