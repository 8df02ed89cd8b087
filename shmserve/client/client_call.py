"""What a client was asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from shmserve.client.tensors import ClientTensor


class ClientCall(Struct, frozen=True):
    """A request, before it is known which way it takes.

    Attributes:
        outputs: names of those that are wanted; None: all.
        timeout_s: until its answer, or the last one of a stream.
    """

    model: str
    version: str
    inputs: Sequence[ClientTensor]
    outputs: tuple[str, ...] | None
    parameters: Mapping[str, Any] | None
    request_id: str
    timeout_s: float
    receipt: bool
    device: int | None
