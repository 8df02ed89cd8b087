"""Sockets that systemd listens on and passes: which are gRPC's.

gunicorn takes all that there are, so gRPC's are taken out before it looks.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, MutableMapping

from shmserve.errors import ConfigError

_FIRST = 3
_NAME = "grpc"  # FileDescriptorName= of the socket unit


def take_grpc(environ: MutableMapping[str, str]) -> tuple[int, ...]:
    """Take the sockets named "grpc" out of those passed to this process: descriptors of their own.

    What is left has the first places, as the protocol wants it; `environ` says how many.

    Raises:
        ConfigError: LISTEN_FDS is no number.
    """
    passed = range(_FIRST, _FIRST + _count(environ))
    if not passed:
        return ()
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    ours = [fd for fd, name in zip(passed, names, strict=False) if name == _NAME]
    taken = tuple(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, passed.stop) for fd in ours)
    left = [fd for fd in passed if fd not in ours]
    for place, fd in zip(passed, left, strict=False):
        if place != fd:
            os.dup2(fd, place)
    for fd in passed[len(left) :]:
        os.close(fd)
    environ["LISTEN_FDS"] = str(len(left))
    return taken


def has_http(environ: Mapping[str, str]) -> bool:
    """Whether sockets are left for gunicorn, which then binds nothing; raises as `take_grpc`."""
    return _count(environ) > 0


def _count(environ: Mapping[str, str]) -> int:
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return 0
    text = environ.get("LISTEN_FDS") or "0"
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"LISTEN_FDS: {text!r} is no number of sockets")
    return int(text)
