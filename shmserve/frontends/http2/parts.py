"""What the readers of one connection share."""

from __future__ import annotations

from dataclasses import dataclass

from shmserve.frontends.http2.events import Event
from shmserve.frontends.http2.keepalive import Keepalive
from shmserve.frontends.http2.limits import FloodBudget, Limits
from shmserve.frontends.http2.output import OutgoingBytes
from shmserve.frontends.http2.sender import Sender
from shmserve.frontends.http2.shutdown import Shutdown
from shmserve.frontends.http2.streams import Http2Streams


@dataclass(frozen=True, slots=True)
class ConnectionParts:
    """The parts of a connection that frames are about.

    Attributes:
        limits: what the client may ask for.
        streams: its requests.
        sender: what the client's windows and settings are for.
        output: where answers to frames go.
        keepalive: the rules for pings.
        shutdown: whose ping may be answered, and which new streams are served.
        control: the budget of control frames.
        resets: the budget of streams that come to nothing.
        events: what came of frames.
    """

    limits: Limits
    streams: Http2Streams
    sender: Sender
    output: OutgoingBytes
    keepalive: Keepalive
    shutdown: Shutdown
    control: FloodBudget
    resets: FloodBudget
    events: list[Event]
