"""Messages of the link about GRPS's online flag; `messages` has the unions they belong to."""

from __future__ import annotations

from shmserve.protocol.control.message import Message


class SetOnline(Message, frozen=True):
    """A frontend's client says whether load balancers should send requests here."""

    ticket: int
    online: bool


class OnlineSet(Message, frozen=True):
    """Reply to `SetOnline`, sent after the change is published."""

    ticket: int
