"""`app_monitor`, the GRPS interface to the metrics of a model."""

from __future__ import annotations

from functools import partialmethod

from shmserve.executor import custom_metrics


class Monitor:
    """Reporter of values by name, for any thread. The kinds are aggregated per second: average,
    maximum, minimum, sum and distribution."""

    def _add(self, kind: str, name: str, value: float) -> None:
        custom_metrics.registry.values.add(kind, name, value)

    avg = partialmethod(_add, "avg")
    max = partialmethod(_add, "max")
    min = partialmethod(_add, "min")
    inc = partialmethod(_add, "inc")
    cdf = partialmethod(_add, "cdf")


app_monitor = Monitor()
