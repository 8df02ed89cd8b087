"""Addresses to listen on: parses addresses, checks that they are free, and finds their holders.

Errors are for the operator who starts the service. An error names the setting, the address and, as
far as the kernel tells, the process that holds the address.
"""

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
from shmserve.transport.processes import stat_of

_LISTENS = "0A"  # the state LISTEN in /proc/net/tcp
_PROBE_S = 1.0
_DESCRIPTOR = re.compile(r"fd://[0-9]{1,9}")
_MOST_SHOWN = 64  # characters of a wrong address in an error
_LONGEST_PATH = 107  # bytes, of a Unix socket
_OURS = "shmserve: "  # beginning of our processes' titles
_ORPHANS_S = 6.0  # limit for the end of processes without master or supervisor
_LOOK_S = 0.05
_UNKNOWN_S = 0.5  # patience for an unseen holder


class ListenAddress(Struct, frozen=True):
    """Address of a listening socket: `path` of a Unix socket, or host and port. `family`: address
    family if a single socket listens (an IPv6 socket takes IPv4 too); 0: a socket for each family
    of the host."""

    text: str
    host: str = ""
    port: int = 0
    path: str = ""
    family: int = 0


class Holder(Struct, frozen=True):
    """Process with a socket open."""

    pid: int
    name: str
    orphan: bool = False  # a shmserve process whose parent is no shmserve process any more

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})"


def parse(setting: str, text: str) -> ListenAddress:
    """Parse an address as settings write it: ``HOST:PORT``, ``[::1]:PORT``, ``unix:PATH``. Raise
    ConfigError if the text is no address."""
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


def overlap(one: ListenAddress, other: ListenAddress) -> bool:
    """Return whether two sockets cannot both listen here, as far as the texts tell: names of hosts
    are not resolved."""
    if one.path or other.path:
        return one.path == other.path
    if one.port != other.port or not one.port:  # the kernel chooses another port for each 0
        return False
    hosts = {one.host.lower(), other.host.lower()}
    if len(hosts) == 1 or "::" in hosts:
        return True
    return "0.0.0.0" in hosts and not any(":" in host for host in hosts)


def is_descriptor(text: str) -> bool:
    """Return whether an entry of `http_bind` names a descriptor (``fd://3``) and no address."""
    return bool(_DESCRIPTOR.fullmatch(text))


def check_http(settings: Settings) -> None:
    """Check that gunicorn will understand `http_bind`, which may also have descriptors
    (``fd://3``). Raise ConfigError if gunicorn would reject an entry with a message of its own."""
    for text in settings.http_bind:
        if not is_descriptor(text):
            parse("http_bind", text)


def of_gunicorn(place: tuple[str, int] | str | int) -> ListenAddress | None:
    """Return an address given in gunicorn's form; None for a descriptor or an abstract Unix
    socket."""
    if isinstance(place, tuple):
        host, port = place
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return ListenAddress(shown, host, port, family=family)
    if isinstance(place, str) and not place.startswith("\0"):
        return ListenAddress(f"unix:{place}", path=os.path.abspath(place))
    return None


def require_free(setting: str, address: ListenAddress, patience_s: float = _ORPHANS_S) -> None:
    """Check that a process can listen at an address. Wait for processes of an earlier shmserve
    service, after the end of their master. Raise ConfigError, with the holder if known, if no
    process can listen at the address."""
    begun = time.monotonic()
    if address.path:
        _require_free_path(setting, address.path, begun + patience_s)
        return
    while reason := _cannot_bind(setting, address):
        holders = list(tcp_holders(address.port))
        stranger = next((holder for holder in holders if not holder.orphan), None)
        # An unseen holder may have ended between these two looks.
        patience = 0.0 if stranger else patience_s if holders else _UNKNOWN_S
        if time.monotonic() - begun > patience:
            who = f", by {stranger or holders[0]}" if holders else ""
            cannot = f"{setting}: cannot listen on {address.text}: {reason}{who}"
            raise ConfigError(f"{cannot}; {_another(setting)}")
        time.sleep(_LOOK_S)


def reserve(setting: str, address: ListenAddress) -> list[socket.socket]:
    """Reserve a free TCP address without listening. Until the sockets are closed, only processes
    of this user can listen, and only if they share the address (SO_REUSEPORT). Return the bound
    sockets.

    No socket is bound if the kernel chooses the port, or while connections of an earlier, unshared
    listener run out.

    Raise ConfigError if the address does not resolve.
    """
    sockets: list[socket.socket] = []
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
            sockets.append(sock)
    return sockets


def listeners(
    setting: str, address: ListenAddress, backlog: int, takes_ipv4: bool = False
) -> list[socket.socket]:
    """Listen at an address. Return non-blocking sockets, one for each address family of the host
    at this address. The sockets share a port, which the kernel chooses for port 0. Other
    processes may listen too.

    Args:
        setting: name of the setting, for errors.
        address: a free path, or a TCP address that is free or reserved.
        backlog: largest number of waiting connections.
        takes_ipv4: whether an IPv6 socket also takes IPv4 connections, if no other socket is made.

    Raises:
        ConfigError: the address does not resolve.
        OSError: another process has taken the address.
    """
    sockets: list[socket.socket] = []
    try:
        if address.path:
            sockets.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            sockets[0].bind(address.path)
            sockets[0].listen(backlog)
            return sockets
        resolved = _resolve(setting, address)
        port = address.port
        for family, kind, protocol, _, place in resolved:
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                alone = takes_ipv4 and len(resolved) == 1
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not alone)
            sock.bind((place[0], port, *place[2:]))
            sock.listen(backlog)
            port = port or sock.getsockname()[1]
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def make_way(setting: str, path: str) -> None:
    """Remove the socket file of an ended process; raises as `require_free`."""
    if _require_free_path(setting, path):
        os.unlink(path)


def tcp_holders(port: int) -> Iterator[Holder]:
    """Yield the listeners on a TCP port of this host, as far as this process may see other
    processes."""
    inodes = {f"socket:[{inode}]" for inode in _listening(port)}
    pids = sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()) if inodes else ()
    for pid in pids:
        try:
            fds = os.listdir(f"/proc/{pid}/fd")
            holds = any(os.readlink(f"/proc/{pid}/fd/{fd}") in inodes for fd in fds)
        except OSError:  # another user's process, or it has just ended
            continue
        if holds and pid != os.getpid():
            yield _holder(pid)


def _holder(pid: int) -> Holder:
    name, found = _name(pid), stat_of(pid)
    parent = _name(found.parent) if found is not None else ""
    return Holder(pid, name, name.startswith(_OURS) and not parent.startswith(_OURS))


def _name(pid: int) -> str:
    """Return the name of a process, without its arguments, which may hold secrets."""
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return "?"


def _listening(port: int) -> set[str]:
    """Return inodes of listening sockets on a port."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{table}", encoding="ascii") as file:
                rows = [line.split() for line in file][1:]
        except OSError:  # hidden in this container
            continue
        inodes |= {r[9] for r in rows if r[3] == _LISTENS and r[1].endswith(f":{port:04X}")}
    return inodes - {"0"}


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
    """Return why no process could listen at the address without sharing; empty if a process
    could."""
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
    """Return whether `path` is a stale socket file, without a listener. If the process that began
    to listen has ended, wait until `give_up` (monotonic) for the processes that inherited its
    socket."""
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
                return os.path.lexists(path)  # left by a process that was killed
            except OSError as ex:
                if ex.errno == errno.EPROTOTYPE and kind == socket.SOCK_STREAM:
                    kind = socket.SOCK_SEQPACKET  # the kind of a client socket
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
