"""Rate limit policy: resources required by the `rate_limiter` of an instance group, and the
amounts in the settings."""

from collections.abc import Iterable, Mapping

from msgspec import UNSET, Struct

from shmserve.core.device_names import device_name
from shmserve.errors import ConfigError
from shmserve.tensor.config_document import GroupEntry

EVERYWHERE = ""  # in place of a device name

# Amount of a resource, by name and device ("cpu", "cuda:0"). EVERYWHERE: amount on each device.
Amounts = Mapping[tuple[str, str], int]


class Resource(Struct, frozen=True, array_like=True):
    """Required count of a resource on one device; EVERYWHERE: one amount serves all devices."""

    name: str
    count: int
    device: str = EVERYWHERE

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.device


class RateLimit(Struct, frozen=True, array_like=True):
    """Resources held by an instance during an execution. `priority` 2 gets half as many turns as
    priority 1."""

    resources: tuple[Resource, ...]
    priority: int = 1


def rate_limit(group: GroupEntry, device: str) -> RateLimit | None:
    """Return the limit for an instance of the group on a device, or None if no resources are
    required."""
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
    """Parse the setting `rate_limit_resources`: texts "name:count" or "name:count:device"."""
    parsed = {}
    for text in texts:
        name, count, *device = text.lower().split(":")
        where = device[0] if device else EVERYWHERE
        parsed[name, device_name(int(where)) if where.isdigit() else where] = int(count)
    return parsed


def amount_of(given: Amounts, resource: Resource) -> int | None:
    """Return the amount of a resource by the settings, or None if the settings name no amount."""
    if resource.device == EVERYWHERE:  # a device in the setting is ignored for a global resource
        return next((count for (name, _), count in given.items() if name == resource.name), None)
    return given.get(resource.key, given.get((resource.name, EVERYWHERE)))


def check_amounts(given: Amounts, limit: RateLimit, model: str) -> None:
    """Check that an instance can ever execute. Raise ConfigError if the instance needs more of a
    resource than the settings provide."""
    for resource in limit.resources:
        amount = amount_of(given, resource)
        if amount is not None and resource.count > amount:
            raise ConfigError(
                f"model '{model}': instance_group.rate_limiter.resources '{resource.name}' has "
                f"count {resource.count}, but rate_limit_resources has {amount}"
            )
