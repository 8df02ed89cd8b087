"""Publications: which processes are told."""

import os
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from shmserve.config import Settings
from shmserve.coordinator.state.publication import EffectRunner, Publication
from shmserve.core.effects import DropEndpoint
from shmserve.core.live_settings import RuntimeSettings
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.observe import flight_recorder
from shmserve.protocol.control.link_messages import RegistryChanged
from shmserve.shm.registry_page import RegistryReader, RegistryWriter
from shmserve.tensor.spec import ModelSpec

ROLES = {"http-1-aa": "http", "grpc-1-aa": "grpc", "executor-1-aa": "executor", "cli-1-aa": "cli"}


@pytest.fixture
def writer(tmp_path):
    with closing(RegistryWriter(str(tmp_path), "e1")) as writer:
        yield writer


def made(
    writer: Any, send: Any, take: Any = None, flags: Any = None, regions_told: Any = lambda: None
) -> Publication:
    """Return the publication of a coordinator with a process for each role."""
    reconciler: Any = SimpleNamespace(
        processes={name: SimpleNamespace(name=name, role=role) for name, role in ROLES.items()},
        snapshot=take or (lambda epoch: Snapshot(epoch, 0, complete=True)),
    )
    regions: Any = SimpleNamespace(book=RegionBook(Settings(), 0), published=regions_told)
    settings: Any = SimpleNamespace(traced=lambda models: models, current=RuntimeSettings())
    return Publication(writer, reconciler, regions, settings, flags or {}, {}, send)


def test_frontends_are_told_once_it_can_be_read(writer, tmp_path) -> None:
    reader = RegistryReader(str(tmp_path))
    heard: list[tuple[str, object, int]] = []

    def send(process: str, message: object) -> None:
        heard.append((process, message, reader.current().generation))

    publication = made(writer, send)
    publication.publish()
    publication.publish()
    both = ("http-1-aa", "grpc-1-aa")
    assert heard == [(name, RegistryChanged(), number) for number in (1, 2) for name in both]


def test_a_model_without_a_process_is_no_model_that_is_ready(monkeypatch, writer) -> None:
    events: list[tuple[str, ...]] = []
    monkeypatch.setattr(flight_recorder, "record", lambda *event: events.append(event))
    ready = ModelEntry(ModelSpec("m", "1", "", "python", 0, (), ()), ModelState.READY)
    reason = "a request ran longer than execute_timeout_s (60 s)"
    killed = structs.replace(ready, reason=reason)
    snapshots = iter(
        Snapshot("e1", 0, complete=True, models={"m": {"1": entry}})
        for entry in (ready, killed, ready)
    )
    publication = made(writer, lambda *_: None, lambda _: next(snapshots))
    for _ in range(3):
        publication.publish()
    assert [event for event in events if event[1] == "m/1"] == [
        ("model ready", "m/1", ""), ("model restarting", "m/1", reason), ("model ready", "m/1", "")
    ]  # fmt: skip


def test_models_that_end_with_the_service_are_no_events(monkeypatch, writer) -> None:
    events: list[tuple[str, ...]] = []
    monkeypatch.setattr(flight_recorder, "record", lambda *event: events.append(event))
    spec = ModelSpec("m", "1", "", "python", 0, (), ())
    entry = ModelEntry(spec, ModelState.READY)
    up = Snapshot("e1", 0, complete=True, models={"m": {"1": entry}})
    ended = structs.replace(entry, reason="its executor ended: status 0")
    down = structs.replace(up, draining=True, models={"m": {"1": ended}})
    snapshots = iter((up, down))
    publication = made(writer, lambda *_: None, lambda _: next(snapshots))
    publication.publish()
    publication.publish()
    assert [event for event in events if event[1] == "m/1"] == [("model ready", "m/1", "")]


def test_what_could_not_be_published_is_published_once_it_can_be(writer, tmp_path) -> None:
    reader, told = RegistryReader(str(tmp_path)), list[str]()
    publication = made(
        *(writer, lambda process, _: told.append(process), None, {"flag": False}),
        regions_told=lambda: told.append("regions"),
    )
    assert publication.publish()
    coming = tmp_path / "registry.msgpack.new"
    coming.unlink()
    coming.mkdir()  # a folder in the file's place prevents writing a snapshot
    told.clear()
    publication.set_flag("flag", True)
    publication.look()
    assert (reader.current().generation, reader.current().flags, told) == (1, {"flag": False}, [])
    coming.rmdir()
    publication.look()
    publication.look()
    assert (reader.current().generation, reader.current().flags) == (2, {"flag": True})
    assert told == ["regions", "http-1-aa", "grpc-1-aa"]


def test_only_an_ended_executors_socket_is_removed(tmp_path) -> None:
    for name in ("executor-1-aa", "executor-2-bb"):
        (tmp_path / f"{name}.sock").touch()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    parts: Any = SimpleNamespace(tell=lambda: None)
    runner = EffectRunner(parts, parts, parts, parts, parts, parts, str(tmp_path))
    runner.perform(
        [DropEndpoint("executor-1-aa", ended.pid), DropEndpoint("executor-2-bb", os.getpid())]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["executor-2-bb.sock"]
