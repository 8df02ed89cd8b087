"""Resources requested by instance groups, and resources granted by settings."""

import pytest
from msgspec import UNSET

from shmserve.core.scheduling.rate_limit_policy import (
    EVERYWHERE,
    RateLimit,
    Resource,
    amount_of,
    amounts,
    check_amounts,
    rate_limit,
)
from shmserve.errors import ConfigError
from shmserve.tensor.config_document import GroupEntry, RateLimiterEntry, ResourceEntry


def group(limiter: RateLimiterEntry | None) -> GroupEntry:
    return GroupEntry("g", "KIND_CPU", 1, UNSET if limiter is None else limiter)


def test_a_resource_is_on_the_instances_device_unless_it_is_global() -> None:
    entries = (ResourceEntry("R1", count=4), ResourceEntry("r2", True, 2), ResourceEntry("no"))
    limit = rate_limit(group(RateLimiterEntry(entries, 2)), "cuda:1")
    assert limit == RateLimit((Resource("r1", 4, "cuda:1"), Resource("r2", 2, EVERYWHERE)), 2)


def test_without_resources_an_instance_waits_for_nobody() -> None:
    assert rate_limit(group(None), "cpu") is None
    assert rate_limit(group(RateLimiterEntry((), 3)), "cpu") is None


def test_the_amount_of_a_device_goes_before_that_of_all() -> None:
    given = amounts(["R1:10", "R1:5:0", "R1:2:cpu", "R3:2:1"])
    wanted = {"cuda:0": 5, "cuda:1": 10, "cpu": 2}
    assert {d: amount_of(given, Resource("r1", 1, d)) for d in wanted} == wanted
    assert amount_of(given, Resource("r3", 1, EVERYWHERE)) == 2  # there is one: no device has it
    assert amount_of(given, Resource("r3", 1, "cpu")) is None


def test_an_instance_that_could_never_execute_is_refused() -> None:
    limit = RateLimit((Resource("r1", 4, "cpu"),))
    check_amounts(amounts(["R1:4", "R1:1:0"]), limit, "m")
    with pytest.raises(ConfigError, match=r"'m': .*resources 'r1' has count 4, but .* has 3"):
        check_amounts(amounts(["R1:3"]), limit, "m")
