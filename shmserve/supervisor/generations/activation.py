"""Sockets that systemd listens on and passes; a predecessor passes its sockets in the same way.

gunicorn takes every passed socket for HTTP, so other descriptors are taken out before gunicorn
looks.

On sockets from systemd, HTTP workers and gRPC processes accept nothing before models are loaded,
or cannot be. Clients wait meanwhile.
"""

import fcntl
import os
import socket
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from shmserve.errors import ConfigError

# Names of passed descriptors (FileDescriptorName= of the socket units): sockets for gRPC, the pipe
# by which a new generation reports to its predecessor, HTTP sockets that a predecessor has bound.
GRPC, REPORT, BOUND = "grpc", "report", "bound"
REGIONS = "region-"  # prefix of names under which systemd keeps clients' memory
_FIRST = 3
REPORT_BYTES = 4096  # largest report


def take(environ: MutableMapping[str, str], name: str) -> tuple[int, ...]:
    """Take the passed descriptors named `name`. Return them, no longer inheritable.

    The remaining descriptors move to the first places, as the protocol demands. `environ` is
    updated to their number and names.

    Raise ConfigError if LISTEN_FDS is no number.
    """
    return tuple(fd for _, fd in _take(environ, lambda given: given == name))


def take_all(environ: MutableMapping[str, str], prefix: str) -> list[tuple[str, int]]:
    """Take all descriptors with this `prefix`, as `take`. Return (name, descriptor)."""
    return _take(environ, lambda given: given.startswith(prefix))


def _take(
    environ: MutableMapping[str, str], matches: Callable[[str], bool]
) -> list[tuple[str, int]]:
    passed = range(_FIRST, _FIRST + _count(environ))
    if not passed:
        return []
    named = list(zip(_names(environ, len(passed)), passed, strict=True))
    remaining = [(given, fd) for given, fd in named if not matches(given)]
    places = passed[: len(remaining)]
    taken = []
    for given, fd in named:
        if not matches(given):
            continue
        # Copying all of the thousands of descriptors that may come would exceed the limit.
        if fd in places:
            fd = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, passed.stop)
        else:
            os.set_inheritable(fd, False)
        taken.append((given, fd))
    for place, (_, fd) in zip(places, remaining, strict=True):
        if place != fd:
            os.dup2(fd, place)
    for _, fd in remaining:
        if fd not in places:
            os.close(fd)
    environ["LISTEN_FDS"] = str(len(remaining))
    environ["LISTEN_FDNAMES"] = ":".join(given for given, _ in remaining)
    return taken


def tell(environ: MutableMapping[str, str], message: str) -> None:
    """Tell a predecessor, if any, why this process will not take its place."""
    for fd in take(environ, REPORT):
        os.write(fd, message.encode()[:REPORT_BYTES])
        os.close(fd)


def exec_with(command: list[str], environ: dict[str, str], passed: list[tuple[str, int]]) -> None:
    """Exec a command, and pass descriptors to it by name as systemd does."""
    last = _FIRST + len(passed)
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, last) for _, fd in passed]
    for _, fd in passed:
        os.set_inheritable(fd, False)
    for place, fd in enumerate(aside, _FIRST):
        os.dup2(fd, place)
    environ["LISTEN_PID"], environ["LISTEN_FDS"] = str(os.getpid()), str(len(passed))
    environ["LISTEN_FDNAMES"] = ":".join(name for name, _ in passed)
    os.execvpe(command[0], command, environ)


def has_http(environ: Mapping[str, str]) -> bool:
    """Return whether sockets are left for gunicorn, which then binds nothing; raises as `take`."""
    return _count(environ) > 0


def passed_for(environ: Mapping[str, str]) -> set[str]:
    """Return what sockets were passed for, `http` and `grpc`; raises as `take`."""
    names = _names(environ, _count(environ))
    rest = {n for n in names if n not in (GRPC, REPORT) and not n.startswith(REGIONS)}
    return {*(["http"] if rest else []), *([GRPC] if GRPC in names else [])}


def are_bound(environ: Mapping[str, str]) -> bool:
    """Return whether an earlier generation bound the sockets: the service removes the files."""
    return has_http(environ) and BOUND in _names(environ, _count(environ))


def has_all(environ: Mapping[str, str], places: Iterable[tuple[str, int] | str | int]) -> bool:
    """Return whether the passed sockets are those of `places` (gunicorn's), by port or path."""
    passed = set()
    for fd in range(_FIRST, _FIRST + _count(environ)):
        with socket.socket(fileno=os.dup(fd)) as sock:
            passed.add(_port(sock.getsockname()))
    return {_port(place) for place in places if not isinstance(place, int)} == passed


def _port(address: Any) -> object:
    return address[1] if isinstance(address, tuple) else address


def _names(environ: Mapping[str, str], count: int) -> list[str]:
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    return [*names, *[""] * count][:count]


def _count(environ: Mapping[str, str]) -> int:
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return 0
    text = environ.get("LISTEN_FDS") or "0"
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"LISTEN_FDS: {text!r} is no number of sockets")
    return int(text)
