"""The cache: complete, bounded, and never evicting snapshots in use."""

import os
import time
from pathlib import Path

import pytest

from shmserve.errors import DeadlineExceeded, ResourceExhausted
from shmserve.fetcher.cache import FILES, Cache


def digest(name: str) -> str:
    return name * 64


def put(cache: Cache, name: str, nbytes: int, age_s: float = 0.0) -> str:
    """Put a snapshot of one file of `nbytes` bytes, last used `age_s` seconds ago."""
    with cache.incoming(digest(name), time.monotonic()) as folder:
        cache.claim(digest(name), nbytes)
        Path(folder, "m").mkdir()
        Path(folder, "m", "file").write_bytes(b"x" * nbytes)
        Path(folder, FILES).write_bytes(b"")
        cache.publish(digest(name))
    path = Path(cache.snapshot(digest(name)), FILES)
    os.utime(path, times=(time.time() - age_s,) * 2)
    return digest(name)


def snapshots(cache: Cache) -> set[str]:
    return {name[0] for name in os.listdir(cache.file("snapshots"))}


@pytest.fixture
def both(tmp_path):
    """The caches of two services in one folder."""
    made = Cache(str(tmp_path / "cache"), 100, "a"), Cache(str(tmp_path / "cache"), 100, "b")
    yield made
    for cache in made:
        cache.close()


@pytest.fixture
def cache(both):
    return both[0]


def test_what_was_used_longest_ago_goes_first(cache: Cache) -> None:
    put(cache, "1", 40, age_s=10)
    put(cache, "2", 40, age_s=20)
    put(cache, "3", 40)
    assert snapshots(cache) == {"1", "3"}
    put(cache, "4", 100)
    assert snapshots(cache) == {"4"}


def test_what_a_service_uses_stays_and_the_new_one_is_refused(both: tuple[Cache, Cache]) -> None:
    ours, theirs = both
    first = put(ours, "1", 60, age_s=100)
    with ours.locked():
        ours.use({first})
    with (
        theirs.incoming(digest("2"), time.monotonic()),
        pytest.raises(ResourceExhausted, match="50 bytes do not fit beside 60 bytes"),
    ):
        theirs.claim(digest("2"), 50)
    assert snapshots(theirs) == {"1"}
    put(theirs, "3", 40)
    assert snapshots(theirs) == {"1", "3"}


def test_a_lease_outlives_its_fetcher_for_a_while(cache: Cache) -> None:
    ended = Cache(cache.path, 100, "c")
    first = put(ended, "1", 60)
    with ended.locked():
        ended.use({first})
    ended.close()
    with cache.locked():
        assert cache.leased() == {first}
    os.utime(cache.file("leases", "c"), times=(time.time() - 1000,) * 2)
    with cache.locked():
        assert cache.leased() == set()
    assert sorted(os.listdir(cache.file("leases"))) == ["a", "b"]


def test_an_old_lease_counts_while_its_fetcher_lives(both: tuple[Cache, Cache]) -> None:
    ours, theirs = both
    first = put(ours, "1", 60)
    with ours.locked():
        ours.use({first})
    os.utime(ours.file("leases", "a"), times=(time.time() - 1000,) * 2)
    with theirs.locked():
        assert theirs.leased() == {first}


def test_what_is_being_fetched_counts_as_a_whole_and_is_nobody_elses(both) -> None:
    ours, theirs = both
    with ours.incoming(digest("1"), time.monotonic()):
        ours.claim(digest("1"), 70)
        with pytest.raises(DeadlineExceeded), theirs.incoming(digest("1"), time.monotonic()):
            pass
        with (
            theirs.incoming(digest("2"), time.monotonic()),
            pytest.raises(ResourceExhausted, match="beside 70 bytes"),
        ):
            theirs.claim(digest("2"), 40)


def test_leftovers_are_gone_on_with_or_give_way(cache: Cache) -> None:
    with cache.incoming(digest("1"), time.monotonic()) as incoming:
        cache.claim(digest("1"), 90)
        Path(incoming, "part").write_bytes(b"x" * 30)
    with cache.incoming(digest("1"), time.monotonic()) as incoming:
        assert os.listdir(incoming) == ["part"]
    with cache.locked():
        assert cache.usage() == 30
    put(cache, "2", 80)
    assert snapshots(cache) == {"2"}
    assert os.listdir(cache.file("incoming")) == []


def test_who_waited_for_a_snapshot_finds_it_complete(cache: Cache) -> None:
    put(cache, "1", 10)
    with cache.incoming(digest("1"), time.monotonic()) as incoming:
        assert incoming == ""
    assert os.listdir(cache.file("incoming")) == []


def test_files_in_common_count_once(cache: Cache) -> None:
    first = put(cache, "1", 60)
    with cache.incoming(digest("2"), time.monotonic()) as incoming:
        Path(incoming, "m").mkdir()
        os.link(cache.file("snapshots", first, "m", "file"), f"{incoming}/m/file")
        Path(incoming, FILES).write_bytes(b"")
        cache.publish(digest("2"))
    with cache.locked():
        assert cache.usage() == 60
