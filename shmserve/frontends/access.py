"""Who may do what: kinds of callers, what they may do, and the table between them.

Pure policy: the transports say who calls (`core.regions.region_book.Caller`, as the kernel tells),
what for (the category of an API, or an action that an API is added with), and what the request
says of itself (`Host`, `Origin`, `Sec-Fetch-Site`). docs/security.md has the table for people.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from shmserve.config import From, Settings
from shmserve.core.regions.region_book import Caller
from shmserve.errors import InvalidArgument, PermissionDenied
from shmserve.frontends.oip.restricted_apis import Category

# owner: the server's user, and root; local: another user of this host; browser: a page of
# another origin, whoever's browser it is open in.
Kind = Literal["owner", "local", "remote", "browser"]
# use: run models, and read; register: pass memory to the server; change: load and unload what
# the repository has, logs, traces, GRPS's online flag; send models: load what the client sends.
Action = Literal["use", "register", "change", "send models"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ACTIONS: tuple[Action, ...] = get_args(Action)

# What requests of a category do, unless their API is added with another action.
ACTION_OF: Mapping[Category, Action] = {
    "health": "use",
    "metadata": "use",
    "inference": "use",
    "model-config": "use",
    "statistics": "use",
    "shared-memory": "register",
    "model-repository": "change",
    "trace": "change",
    "logging": "change",
}
_WITHIN: Mapping[From, tuple[Kind, ...]] = {
    "owner": ("owner",),
    "local": ("owner", "local"),
    "anyone": ("owner", "local", "remote"),
}
_SETTING: Mapping[Action, str] = {
    "register": "client_shm_allow_remote",
    "change": "state_changes_from",
    "send models": "model_files_from",
}
_WHO: Mapping[Kind, str] = {
    "owner": "the server's own user on its host",
    "local": "other users of its host",
}
_WHAT: Mapping[Action, str] = {
    "register": "registering memory",
    "change": "changing the server's state",
    "send models": "loading a configuration or files that come with the request",
}
# Whoever relays requests for others says so in one of these: the kernel knows the relay only.
RELAYED = ("forwarded", "via", "x-forwarded-for")
_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.~%-]+)(?::\d{0,5})?")
_SHOWN = 100


def table(settings: Settings) -> dict[Action, tuple[Kind, ...]]:
    """Who may do what, under these settings."""
    return {
        "use": _WITHIN["anyone"],
        "register": _WITHIN["anyone" if settings.client_shm_allow_remote else "local"],
        "change": _WITHIN[settings.state_changes_from],
        "send models": _WITHIN[settings.model_files_from],
    }


class Access:
    """The table, applied.

    Args:
        settings: they name what differs from the defaults.
        server_uid: the user the server runs as.
    """

    def __init__(self, settings: Settings, server_uid: int) -> None:
        self._table = table(settings)
        self._owners = (server_uid, 0)

    def kind(self, caller: Caller) -> Kind:
        """What kind of caller it is; `browser` is told by `Origins`, from the request."""
        if caller.remote:
            return "remote"
        return "owner" if caller.uid in self._owners else "local"

    def open_to_all(self, action: Action) -> bool:
        """Whether who calls makes no difference."""
        return self._table[action] == _WITHIN["anyone"]

    def check(self, action: Action, caller: Caller) -> None:
        """Let it be done, or not.

        Raises:
            PermissionDenied: this caller may not.
        """
        if self.kind(caller) not in self._table[action]:
            who = " and ".join(_WHO[kind] for kind in self._table[action])
            raise PermissionDenied(f"{_WHAT[action]} is for {who} (setting {_SETTING[action]})")


class Origins:
    """What a request says of itself: for which host it is, and from which page it comes.

    Args:
        settings: `allowed_hosts`, `allowed_origins`.
        binds: the addresses the transport listens on, as its setting has them.
        own_name: the host's.
    """

    def __init__(self, settings: Settings, binds: Iterable[str], own_name: str) -> None:
        self._origins = frozenset(settings.allowed_origins)
        self._hosts: frozenset[str] | None = None  # any
        self._loopback = False  # any address of it counts
        if settings.allowed_hosts:
            if "*" not in settings.allowed_hosts:
                self._hosts = frozenset(map(_plain, settings.allowed_hosts))
        elif all(_is_local(bind) for bind in binds):
            self._loopback = True
            own = own_name.lower()
            self._hosts = frozenset({*_NAMES, own, own.partition(".")[0]})

    def check_host(self, host: str, name: str = "Host") -> None:
        """Take a request for this value of `Host`, or not: a page can give its own name this
        server's address, and then only `Host` tells its requests from those of our own page.

        Args:
            host: what the request is for.
            name: of the field that says so.

        Raises:
            InvalidArgument: it is malformed.
            PermissionDenied: it is not one of ours.
        """
        found = _HOST.fullmatch(host)
        if found is None:
            raise InvalidArgument(f"header {name}: '{_shown(host)}' is no host")
        plain = _plain(found[1])
        if self._hosts is None or plain in self._hosts or (self._loopback and _is_loopback(plain)):
            return
        raise PermissionDenied(
            f"header {name}: '{_shown(host)}' is no name of this server (setting allowed_hosts)"
        )

    def listed(self, origin: str) -> bool:
        """Whether pages of this origin may do what programs may."""
        return origin in self._origins

    def check_page(self, host: str, origin: str, site: str, scheme: str = "http") -> None:
        """Take a request with these marks of a browser's, or not.

        Args:
            host: `Host`.
            origin: `Origin`; empty: there is none.
            site: `Sec-Fetch-Site`; empty: there is none.
            scheme: of the request.

        Raises:
            PermissionDenied: it is a page's of another origin that is not listed.
        """
        if self.listed(origin) or site in ("same-origin", "none"):
            return
        if not site and origin in ("", f"{scheme}://{host}"):
            return
        told = f"Origin: '{_shown(origin)}'" if origin else f"Sec-Fetch-Site: '{_shown(site)}'"
        raise PermissionDenied(
            f"header {told}: pages of other origins may do nothing here (setting allowed_origins)"
        )


def _is_local(bind: str) -> bool:
    if bind.startswith("unix:"):
        return True
    found = _HOST.fullmatch(bind)
    return found is not None and ((host := _plain(found[1])) in _NAMES or _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _plain(host: str) -> str:
    """A host as it is compared: without the brackets of IPv6 or the dot of the root."""
    return host.strip().removeprefix("[").removesuffix("]").rstrip(".").lower()


def _shown(value: str) -> str:
    return ascii(value[:_SHOWN])[1:-1]
