"""What `rate_limiter` of an instance group asks for, and what the settings say there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import UNSET, Struct

from shmserve.core.device_names import device_name
from shmserve.errors import ConfigError
from shmserve.tensor.config_document import GroupEntry

EVERYWHERE = ""  # instead of a device

# How much there is of a resource, by its name and device ("cpu", "cuda:0"); EVERYWHERE: on each
Amounts = Mapping[tuple[str, str], int]


class Resource(Struct, frozen=True, array_like=True):
    """So much of something on one device; EVERYWHERE: there is one for all devices."""

    name: str
    count: int
    device: str = EVERYWHERE

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.device


class RateLimit(Struct, frozen=True, array_like=True):
    """What an instance holds while it executes. Of `priority` 2 it gets half the turns of 1."""

    resources: tuple[Resource, ...]
    priority: int = 1


def rate_limit(group: GroupEntry, device: str) -> RateLimit | None:
    """What an instance of the group on a device needs; None: nothing."""
    entry = group.rate_limiter
    if entry is UNSET:
        return None
    resources = tuple(
        Resource(each.name.lower(), each.count, EVERYWHERE if each.is_global else device)
        for each in entry.resources
        if each.count
    )
    return RateLimit(resources, max(1, entry.priority)) if resources else None


def amounts(texts: Iterable[str]) -> dict[tuple[str, str], int]:
    """The setting `rate_limit_resources`: each "name:count" or "name:count:device"."""
    found = {}
    for text in texts:
        name, count, *device = text.lower().split(":")
        where = device[0] if device else EVERYWHERE
        found[name, device_name(int(where)) if where.isdigit() else where] = int(count)
    return found


def amount_of(given: Amounts, resource: Resource) -> int | None:
    """How much the settings say there is of it; None: they do not say."""
    if resource.device == EVERYWHERE:  # a device that is given for it means nothing
        return next((count for (name, _), count in given.items() if name == resource.name), None)
    return given.get(resource.key, given.get((resource.name, EVERYWHERE)))


def check_amounts(given: Amounts, limit: RateLimit, model: str) -> None:
    """
    Raises:
        ConfigError: an instance needs more of a resource than there is: it would never execute.
    """
    for resource in limit.resources:
        amount = amount_of(given, resource)
        if amount is not None and resource.count > amount:
            raise ConfigError(
                f"model '{model}': instance_group.rate_limiter.resources '{resource.name}' has "
                f"count {resource.count}, but rate_limit_resources has {amount}"
            )
