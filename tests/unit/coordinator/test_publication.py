"""Who is told of a publication."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shmserve.config import Settings
from shmserve.coordinator.publication import Publication
from shmserve.core.control.runtime_settings import RuntimeSettings
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.registry import Snapshot
from shmserve.protocol.control.link_messages import RegistryChanged
from shmserve.shm.registry_page import RegistryReader, RegistryWriter

ROLES = {"http-1-aa": "http", "grpc-1-aa": "grpc", "executor-1-aa": "executor", "cli-1-aa": "cli"}


def test_frontends_are_told_once_it_can_be_read(tmp_path: Path) -> None:
    writer, reader = RegistryWriter(str(tmp_path), "e1"), RegistryReader(str(tmp_path))
    processes = {name: SimpleNamespace(name=name, role=role) for name, role in ROLES.items()}
    reconciler: Any = SimpleNamespace(
        processes=processes, snapshot=lambda epoch: Snapshot(epoch, 0, complete=True)
    )
    regions: Any = SimpleNamespace(book=RegionBook(Settings(), 0), published=lambda: None)
    settings: Any = SimpleNamespace(traced=lambda models: models, current=RuntimeSettings())
    heard: list[tuple[str, object, int]] = []

    def send(process: str, message: object) -> None:
        heard.append((process, message, reader.current().generation))

    publication = Publication(writer, reconciler, regions, settings, {}, {}, send)
    publication.publish()
    publication.publish()
    both = ("http-1-aa", "grpc-1-aa")
    assert heard == [(name, RegistryChanged(), number) for number in (1, 2) for name in both]
    writer.close()
