"""APIs that need a secret: the header required for each category, for every transport.

A setting is a list of ``<category>[,<category>...]:<header>=<value>``.
"""

import hmac
import re
from collections.abc import Iterable
from typing import Literal, Protocol, get_args

from shmserve.config import Settings
from shmserve.errors import ConfigError, NotConfigured, PermissionDenied
from shmserve.frontends.oip.forwarded_fields import compiled

Category = Literal[
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
GRPC_PREFIX = "triton-grpc-protocol-"  # prefix of the metadata key that carries the secret


class HeaderSource(Protocol):
    """Header fields or metadata by lower-case name."""

    def get(self, name: str, /) -> str | None: ...


class Restricted:
    """Restricted categories and their secrets. False if no category is restricted.

    Args:
        rules: the setting `http_restricted_api`, or with `grpc` `grpc_restricted_protocol`.
        grpc: whether to answer in the gRPC frontend's form, and to read each header under the
            prefix `GRPC_PREFIX`.

    Raises:
        ConfigError: a rule is malformed; the message does not show the secret.
    """

    def __init__(self, rules: Iterable[str], *, grpc: bool = False) -> None:
        self._grpc = grpc
        self._keys: dict[str, tuple[str, bytes]] = {}
        setting = "grpc_restricted_protocol" if grpc else "http_restricted_api"
        what = "protocol" if grpc else "api"
        for number, rule in enumerate(rules, 1):
            categories, colon, secret = rule.partition(":")
            header, equals, value = secret.partition("=")
            if not (colon and equals and header.strip() and value):
                raise ConfigError(
                    f"{setting}: item {number} is not <category>[,<category>]:<header>=<value>"
                )
            for category in (part.strip() for part in categories.split(",")):
                if category not in CATEGORIES:
                    raise ConfigError(f"{setting}: unknown restricted {what} '{category}'")
                if category in self._keys:
                    raise ConfigError(
                        f"{setting}: {what} '{category}' can not be specified in multiple config"
                        " groups"
                    )
                self._keys[category] = (header.strip(), value.encode())

    def __bool__(self) -> bool:
        return bool(self._keys)

    def check(self, category: Category, headers: HeaderSource) -> None:
        """Refuse a request without the secret of its category. Raise PermissionDenied if the secret
        is missing or wrong (over gRPC: NotConfigured)."""
        rule = self._keys.get(category)
        if rule is None:
            return
        header, secret = rule
        name = (GRPC_PREFIX + header if self._grpc else header).lower()
        given = headers.get(name) or ""
        if hmac.compare_digest(given.encode(errors="surrogateescape"), secret):
            return
        if self._grpc:
            raise NotConfigured(f"This protocol is restricted, expecting header '{name}'")
        raise PermissionDenied(f"This API is restricted, expecting header '{header}'")


def known(category: Category, what: str) -> Category:
    """Return the category declared for a route or an rpc. Raise ValueError if there is no such
    category; without the check `what` would be open to every caller."""
    if category not in CATEGORIES:
        raise ValueError(f"{what} has no category of the restricted APIs, but '{category}'")
    return category


def check_settings(settings: Settings) -> None:
    """Check the settings of restricted APIs and of forwarded fields, before any process starts.
    Raise ConfigError if a setting is malformed; the message names the setting."""
    Restricted(settings.http_restricted_api)
    Restricted(settings.grpc_restricted_protocol, grpc=True)
    for name in ("http_header_forward_pattern", "grpc_header_forward_pattern"):
        try:
            compiled(getattr(settings, name))
        except re.error as ex:
            raise ConfigError(f"{name}: {ex}") from None
