"""One way to the collector: what became of an export, and the log's line when that changes."""

from __future__ import annotations

import enum
import logging
import random
import threading
from typing import Any, Generic, Protocol, TypeVar

import requests

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # before the collector is tried again
_LATER = {408, 429, 502, 503, 504}  # statuses that are not about what was sent: OTLP/HTTP has them

Payload = TypeVar("Payload", contravariant=True)


class Fate(enum.Enum):
    TAKEN = "taken"
    REFUSED = "refused"
    AWAY = "away"


class SdkExporter(Protocol[Payload]):
    """An exporter of the SDK. It tries again by itself within its timeout, tells no more than
    whether it was well, and takes a redirection for that: so the session is asked."""

    def export(self, payload: Payload, /) -> Any: ...


class StatusSession(requests.Session):
    """Remembers what the collector has said last; 0: nothing, None: it was not asked."""

    status: int | None = None

    def forget(self) -> None:
        """Begin anew: the collector was not asked."""
        self.status = None

    def request(self, *args: Any, **options: Any) -> requests.Response:
        self.status = 0
        options["allow_redirects"] = False  # headers are for the one who was named
        response = super().request(*args, **options)
        self.status = response.status_code
        return response


class Collector(Generic[Payload]):
    """For one thread.

    Args:
        what: is sent, for the log.
        exporter: whose requests `session` makes.
        stop: is set when there is no time for trying again.
    """

    def __init__(
        self,
        what: str,
        exporter: SdkExporter[Payload],
        session: StatusSession,
        stop: threading.Event,
    ) -> None:
        self._what = what
        self._exporter = exporter
        self._session = session
        self._stop = stop
        self._fate = Fate.TAKEN

    def send(self, payload: Payload) -> Fate:
        """Try until it is taken, or refused, or there is no time any more."""
        pause_s = _FIRST_PAUSE_S
        while (fate := self.try_once(payload)) is Fate.AWAY:
            if self._stop.wait(pause_s * random.uniform(0.8, 1.2)):
                break
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return fate

    def try_once(self, payload: Payload) -> Fate:
        """For the exporter's timeout; of what is soon followed by something newer."""
        self._session.forget()
        try:
            self._exporter.export(payload)
        except Exception as ex:  # the SDK's or its library's: no reason to end
            _log.debug("export of %s failed: %s", self._what, type(ex).__name__)
        fate, status = Fate.AWAY, self._session.status
        if status is None:  # the SDK sends nothing of this size, or form: not later either
            fate = Fate.REFUSED
        elif status and status not in _LATER:
            fate = Fate.TAKEN if 200 <= status < 300 else Fate.REFUSED
        self._tell(fate, status)
        return fate

    def _tell(self, fate: Fate, status: int | None) -> None:
        if fate is self._fate:
            return
        self._fate = fate
        if fate is Fate.TAKEN:
            _log.info("the collector takes %s again", self._what)
        else:
            said = "it was not asked" if status is None else f"status {status}"
            said = said if status != 0 else "no answer"
            _log.warning("the collector does not take %s: %s (otlp_endpoint)", self._what, said)
