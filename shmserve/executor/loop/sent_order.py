"""Sent order: requests in the order in which their clients sent them.

Requests of one sequence, whose client does not wait for answers, come on several connections, some
of them new.

On one gRPC stream, requests of one sequence to a decoupled model must not overtake each other. The
stream sends a request only after the one ahead of it has been sent (`RunOptions.on_sent`), to the
same executor if no page tells of the sequence yet (`BegunSequences`). The executor takes what has
come by then in the order of `sent_ns`, whatever connection it came on.
"""

from __future__ import annotations

from math import inf

from shmserve.executor.peers.channels import Channels
from shmserve.executor.peers.frontend_connections import Event
from shmserve.protocol.control.data_messages import Execute

_MAX_TURNS = 256  # a new connection takes three, and they are let in one by one


def receive_in_order(channels: Channels, timeout_s: float) -> list[Event]:
    """Return what has come, as `Channels.receive` does, sorted by the time of sending."""
    events = channels.receive(timeout_s)
    if any(type(message) is Execute for _, message in events):
        for _ in range(_MAX_TURNS):  # what was sent before is there by now
            events += channels.receive(0)
            if channels.quiet:
                break
        channels.quiet = False
    events.sort(key=_sent_ns)
    return events


def _sent_ns(event: Event) -> float:
    """Sort key: whatever else comes of a request comes after it."""
    message = event[1]
    return message.sent_ns if type(message) is Execute else inf
