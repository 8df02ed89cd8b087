"""Numbers and settings of the whole server: from a frontend to the coordinator and back.

Nothing of it is on an inference's way.
"""

from __future__ import annotations

import os

import msgspec

from shmserve.core.control.runtime_settings import LogChange, TraceChange
from shmserve.errors import Code, Unavailable, from_code
from shmserve.protocol.control.history_messages import AskHistory, HistoryGiven, HistoryReport
from shmserve.protocol.control.settings_messages import (
    ChangeLog,
    ChangeTrace,
    SettingsAnswer,
    TakeTraces,
)
from shmserve.protocol.control.stats_messages import AskReport, Report, ReportGiven
from shmserve.transport.link import Link
from shmserve.transport.questions import Make, close_all

_ANSWER_S = 3.0  # a restarted coordinator is back by then, and is asked again

_decode = msgspec.msgpack.Decoder(Report).decode
_decode_history = msgspec.msgpack.Decoder(HistoryReport).decode


class ServerDesk:
    """The coordinator's desk for everything that concerns the server as a whole."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def report(self) -> Report:
        """What all processes have counted, dead ones included, as of now.

        Raises:
            Unavailable: the coordinator is away, and did not come back in time.
        """
        answer, fds = self._link.ask(lambda ticket, _: AskReport(ticket), _ANSWER_S)
        try:
            if not isinstance(answer, ReportGiven) or len(fds) != 1:
                raise Unavailable("the coordinator gave no numbers")
            return _decode(os.pread(fds[0], answer.nbytes, 0))
        except (OSError, msgspec.DecodeError):
            raise Unavailable("the coordinator's numbers cannot be read") from None
        finally:
            close_all(fds)

    def history(
        self, level: int, since: int = 0, life: str = "", brief: bool = False
    ) -> HistoryReport:
        """What happened lately; see `AskHistory`.

        Raises:
            Unavailable: the coordinator is away, and did not come back in time.
        """
        answer, fds = self._link.ask(
            lambda ticket, _: AskHistory(ticket, level, since, life, brief), _ANSWER_S
        )
        try:
            if not isinstance(answer, HistoryGiven) or len(fds) != 1:
                raise Unavailable("the coordinator keeps no history")
            return _decode_history(os.pread(fds[0], answer.nbytes, 0))
        except (OSError, msgspec.DecodeError):
            raise Unavailable("the coordinator's history cannot be read") from None
        finally:
            close_all(fds)

    def change_log(self, change: LogChange) -> None:
        """Change what all processes log.

        Raises:
            Unavailable: the coordinator is away.
        """
        self._ask(lambda ticket, _: ChangeLog(ticket, change))

    def change_trace(self, model: str, change: TraceChange) -> None:
        """Change what is traced of a model, or (empty name) of all that have no own settings.

        Raises:
            Unavailable: the coordinator is away.
        """
        self._ask(lambda ticket, _: ChangeTrace(ticket, model, change))

    def take_traces(self, model: str, wanted: int) -> int:
        """How many of `wanted` traces may be written.

        Raises:
            Unavailable: the coordinator is away.
        """
        return self._ask(lambda ticket, _: TakeTraces(ticket, model, wanted)).granted

    def _ask(self, make: Make) -> SettingsAnswer:
        answer, fds = self._link.ask(make, _ANSWER_S)
        close_all(fds)
        if not isinstance(answer, SettingsAnswer):
            raise Unavailable("the coordinator gave no answer about a setting")
        if answer.error_code:
            raise from_code(Code(answer.error_code), answer.error)
        return answer
