"""GRPS's online flag: one for the whole service, kept by the coordinator."""

from __future__ import annotations

from shmserve.protocol.grps_messages import OnlineSet, SetOnline
from shmserve.transport.link import Link
from shmserve.transport.questions import close_all

_ANSWER_S = 5.0  # a restarted coordinator is back by then, and is asked again


def set_online(link: Link, online: bool) -> None:
    """Change the flag; every process sees it when this returns.

    Raises:
        Unavailable: the coordinator does not answer.
    """
    answer, fds = link.ask(lambda ticket, _: SetOnline(ticket, online), _ANSWER_S)
    close_all(fds)
    assert isinstance(answer, OnlineSet)
