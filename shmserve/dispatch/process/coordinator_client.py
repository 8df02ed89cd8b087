"""What a frontend asks of the coordinator. Nothing of it is on an inference's way.

Each question waits for its answer, a bounded time in which a restarted coordinator is back;
`transport.link` asks it again. A change has been published when its method returns: every
request that begins later finds it, whichever frontend it comes to.
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
_BEYOND_S = 10.0  # after `load_timeout_s`, for the coordinator to say what became of it

_decode_report = msgpack_decoder(Report)
_decode_history = msgpack_decoder(HistoryReport)

_Answer = TypeVar("_Answer", bound=Message)


class CoordinatorClient:
    """Thread-safe; one per process.

    Every method raises Unavailable if the coordinator is away and does not come back in time,
    and ShmserveError, with a text for the client, if it refuses.
    """

    def __init__(self, link: Link, process: str, settings: Settings) -> None:
        self._link = link
        self._process = process
        self._settings = settings
        self._numbers = itertools.count(1)

    def ask(self, make: Make, kind: type[_Answer], timeout_s: float = _CHANGE_S) -> _Answer:
        """Have something done that is answered by a message of this kind, without descriptors."""
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

        It is the caller's process that is watched: the memory is kept on the GPU for as long as
        the region, even if that process has died.
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
        """Remove one of the caller's regions of a kind, or all of them; unknown ones are no
        error."""
        self.ask(lambda ticket, _: UnregisterRegions(ticket, name, caller.uid, kind), RegionAnswer)

    # ---------------------------------------------------------------------- models

    def model_folders(self) -> list[str]:
        """Names of the models in the repository, loaded or not."""
        return waiting.beside(names, model_places.repository_paths(self._settings))

    def load_model(self, name: str, model_config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model and wait until it serves; with files it is made of nothing else.

        Args:
            name: a valid model name.
            model_config: a configuration as JSON in place of the model's own.
            files: relative path -> content; the paths have been checked.

        Raises:
            DeadlineExceeded: it takes longer than `load_timeout_s`, and goes on.
        """
        overrides = ""
        if model_config is not None:
            overrides = f"{self._process}-{next(self._numbers)}"
            run_dir = config.run_dir(self._settings)
            given = (name, model_config, files)
            waiting.beside(model_overrides.write, run_dir, overrides, *given)
        self._control(lambda ticket, _: LoadModel(ticket, name, overrides))

    def unload_model(self, name: str, dependents: bool = False) -> None:
        """Serve a model no more; unknown ones are no error. Raises as `load_model`.

        `dependents`: nor the models that were loaded for it alone, being steps of it.
        """
        self._control(lambda ticket, _: UnloadModel(ticket, name, dependents))

    def _control(self, make: Make) -> None:
        try:
            timeout_s = self._settings.load_timeout_s + _BEYOND_S
            answer, fds = self._answer(make, ModelAnswer, timeout_s)
        except Unavailable:
            raise DeadlineExceeded("the request has not been done in time; it goes on") from None
        close_all(fds)
        _check(answer)

    # -------------------------------------------------------- the server as a whole

    def report(self) -> Report:
        """What all processes have counted, dead ones included, as of now."""
        content = self._file("numbers", lambda ticket, _: AskReport(ticket), ReportGiven)
        with _readable("numbers"):
            report: Report = waiting.beside_if_large(len(content), _decode_report, content)
            return report

    def history(
        self, level: int, since: int = 0, life: str = "", brief: bool = False
    ) -> HistoryReport:
        """What happened lately; see `AskHistory`."""
        content = self._file(
            "history",
            lambda ticket, _: AskHistory(ticket, level, since, life, brief),
            HistoryGiven,
        )
        with _readable("history"):
            size = len(content)
            history: HistoryReport = waiting.beside_if_large(size, _decode_history, content)
            return history

    def change_log(self, change: LogChange) -> None:
        """Change what all processes log."""
        self.ask(lambda ticket, _: ChangeLog(ticket, change), SettingsAnswer, _REPORT_S)

    def change_trace(self, model: str, change: TraceChange) -> None:
        """Change what is traced of a model, or (empty name) of all that have no own settings."""
        self.ask(lambda ticket, _: ChangeTrace(ticket, model, change), SettingsAnswer, _REPORT_S)

    def take_traces(self, model: str, wanted: int, ids: int) -> GrantedTraces:
        """Which of `wanted` traces may be written; `ids`: as `TakeTraces` has them."""
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
        """The content of the file that comes with an answer."""
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
    if code == Code.INTERNAL:  # the server's own fault: no model is to blame
        raise Internal(text)
    if code:
        raise from_code(Code(code), text)
