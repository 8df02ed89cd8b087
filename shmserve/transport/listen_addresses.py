"""Addresses to listen on: what a setting says, whether it is free, and who has it if not.

An error here is for the operator, who starts the service: it names the setting, the address, and
the process that holds it, as far as the kernel tells.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator

from msgspec import Struct

from shmserve.config import Settings
from shmserve.errors import ConfigError

_LISTENS = "0A"  # a state in /proc/net/tcp
_PROBE_S = 1.0
_DESCRIPTOR = re.compile(r"fd://[0-9]{1,9}")
_MOST_SHOWN = 64  # characters of what is no address
_LONGEST_PATH = 107  # bytes, of a Unix socket
_OURS = "shmserve: "  # what the titles of our processes begin with
_ORPHANS_S = 6.0  # those that have lost their master or supervisor end within this
_LOOK_S = 0.05
_UNKNOWN_S = 0.5  # for who has an address and cannot be seen


class ListenAddress(Struct, frozen=True):
    """One address: `path` of a Unix socket, or host and port. `family`: the one socket that listens
    there is of this kind (and IPv6 takes IPv4, too); 0: there is one for each that the host has."""

    text: str
    host: str = ""
    port: int = 0
    path: str = ""
    family: int = 0


class Holder(Struct, frozen=True):
    """A process that has a socket."""

    pid: int
    name: str
    orphan: bool = False  # one of ours whose parent is none of ours any more

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})"


def parse(setting: str, text: str) -> ListenAddress:
    """An address as settings have it: ``HOST:PORT``, ``[::1]:PORT``, ``unix:PATH``.

    Raises:
        ConfigError: it is none.
    """
    if text.startswith("unix:"):
        path = os.path.abspath(text.removeprefix("unix:"))
        return ListenAddress(f"unix:{path}", path=path)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigError(
            f"{setting}: {text[:_MOST_SHOWN]!a} is no HOST:PORT and no unix:PATH, as in "
            "127.0.0.1:8000 (this host), 0.0.0.0:8000 (all addresses), unix:/run/shmserve.sock"
        )
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return ListenAddress(shown, host, int(port))


def check_http(settings: Settings) -> None:
    """See that gunicorn will understand `http_bind`, which may be descriptors, too (``fd://3``).

    Raises:
        ConfigError: it would not, and would say so in words of its own.
    """
    for text in settings.http_bind:
        if not _DESCRIPTOR.fullmatch(text):
            parse("http_bind", text)


def of_gunicorn(place: tuple[str, int] | str | int) -> ListenAddress | None:
    """An address as gunicorn has it; None: a descriptor, or a name that is no file's."""
    if isinstance(place, tuple):
        host, port = place
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return ListenAddress(shown, host, port, family=family)
    if isinstance(place, str) and not place.startswith("\0"):
        return ListenAddress(f"unix:{place}", path=os.path.abspath(place))
    return None


def require_free(setting: str, address: ListenAddress, patience_s: float = _ORPHANS_S) -> None:
    """See that a process can listen there. Processes of an earlier service of ours, whose master
    was killed, are waited for.

    Raises:
        ConfigError: it cannot; the message names who listens there, if that is known.
    """
    begun = time.monotonic()
    if address.path:
        _require_free_path(setting, address.path, begun + patience_s)
        return
    while reason := _cannot_bind(setting, address):
        holders = list(tcp_holders(address.port))
        stranger = next((holder for holder in holders if not holder.orphan), None)
        # Where nobody is found it may have ended between these two looks.
        patience = 0.0 if stranger else patience_s if holders else _UNKNOWN_S
        if time.monotonic() - begun > patience:
            who = f", by {stranger or holders[0]}" if holders else ""
            cannot = f"{setting}: cannot listen on {address.text}: {reason}{who}"
            raise ConfigError(f"{cannot}; {_another(setting)}")
        time.sleep(_LOOK_S)


def reserve(setting: str, address: ListenAddress) -> list[socket.socket]:
    """Have a TCP address that is free without listening on it: nobody but this user's processes
    that share it (SO_REUSEPORT) can, until the sockets are closed. None where the kernel chooses
    the port, or where connections of somebody who did not share it have not run out yet.

    Raises:
        ConfigError: the address is none.
    """
    held: list[socket.socket] = []
    for family, kind, protocol, _, place in _resolve(setting, address) if address.port else ():
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind(place)
        except OSError:
            sock.close()
        else:
            held.append(sock)
    return held


def listeners(
    setting: str, address: ListenAddress, backlog: int, takes_ipv4: bool = False
) -> list[socket.socket]:
    """Listen at an address: non-blocking sockets, one for each family that the host has there. They
    share one port, which the kernel chooses for port 0. Other processes may listen there, too.

    Args:
        setting: name of the setting, for errors.
        address: a free path, or a TCP address that is free or was reserved.
        backlog: connections that wait at most.
        takes_ipv4: whether an IPv6 socket takes IPv4 connections, too, if it is the only one.

    Raises:
        ConfigError: the address is none.
        OSError: it is somebody else's by now.
    """
    made: list[socket.socket] = []
    try:
        if address.path:
            made.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            made[0].bind(address.path)
            made[0].listen(backlog)
            return made
        found = _resolve(setting, address)
        port = address.port
        for family, kind, protocol, _, place in found:
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
            made.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                alone = takes_ipv4 and len(found) == 1
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not alone)
            sock.bind((place[0], port, *place[2:]))
            sock.listen(backlog)
            port = port or sock.getsockname()[1]
    except BaseException:
        for sock in made:
            sock.close()
        raise
    return made


