"""Caller numbers: which addresses count as one caller."""

import pytest

from shmserve.core.caller import UNKNOWN_CALLER, caller_number
from shmserve.frontends.caller_numbers import of_host


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("::ffff:192.0.2.1", "192.0.2.1"),  # the same, to a listener for both
        ("2001:db8::1", "2001:db8:0:0:ffff::2"),  # one network may choose among these addresses
        ("fe80::1%eth0", "fe80::1"),
    ],
)
def test_addresses_of_one_caller(one: str, other: str) -> None:
    assert of_host(one) == of_host(other)


def test_addresses_of_several_callers() -> None:
    hosts = ["192.0.2.1", "192.0.2.2", "::1", "2001:db8::1", "2001:db8:0:1::1", "no:address"]
    assert len({of_host(host) for host in hosts} - {UNKNOWN_CALLER}) == len(hosts)


def test_without_an_address_nobody_knows() -> None:
    assert of_host("") == UNKNOWN_CALLER


def test_numbers_have_64_bits() -> None:
    numbers = [caller_number("address", str(count)) for count in range(64)]
    assert 1 << 60 < max(numbers) < 1 << 64
