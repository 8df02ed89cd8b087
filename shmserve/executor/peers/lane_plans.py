"""Lane plans: the gate's findings about a request, kept for later requests of the same kind.

A plan belongs to a user and to the request's names, datatypes, shapes, sizes, windows and outputs.
Nothing is kept of number, id, time limit and bytes, and requests with parameters have no plans. A
plan with windows holds for one snapshot of the registry, so a changed or unregistered region is
noticed at once.
"""

from collections.abc import Callable, Hashable, Mapping

from msgspec import Struct

from shmserve.core.registry import Region, Snapshot
from shmserve.protocol.control.data_messages import (
    Descriptor,
    OutputPlace,
    RegionRef,
    WireTensor,
)
from shmserve.protocol.control.lane_messages import LaneRequest

_MAX_PLANS = 256
IN_MESSAGE = Descriptor(0, 0, 0, 0, 0)  # place of an input whose bytes come with each request


class LanePlan(Struct, frozen=True):
    """Prepared parts of a request.

    Attributes:
        inputs: the inputs; inputs in the message have no place yet.
        in_message: True if bytes of inputs come in the message.
        inline_bytes: number of these bytes.
        texts: index and number of elements of each BYTES input in the message.
        outputs: names of the requested outputs; empty: all.
        places: windows of outputs.
    """

    inputs: tuple[WireTensor, ...]
    in_message: bool
    inline_bytes: int
    texts: tuple[tuple[int, int], ...]
    outputs: tuple[str, ...]
    places: tuple[OutputPlace, ...]
    caller_number: int

    @property
    def has_windows(self) -> bool:
        """Return True if the plan names regions."""
        return bool(self.places) or any(isinstance(i.at, RegionRef) for i in self.inputs)


class LanePlans:
    """Plans of one model's requests, for one thread. `snapshot`: returns the current registry."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._plain: dict[Hashable, LanePlan] = {}
        self._windowed: dict[Hashable, LanePlan] = {}  # as of `_latest`
        self._latest: Snapshot | None = None

    def find(self, uid: int, message: LaneRequest) -> LanePlan | None:
        """Return the plan for a user's request, or None if the request is to be checked."""
        if message.parameters:
            return None
        key = _key(uid, message)
        plan = self._plain.get(key)
        if plan is None and self._windowed:
            plan = self._windowed.get(key)
            if plan is not None and self._snapshot() is not self._latest:
                return None
        return plan

    @property
    def regions(self) -> Mapping[str, Region]:
        """Return the current regions. Plans that were made with earlier regions are dropped."""
        snapshot = self._snapshot()
        if snapshot is not self._latest:
            self._windowed.clear()
            self._latest = snapshot
        return snapshot.regions

    def keep(self, uid: int, message: LaneRequest, plan: LanePlan) -> None:
        """Keep a plan. A plan with windows was made with the last result of `regions`."""
        plans = self._windowed if plan.has_windows else self._plain
        if len(plans) >= _MAX_PLANS:
            plans.clear()
        plans[_key(uid, message)] = plan


def _key(uid: int, message: LaneRequest) -> Hashable:
    parts: list[Hashable] = [uid, message.outputs]
    for tensor in message.inputs:  # no comprehension, which would make a function each time
        at = tensor.at
        size = len(at) if type(at) is bytes else at
        parts += (tensor.name, tensor.datatype, tensor.shape, size)
    return tuple(parts)