def make_way(setting: str, path: str) -> None:
    """Remove the socket file of a process that is gone; raises as `require_free`."""
    if _require_free_path(setting, path):
        os.unlink(path)


def tcp_holders(port: int) -> Iterator[Holder]:
    """Processes that listen on a TCP port of this host, as far as this one may look at them."""
    inodes = {f"socket:[{inode}]" for inode in _listening(port)}
    pids = sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()) if inodes else ()
    for pid in pids:
        try:
            fds = os.listdir(f"/proc/{pid}/fd")
            held = any(os.readlink(f"/proc/{pid}/fd/{fd}") in inodes for fd in fds)
        except OSError:  # another user's, or it has just ended
            continue
        if held and pid != os.getpid():
            yield _holder(pid)


def _holder(pid: int) -> Holder:
    name = _name(pid)
    return Holder(pid, name, name.startswith(_OURS) and not _name(_parent(pid)).startswith(_OURS))


def _name(pid: int) -> str:
    """What a process is called: of its arguments, which may have secrets, nothing."""
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _listening(port: int) -> set[str]:
    """Inodes of sockets that listen on a port."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:  # hidden in this container
            continue
        found |= {r[9] for r in rows if r[3] == _LISTENS and r[1].endswith(f":{port:04X}")}
    return found - {"0"}


_Resolved = tuple[int, int, int, str, tuple[object, ...]]


def _resolve(setting: str, address: ListenAddress) -> list[_Resolved]:
    try:
        return socket.getaddrinfo(  # type: ignore[return-value]
            address.host or None,
            address.port,
            address.family,
            socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
    except OSError as ex:
        raise ConfigError(f"{setting}: {address.text} has no address: {ex.strerror}") from None


def _cannot_bind(setting: str, address: ListenAddress) -> str:
    """Why nobody could listen there without sharing the address; "": somebody could."""
    for family, kind, protocol, _, place in _resolve(setting, address):
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and not address.family:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind(place)
            except OSError as ex:
                return os.strerror(ex.errno or 0)
    return ""


def _require_free_path(setting: str, path: str, give_up: float = 0.0) -> bool:
    """Whether there is the file of a socket that nobody listens on. Until `give_up` processes are
    waited for whose parent has listened and is gone."""
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(f"{setting}: unix:{path} is too long for a Unix socket")
    cannot = f"{setting}: cannot listen on unix:{path}"
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        if not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
            raise ConfigError(f"{cannot}: its folder is missing or cannot be written") from None
        return False
    except OSError as ex:
        raise ConfigError(f"{cannot}: {ex.strerror}") from None
    if not stat.S_ISSOCK(info.st_mode):
        raise ConfigError(f"{setting}: unix:{path} is there already and no socket")
    kind = socket.SOCK_STREAM
    while True:
        with socket.socket(socket.AF_UNIX, kind) as sock:
            sock.settimeout(_PROBE_S)
            try:
                sock.connect(path)
            except (ConnectionRefusedError, FileNotFoundError):
                return os.path.lexists(path)  # what a process left that was killed
            except OSError as ex:
                if ex.errno == errno.EPROTOTYPE and kind == socket.SOCK_STREAM:
                    kind = socket.SOCK_SEQPACKET  # as a client socket is
                    continue
                raise ConfigError(f"{cannot}: {ex.strerror}") from None
            pid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        if os.path.exists(f"/proc/{pid}") or time.monotonic() > give_up:
            break
        time.sleep(_LOOK_S)
    who = f", by {_holder(pid)}" if pid else ""
    raise ConfigError(f"{cannot}: another process listens there{who}; {_another(setting)}")


def _another(setting: str) -> str:
    return f"set another address ({setting}, or SHMSERVE_{setting.upper()} in the environment)"
