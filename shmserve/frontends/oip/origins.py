"""Checks of `Host`, `Origin` and `Sec-Fetch-Site`, and the action of each category of requests.

`core.access` decides which callers may perform an action. docs/security.md describes all access
checks for users.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping

from shmserve.config import Settings
from shmserve.core.access import Action
from shmserve.errors import InvalidArgument, PermissionDenied
from shmserve.frontends.oip.restricted_apis import Category

# The action of requests of a category, for APIs added without an action of their own.
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
# Fields added by a proxy that relays requests. The kernel identifies the proxy only.
RELAYED = ("forwarded", "via", "x-forwarded-for")
_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.~%-]+)(?::\d{0,5})?")
_SHOWN = 100


class Origins:
    """Checks on the host a request is for and on the web page a request comes from. `settings`:
    `allowed_hosts`, `allowed_origins`. `binds`: addresses the transport listens on, in the form of
    the setting. `own_name`: the machine's host name."""

    def __init__(self, settings: Settings, binds: Iterable[str], own_name: str) -> None:
        self._origins = frozenset(settings.allowed_origins)
        self._hosts: frozenset[str] | None = None  # None: any host
        self._loopback = False  # True: any loopback address is allowed, too
        if settings.allowed_hosts:
            if "*" not in settings.allowed_hosts:
                self._hosts = frozenset(map(_plain, settings.allowed_hosts))
        elif all(_is_local(bind) for bind in binds):
            self._loopback = True
            own = own_name.lower()
            self._hosts = frozenset({*_NAMES, own, own.partition(".")[0]})

    def check_host(self, host: str, place: str = "header Host") -> None:
        """Refuse a request whose host is no name of this server.

        The check stops DNS rebinding. A web page can have its own name resolve to this server's
        address. Only the host then distinguishes requests of that page from requests of the
        server's own page.

        Args:
            host: value of the field.
            place: place of the value in the request, for messages.

        Raises:
            InvalidArgument: the value is malformed.
            PermissionDenied: the host is no name of this server.
        """
        match = _HOST.fullmatch(host)
        if match is None:
            raise InvalidArgument(f"{place}: '{_shown(host)}' is no host")
        plain = _plain(match[1])
        if self._hosts is None or plain in self._hosts or (self._loopback and is_loopback(plain)):
            return
        raise PermissionDenied(
            f"{place}: '{_shown(host)}' is no name of this server (setting allowed_hosts)"
        )

    def listed(self, origin: str) -> bool:
        """Return True if pages of this origin have the rights of programs (`allowed_origins`)."""
        return origin in self._origins

    def check_page(self, host: str, origin: str, site: str, scheme: str = "http") -> None:
        """Refuse a request from a web page of another, unlisted origin.

        Args:
            host: `Host`.
            origin: `Origin`; empty if absent.
            site: `Sec-Fetch-Site`; empty if absent.
            scheme: of the request.

        Raises:
            PermissionDenied: the page is of another origin, which is not listed.
        """
        if self.listed(origin) or site in ("same-origin", "none"):
            return
        if not site and origin in ("", f"{scheme}://{host}"):
            return
        field = f"Origin: '{_shown(origin)}'" if origin else f"Sec-Fetch-Site: '{_shown(site)}'"
        raise PermissionDenied(
            f"header {field}: pages of other origins may do nothing here (setting allowed_origins)"
        )


def _is_local(bind: str) -> bool:
    if bind.startswith("unix:"):
        return True
    match = _HOST.fullmatch(bind)
    return match is not None and ((host := _plain(match[1])) in _NAMES or is_loopback(host))


def is_loopback(host: str) -> bool:
    """Return True for a loopback address, False for other addresses and for names."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _plain(host: str) -> str:
    """Return a host in the form used for comparison: lower case, without brackets (IPv6) and
    without the dot of the DNS root."""
    return host.strip().removeprefix("[").removesuffix("]").rstrip(".").lower()


def _shown(value: str) -> str:
    return ascii(value[:_SHOWN])[1:-1]
