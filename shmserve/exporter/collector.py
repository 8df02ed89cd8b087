"""Connection to the collector: outcome of exports, and a log line whenever the outcome changes."""

from __future__ import annotations

import enum
import logging
import random
import threading
from typing import Any, Generic, TypeVar

import requests

from shmserve.config import Settings
from shmserve.exporter.otlp_settings import pairs

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # seconds before the next attempt
_LATER = {408, 429, 502, 503, 504}  # statuses for which OTLP/HTTP asks to retry

Payload = TypeVar("Payload", contravariant=True)


class Fate(enum.Enum):
    TAKEN = "taken"
    REFUSED = "refused"
    AWAY = "away"


class StatusSession(requests.Session):
    """HTTP session that keeps the status of the last response; 0: no response, None: no
    request."""

    status: int | None = None

    def forget(self) -> None:
        """Begin anew: the collector was not asked."""
        self.status = None

    def request(self, *args: Any, **options: Any) -> requests.Response:
        self.status = 0
        options["allow_redirects"] = False  # headers may hold secrets for the configured host
        response = super().request(*args, **options)
        self.status = response.status_code
        return response


class Collector(Generic[Payload]):
    """Sender of spans or of metrics. For a single thread.

    An exporter of the SDK retries within a timeout, returns only success or failure, and takes a
    redirection for success. So the sender reads the status from the session.

    Args:
        what: kind of payload, for the log.
        signal: name of the payload in the collector's URL.
        exporter: class of the SDK's exporter.
        stop: event that is set when no time is left for retries.
    """

    def __init__(
        self, what: str, signal: str, exporter: Any, settings: Settings, stop: threading.Event
    ) -> None:
        self._what = what
        self._session = StatusSession()
        self._exporter = exporter(
            f"{settings.otlp_endpoint.rstrip('/')}/v1/{signal}",
            headers=pairs(settings.otlp_headers),
            timeout=settings.otlp_timeout_s,
            session=self._session,
        )
        self._stop = stop
        self._fate = Fate.TAKEN

    def send(self, payload: Payload) -> Fate:
        """Export a payload, and retry until the collector takes or refuses the payload, or `stop`
        is set."""
        pause_s = _FIRST_PAUSE_S
        while (fate := self.try_once(payload)) is Fate.AWAY:
            if self._stop.wait(pause_s * random.uniform(0.8, 1.2)):
                break
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return fate

    def try_once(self, payload: Payload) -> Fate:
        """Export a payload without retries beyond the exporter's timeout. For payloads that are
        soon replaced by newer values."""
        self._session.forget()
        try:
            self._exporter.export(payload)
        except Exception as ex:  # an exception of the SDK or its libraries must not end the thread
            _log.debug("export of %s failed: %s", self._what, type(ex).__name__)
        fate, status = Fate.AWAY, self._session.status
        if status is None:  # the SDK refuses the payload's size or form, now and later
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
            reason = "the collector was not asked" if status is None else f"status {status}"
            reason = reason if status != 0 else "no answer"
            _log.warning("the collector does not take %s: %s (otlp_endpoint)", self._what, reason)
