"""Differences between kinds of client memory, and the name of a kind in messages."""

from shmserve.core.region_kinds import BY_KEY, CUDA_MEMORY, MEMFD
from shmserve.core.registry import Region


def region(kind: str = "system", sealed: bool = False) -> Region:
    return Region("r", 1, "", 0, 64, 0, kind=kind, sealed=sealed, device_id=3)


def test_a_region_has_the_kind_that_messages_tell() -> None:
    assert region().memory is BY_KEY
    assert region(sealed=True).memory is MEMFD
    assert region("cuda").memory is CUDA_MEMORY
    assert region("of a newer generation").memory is BY_KEY, "the most fragile one"
    assert (region().on_device, region("cuda").on_device) == ("", "cuda:3")


def test_no_kind_promises_what_it_cannot_keep() -> None:
    assert [kind.has_key for kind in (BY_KEY, MEMFD, CUDA_MEMORY)] == [True, False, False]
    for kind in (BY_KEY, MEMFD, CUDA_MEMORY):
        assert kind.keeps_size or kind.has_descriptor, "who may shrink it is looked at"
        assert bool(kind.device) is not kind.has_descriptor
