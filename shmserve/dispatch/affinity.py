"""Which GPU a request's memory is on: an instance there works on it without a copy."""

from __future__ import annotations

from collections import Counter

from shmserve.core.registry import Snapshot
from shmserve.protocol.control.data_messages import Execute, RegionRef


class Affinity:
    """Finds it in the published regions, which it sorts by number once for each snapshot."""

    def __init__(self) -> None:
        self._known: tuple[Snapshot | None, dict[int, str]] = (None, {})

    def device(self, snapshot: Snapshot, message: Execute) -> str:
        """``cuda:0`` or the like: where most bytes of CUDA regions that the request names lie;
        empty: it names none."""
        devices = self._devices(snapshot)
        if not devices:
            return ""
        inputs = [t.at for t in message.inputs if isinstance(t.at, RegionRef)]
        nbytes: Counter[str] = Counter()
        for at in [*inputs, *(place.at for place in message.places)]:
            if at.region in devices:
                nbytes[devices[at.region]] += at.nbytes
        return max(nbytes, key=nbytes.__getitem__, default="")

    def _devices(self, snapshot: Snapshot) -> dict[int, str]:
        known, devices = self._known
        if known is not snapshot:
            regions = snapshot.regions.values()
            devices = {r.number: f"cuda:{r.device_id}" for r in regions if r.cuda}
            self._known = (snapshot, devices)
        return devices
