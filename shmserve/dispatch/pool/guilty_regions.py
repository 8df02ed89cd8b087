"""Guilty regions: finds whether client memory used by a request killed an executor, according to
the coordinator."""

import time

from shmserve import waiting
from shmserve.errors import InvalidArgument
from shmserve.protocol.control.data_messages import Execute, RegionRef
from shmserve.shm.registry_page import RegistryReader

_QUARANTINE_S = 0.5  # seconds to wait for the coordinator's finding


def regions_of(message: Execute) -> set[int]:
    """Return the numbers of the client regions used by a request."""
    inputs = {t.at.region for t in message.inputs if isinstance(t.at, RegionRef)}
    return inputs | {place.at.region for place in message.places}


def explain(registry: RegistryReader, regions: set[int]) -> None:
    """Watch the registry briefly for a quarantine of one of these regions. Raise InvalidArgument if
    a region is in quarantine."""
    deadline = time.monotonic() + _QUARANTINE_S
    snapshot = registry.current()
    while True:
        for region in snapshot.regions.values():
            if region.number in regions and region.quarantined:
                raise InvalidArgument(
                    f"the executor died on shared memory region '{region.name}':"
                    f" {region.quarantined}"
                )
        remaining_s = deadline - time.monotonic()
        newer = waiting.beside(registry.newer, snapshot, remaining_s)
        if newer is None:
            return
        snapshot = newer
