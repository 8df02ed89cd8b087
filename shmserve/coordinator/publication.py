"""The registry as all processes see it: models, regions, and what clients have set."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from shmserve.coordinator.regions.registrations import RegionRegistrations
from shmserve.coordinator.runtime_settings import RuntimeSettingsStore
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.registry import Snapshot
from shmserve.errors import ProtocolViolation
from shmserve.protocol.control.link_messages import RegistryChanged
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.shm.registry_page import RegistryWriter


class Publication(Struct):
    """Puts the snapshot together, publishes it, and tells those who may wait for that.

    `flags`: as the service starts.
    """

    _writer: RegistryWriter
    _reconciler: Reconciler
    _regions: RegionRegistrations
    _runtime_settings: RuntimeSettingsStore
    _flags: dict[str, bool]
    _send: Callable[[str, FromCoordinator], None]

    def restore(self, previous: Snapshot) -> None:
        self._flags = {n: previous.flags.get(n, value) for n, value in self._flags.items()}

    def set_flag(self, name: str, value: bool) -> None:
        """Change a flag of an extension.

        Raises:
            ProtocolViolation: there is no such flag.
        """
        if name not in self._flags:
            raise ProtocolViolation(f"there is no flag '{name}'")
        self._flags = {**self._flags, name: value}
        self.publish()

    def publish(self) -> None:
        book = self._regions.book
        self._regions.published()
        snapshot = self._reconciler.snapshot(self._writer.epoch)
        self._writer.publish(
            msgspec.structs.replace(
                snapshot,
                models=self._runtime_settings.traced(snapshot.models),
                regions=book.regions,
                next_region=book.next_number,
                flags=self._flags,
                tuning=self._runtime_settings.current,
            )
        )
        for process in self._reconciler.processes.values():
            if process.role in ("http", "grpc", "model"):
                self._send(process.name, RegistryChanged())
