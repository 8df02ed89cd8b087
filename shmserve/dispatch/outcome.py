"""What a call reserves and what it gets."""

from __future__ import annotations

from msgspec import Struct

from shmserve.core.memory.slots import Slot
from shmserve.errors import ShmserveError
from shmserve.protocol.control.data_messages import Parameter


class Reservation:
    """A slot being written. `view`: exactly the bytes asked for."""

    __slots__ = ("slot", "view")

    def __init__(self, slot: Slot, view: memoryview) -> None:
        self.slot = slot
        self.view = view


class OutputTensor(Struct, frozen=True):
    """One output; `view` are its bytes in shared memory, valid until `Call.close`.

    An output that went into client memory has an empty view.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    view: memoryview


class Outcome(Struct, frozen=True):
    """An answer. `final` and `error` matter in streams only: `execute` raises errors."""

    outputs: tuple[OutputTensor, ...]
    parameters: dict[str, Parameter]
    final: bool = True
    error: ShmserveError | None = None
