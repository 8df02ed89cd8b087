"""Call of a client: the arguments of `infer` or `stream`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from shmserve.client.tensors import ClientTensor


class ClientCall(Struct, frozen=True):
    """Request before a lane or HTTP is chosen.

    Attributes:
        outputs: names of the requested outputs; None: all.
        timeout_s: seconds until the answer, or the last answer of a stream, is due.
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
