"""What requests of a category do, and what a request says of itself: `Host`, `Origin`,
`Sec-Fetch-Site`. Who may do it is `core.access`' business. docs/security.md has all of it for
people.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping

from shmserve.config import Settings
from shmserve.core.access import Action
from shmserve.errors import InvalidArgument, PermissionDenied
from shmserve.frontends.oip.restricted_apis import Category

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
# Whoever relays requests for others says so in one of these: the kernel knows the relay only.
RELAYED = ("forwarded", "via", "x-forwarded-for")
_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.~%-]+)(?::\d{0,5})?")
_SHOWN = 100


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
