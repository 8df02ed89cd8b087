"""Incidents: a view of the events that a person should know of. Pure, and bounded.

`Incidents.take` receives every event, keeps failures, and words them for clients: names of models,
instances and roles, and reasons. Events are the only source of incidents. `said` holds a text sent
to one client. It is shown only to callers who may see the log (`core.access.Access.sees_errors`).
"""

from math import inf

from msgspec import Struct
from msgspec.structs import replace

from shmserve.core.effects import CANNOT_BE_LOADED
from shmserve.core.stats.event_ring import RecordedEvent
from shmserve.core.stats.request_counters import Reason

LIMIT = 50
_TOGETHER_S = 60.0  # repetitions within this time are one incident
_SAID_S = 5.0  # a client's text belongs to a failure counted within this time
_MAX_TEXT = 300
_REQUESTS = {
    Reason.BAD_REQUEST: "request refused: it was malformed or did not fit the model",
    Reason.QUEUE_FULL: "request refused: the queue was full",
    Reason.NO_MEMORY: "request refused: the pool was used up",
    Reason.NO_EXECUTOR: "request failed: no executor was running",
    Reason.EXECUTOR_DIED: "request failed: its executor died",
    Reason.DEADLINE: "request failed: its deadline had passed",
    Reason.CANCELLED: "request cancelled: its client had gone",
    Reason.MODEL: "request failed: the model raised or returned an error",
    Reason.INTERNAL: "request failed: internal error",
}
_PROCESSES = {"http": "HTTP worker", "grpc": "gRPC process", "exporter": "exporter"}
_QUARANTINED = "region quarantined: its object is smaller than it was when registered"


class Incident(Struct, array_like=True, frozen=True):
    """Failure that happened `count` times from `first` to `last` (seconds since 1970). `said`:
    error text sent to the client of the last failed request; empty if unknown."""

    first: float
    last: float
    what: str
    text: str
    count: int = 1
    said: str = ""


class Incidents:
    """View as of the events taken so far, latest incident last."""

    def __init__(self) -> None:
        self._entries: list[Incident] = []
        # (object, fault) -> (time, client's text) of failures not counted yet
        self._said: dict[tuple[str, str], tuple[float, str]] = {}

    def take(self, event: RecordedEvent) -> None:
        """Take in an event. An event with a `count` of 0 carries only the text sent to a client.
        The failure itself is counted by another event, earlier or later."""
        words = _words(event)
        if words is None:
            return
        what, text = key = words[0], words[1][:_MAX_TEXT]
        index = next((i for i, e in enumerate(self._entries) if _is_same(e, key, event.last)), None)
        if event.count == 0:
            self._say(index, key, event)
            return
        at, said = self._said.pop(key, (-inf, ""))
        entry = Incident(event.first, event.last, what, text, event.count)
        if index is not None:
            earlier = self._entries.pop(index)
            entry = replace(earlier, last=event.last, count=earlier.count + event.count)
        if event.last - at < _SAID_S:
            entry = replace(entry, said=said)
        self._entries = [*self._entries[1 - LIMIT :], entry]

    def _say(self, index: int | None, key: tuple[str, str], event: RecordedEvent) -> None:
        said = event.said[:_MAX_TEXT]
        if index is not None:
            self._entries[index] = replace(self._entries[index], said=said)
            return
        self._said[key] = event.last, said
        while len(self._said) > LIMIT:
            del self._said[next(iter(self._said))]

    def list(self) -> tuple[Incident, ...]:
        return tuple(self._entries)


def _is_same(entry: Incident, key: tuple[str, str], now: float) -> bool:
    return (entry.what, entry.text) == key and now - entry.last < _TOGETHER_S


def _words(event: RecordedEvent) -> tuple[str, str] | None:
    """Return the failed object and the fault; None if the event is no failure."""
    match event.kind:
        case "request failed":
            return event.subject, _REQUESTS[Reason[event.text.upper()]]
        case "process ended" if event.subject in _PROCESSES:
            return _PROCESSES[event.subject], event.kind
        case "instance failed":
            return event.subject, event.text
        case "model failed":
            return event.subject, f"not served: {event.text}"
        case "region quarantined":
            return "client memory", _QUARANTINED
        case "warning" if event.text == CANNOT_BE_LOADED:
            return str(event.fields["instance"]), str(event.fields["reason"])
    return None
