"""`app_monitor`, as GRPS names it: a dialect over the registry of the model's metrics."""

from __future__ import annotations

from functools import partialmethod

from shmserve.executor import custom_metrics


class Monitor:
    """Report values by name, from any thread: the mean, the largest, the smallest, the sum or the
    distribution of a second counts."""

    def _add(self, kind: str, name: str, value: float) -> None:
        custom_metrics.registry.values.add(kind, name, value)

    avg = partialmethod(_add, "avg")
    max = partialmethod(_add, "max")
    min = partialmethod(_add, "min")
    inc = partialmethod(_add, "inc")
    cdf = partialmethod(_add, "cdf")


app_monitor = Monitor()
