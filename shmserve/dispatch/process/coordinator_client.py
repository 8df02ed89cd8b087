"""Coordinator client: a frontend's requests to the coordinator, none of which is on the path of an
inference.

Each question waits for an answer, long enough for a restarted coordinator to return;
`transport.link` repeats the question. A change has been published when the method returns, so all
later requests see the change at every frontend.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import TypeVar

from shmserve import config, model_places, waiting
from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.core.live_settings import LogChange, TraceChange
from shmserve.core.region_kinds import SYSTEM
from shmserve.core.trace_grants import GrantedTraces
from shmserve.dispatch.process import model_overrides
from shmserve.errors import (
    Code,
    DeadlineExceeded,
    Internal,
    ProtocolViolation,
    Unavailable,
    UnreadableMessage,
    from_code,
)
from shmserve.protocol.control.history_messages import AskHistory, HistoryGiven, HistoryReport
from shmserve.protocol.control.message import Message
from shmserve.protocol.control.model_messages import LoadModel, ModelAnswer, UnloadModel
from shmserve.protocol.control.region_messages import (
    RegionAnswer,
    RegisterCudaRegion,
    RegisterRegion,
    UnregisterRegions,
)
from shmserve.protocol.control.settings_messages import (
    ChangeLog,
    ChangeTrace,
    SettingsAnswer,
    TakeTraces,
)
from shmserve.protocol.control.stats_messages import AskReport, Report, ReportGiven
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.repository import names
from shmserve.transport.channel import close_all
from shmserve.transport.link import Link
from shmserve.transport.pending_requests import Make
from shmserve.transport.trust.peer_credentials import with_process

_CHANGE_S = 5.0
_REPORT_S = 3.0
_BEYOND_S = 10.0  # beyond `load_timeout_s`, for the coordinator's report

_decode_report = msgpack_decoder(Report)
_decode_history = msgpack_decoder(HistoryReport)

_Answer = TypeVar("_Answer", bound=Message)


class CoordinatorClient:
    """Client of the coordinator, one per process. Thread-safe.

    Every method raises Unavailable if the coordinator is away and does not return in time, and
    ShmserveError, with a text for the client, if the coordinator refuses.
    """

    def __init__(self, link: Link, process: str, settings: Settings) -> None:
        self._link = link
        self._process = process
        self._settings = settings
        self._numbers = itertools.count(1)

    def ask(self, make: Make, kind: type[_Answer], timeout_s: float = _CHANGE_S) -> _Answer:
        """Ask the coordinator. Return the answer, a message of this kind without descriptors."""
        answer, fds = self._answer(make, kind, timeout_s)
        close_all(fds)
        _check(answer)
        return answer

    # --------------------------------------------------------------------- regions

    def register_region(
        self, caller: Caller, name: str, key: str, offset: int, byte_size: int
    ) -> None:
        """Register `byte_size` bytes from `offset` of the object `key`."""
        owner = (caller.uid, caller.pid, caller.started)
        self.ask(
            lambda ticket, again: RegisterRegion(
                ticket, name, key, offset, byte_size, *owner, again
            ),
            RegionAnswer,
        )

    def register_cuda_region(
        self, caller: Caller, name: str, handle: bytes, device_id: int, byte_size: int
    ) -> None:
        """Register `byte_size` bytes of GPU memory.

        The coordinator watches the caller's process, because the GPU memory stays allocated as
        long as the region, even after the process has died.
        """
        caller = with_process(caller)
        owner = (caller.uid, caller.pid, caller.started)
        self.ask(
            lambda ticket, again: RegisterCudaRegion(
                ticket, name, handle, device_id, byte_size, *owner, again
            ),
            RegionAnswer,
        )

    def unregister_regions(self, caller: Caller, name: str = "", kind: str = SYSTEM) -> None:
        """Remove a region of the caller, or all regions of a kind if `name` is empty. An unknown
        region is no error."""
        self.ask(lambda ticket, _: UnregisterRegions(ticket, name, caller.uid, kind), RegionAnswer)

    # ---------------------------------------------------------------------- models

    def model_folders(self) -> list[str]:
        """Return the names of the models in the repository, loaded or not."""
        return waiting.beside(names, model_places.repository_paths(self._settings))

    def load_model(self, name: str, model_config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model and wait until the model serves. If files are given, the model is made only
        of these files.

        Args:
            name: a valid model name.
            model_config: configuration as JSON, in place of the model's own.
            files: content by relative path; the paths have been checked.

        Raises:
            DeadlineExceeded: loading takes longer than `load_timeout_s`, and goes on.
        """
        overrides = ""
        if model_config is not None:
            overrides = f"{self._process}-{next(self._numbers)}"
            run_dir = config.run_dir(self._settings)
            given = (name, model_config, files)
            waiting.beside(model_overrides.write, run_dir, overrides, *given)
        self._control(lambda ticket, _: LoadModel(ticket, name, overrides))

    def unload_model(self, name: str, dependents: bool = False) -> None:
        """Stop serving a model. An unknown model is no error. Raises as `load_model`.
        `dependents`: also unload steps of the model that were loaded only for the model."""
        self._control(lambda ticket, _: UnloadModel(ticket, name, dependents))

    def _control(self, make: Make) -> None:
        try:
            timeout_s = self._settings.load_timeout_s + _BEYOND_S
            answer, fds = self._answer(make, ModelAnswer, timeout_s)
        except Unavailable:
            raise DeadlineExceeded("the request has not ended in time, and goes on") from None
        close_all(fds)
        _check(answer)

    # -------------------------------------------------------- the server as a whole

    def report(self) -> Report:
        """Return the current counts of all processes, including ended processes."""
        content = self._file("numbers", lambda ticket, _: AskReport(ticket), ReportGiven)
        with _readable("numbers"):
            report: Report = waiting.beside_if_large(len(content), _decode_report, content)
            return report

    def history(
        self, level: int, since: int = 0, life: str = "", brief: bool = False
    ) -> HistoryReport:
        """Return the recent history; see `AskHistory`."""
        content = self._file(
            "history", lambda ticket, _: AskHistory(ticket, level, since, life, brief), HistoryGiven
        )
        with _readable("history"):
            size = len(content)
            history: HistoryReport = waiting.beside_if_large(size, _decode_history, content)
            return history

    def change_log(self, change: LogChange) -> None:
        """Change the log settings of all processes."""
        self.ask(lambda ticket, _: ChangeLog(ticket, change), SettingsAnswer, _REPORT_S)

    def change_trace(self, model: str, change: TraceChange) -> None:
        """Change the trace settings of a model. An empty name means all models without settings of
        their own."""
        self.ask(lambda ticket, _: ChangeTrace(ticket, model, change), SettingsAnswer, _REPORT_S)

    def take_traces(self, model: str, wanted: int, ids: int) -> GrantedTraces:
        """Return which of `wanted` traces may be written. `ids`: as in `TakeTraces`."""
        answer = self.ask(
            lambda ticket, _: TakeTraces(ticket, model, wanted, ids), SettingsAnswer, _REPORT_S
        )
        return answer.traces

    # ---------------------------------------------------------------------- inside

    def _answer(
        self, make: Make, kind: type[_Answer], timeout_s: float
    ) -> tuple[_Answer, list[int]]:
        answer, fds = self._link.ask(make, timeout_s)
        if not isinstance(answer, kind):
            close_all(fds)
            raise ProtocolViolation(
                f"the coordinator answered with a {type(answer).__name__} instead of a "
                f"{kind.__name__}"
            )
        return answer, fds

    def _file(self, what: str, make: Make, kind: type[ReportGiven] | type[HistoryGiven]) -> bytes:
        """Return the content of the file sent with an answer."""
        answer, fds = self._answer(make, kind, _REPORT_S)
        try:
            if len(fds) != 1:
                raise Unavailable(f"the coordinator has no {what}")
            with _readable(what):
                return waiting.beside_if_large(answer.nbytes, os.pread, fds[0], answer.nbytes, 0)
        finally:
            close_all(fds)


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnreadableMessage):
        raise Unavailable(f"the coordinator's {what} cannot be read") from None


def _check(answer: Message) -> None:
    code, text = getattr(answer, "error_code", ""), getattr(answer, "error", "")
    if code == Code.INTERNAL:  # the server's own fault; no model is to blame
        raise Internal(text)
    if code:
        raise from_code(Code(code), text)
