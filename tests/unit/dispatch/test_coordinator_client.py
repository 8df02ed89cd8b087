"""Requests of frontends to the coordinator, over a link with scripted answers."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.dispatch.process.coordinator_client import CoordinatorClient
from shmserve.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ModelFailure,
    ProtocolViolation,
    ShmserveError,
    Unavailable,
)
from shmserve.protocol.control.history_messages import HistoryGiven
from shmserve.protocol.control.messages import FromCoordinator, ToCoordinator
from shmserve.protocol.control.model_messages import LoadModel, ModelAnswer
from shmserve.protocol.control.region_messages import RegionAnswer, RegisterRegion
from shmserve.protocol.control.settings_messages import FlagSet, SetFlag, SettingsAnswer
from shmserve.protocol.control.stats_messages import Report, ReportGiven
from shmserve.transport import rundir
from shmserve.transport.pending_requests import Make

Answer = tuple[FromCoordinator, list[int]] | ShmserveError


class FakeLink:
    """Link that gives one answer to every message."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[ToCoordinator] = []
        self.timeouts: list[float] = []

    def ask(self, make: Make, timeout_s: float) -> tuple[FromCoordinator, list[int]]:
        self.asked.append(make(1, False))
        self.timeouts.append(timeout_s)
        if isinstance(self.answer, ShmserveError):
            raise self.answer
        return self.answer


def client(answer: Answer, run_dir: str = "/nowhere") -> tuple[CoordinatorClient, FakeLink]:
    link = FakeLink(answer)
    settings = msgspec.convert({"run_dir": run_dir, "load_timeout_s": 7}, Settings)
    return CoordinatorClient(link, "http-1-aa", settings), link  # type: ignore[arg-type]


def file_of(content: bytes) -> int:
    fd = os.memfd_create("answer")
    os.write(fd, content)
    return fd


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_region_is_registered_for_its_caller() -> None:
    coordinator, link = client((RegionAnswer(1), []))
    coordinator.register_region(Caller(5, 6, 7), "r", "/key", 8, 9)
    assert link.asked == [RegisterRegion(1, "r", "/key", 8, 9, 5, 6, 7, False)]


def test_a_refusal_is_raised_as_what_it_is() -> None:
    coordinator, _ = client((RegionAnswer(1, "INVALID_ARGUMENT", "no"), []))
    with pytest.raises(InvalidArgument, match="no"):
        coordinator.unregister_regions(Caller(5))


DONE: list[tuple[FromCoordinator, Callable[[CoordinatorClient], object]]] = [
    (ModelAnswer(1, "INTERNAL", "broken"), lambda c: c.load_model("m", None, {})),
    (RegionAnswer(1, "INTERNAL", "broken"), lambda c: c.unregister_regions(Caller(5))),
    (SettingsAnswer(1, 0, "INTERNAL", "broken"), lambda c: c.take_traces("m", 1, 1)),
]


@pytest.mark.parametrize(("answer", "act"), DONE)
def test_the_coordinators_own_fault_is_no_models(answer, act) -> None:
    coordinator, _ = client((answer, []))
    with pytest.raises(Internal, match="broken") as raised:
        act(coordinator)
    assert not isinstance(raised.value, ModelFailure)  # so whoever answers the client logs it


def test_an_answer_to_something_else_is_a_violation_and_leaves_nothing_open() -> None:
    fd = file_of(b"")
    coordinator, link = client((RegionAnswer(1), [fd]))
    with pytest.raises(ProtocolViolation, match="RegionAnswer instead of a FlagSet"):
        coordinator.ask(lambda ticket, _: SetFlag(ticket, "online", True), FlagSet)
    assert link.asked == [SetFlag(1, "online", True)]
    assert not is_open(fd)


def test_a_report_is_read_from_its_file() -> None:
    report = Report((), (), {}, {})
    content = msgspec.msgpack.encode(report)
    fd = file_of(content)
    coordinator, _ = client((ReportGiven(1, len(content)), [fd]))
    assert coordinator.report() == report
    assert not is_open(fd)


def test_what_cannot_be_read_is_not_there() -> None:
    fd = file_of(b"\xc1")
    coordinator, _ = client((ReportGiven(1, 1), [fd]))
    with pytest.raises(Unavailable, match="numbers cannot be read"):
        coordinator.report()
    assert not is_open(fd)
    coordinator, _ = client((HistoryGiven(1, 0), []))
    with pytest.raises(Unavailable, match="has no history"):
        coordinator.history(0)


def test_a_load_that_takes_too_long_goes_on() -> None:
    coordinator, link = client(Unavailable("the coordinator did not answer"))
    with pytest.raises(DeadlineExceeded, match="has not ended in time, and goes on"):
        coordinator.unload_model("m")
    assert link.timeouts == [17.0]


def test_a_model_that_is_not_available_is_no_deadline() -> None:
    coordinator, _ = client((ModelAnswer(1, "UNAVAILABLE", "too many"), []))
    with pytest.raises(Unavailable, match="too many"):
        coordinator.load_model("m", None, {})


def test_what_comes_with_a_load_is_in_a_folder_of_the_run_directory(tmp_path) -> None:
    coordinator, link = client((ModelAnswer(1), []), str(tmp_path))
    coordinator.load_model("m", "{}", {"1/model.py": b"code"})
    message = link.asked[0]
    assert isinstance(message, LoadModel)
    folder = Path(rundir.overrides(str(tmp_path), message.overrides))
    assert (folder / "m/1/model.py").read_bytes() == b"code"
    assert (folder / rundir.OVERRIDE_CONFIG).read_text() == "{}"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_files_that_contradict_are_refused_and_removed(tmp_path) -> None:
    coordinator, link = client((ModelAnswer(1), []), str(tmp_path))
    with pytest.raises(InvalidArgument, match="contradict"):
        coordinator.load_model("m", "{}", {"1": b"a file", "1/model.py": b"code"})
    assert link.asked == []
    assert list(Path(rundir.overrides(str(tmp_path))).iterdir()) == []
