"""Names of Triton's utilities that this server has no answer for: using one says so.

They exist so that a model that merely mentions them runs.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NoReturn

from shmserve.executor.backends.triton.exceptions import TritonModelException


class MetricKind(IntEnum):
    """Kinds of custom metrics."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


COUNTER = MetricKind.COUNTER
GAUGE = MetricKind.GAUGE
HISTOGRAM = MetricKind.HISTOGRAM


class MetricFamily:
    """Custom metrics of a model."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, *_arguments: object, **_options: object) -> None:
        _refuse("MetricFamily: custom metrics of models are")


def _refuse(what: str) -> NoReturn:
    raise TritonModelException(f"{what} not supported by this server")
