"""Limits of cgroups, read from folders like those of the kernel."""

import os

from shmserve.transport import cgroups


def test_the_lowest_limit_on_the_way_up_counts(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "memory.max").write_text("max\n")
    assert cgroups.memory_limit(str(tmp_path), str(membership)) is None
    (tmp_path / "a" / "memory.max").write_text("12345\n")
    assert cgroups.memory_limit(str(tmp_path), str(membership)) == 12345
    assert cgroups.memory_limit(str(tmp_path), str(tmp_path / "missing")) is None


def test_the_limit_of_the_older_hierarchy_is_found(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("9:cpu,cpuacct:/x\n4:memory:/c\n0::/\n")
    (tmp_path / "memory" / "c").mkdir(parents=True)
    (tmp_path / "memory" / "c" / "memory.limit_in_bytes").write_text("777\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroups.memory_limit(str(tmp_path), str(membership)) == 777


def test_processors_are_bounded_by_the_quota_of_each_ancestor(tmp_path):
    usable = len(os.sched_getaffinity(0))
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert cgroups.processors(str(tmp_path), str(membership)) == usable
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert cgroups.processors(str(tmp_path), str(membership)) == usable
    (tmp_path / "a" / "cpu.max").write_text("50000 100000\n")
    assert cgroups.processors(str(tmp_path), str(membership)) == 0.5


def test_processors_are_bounded_by_the_quota_of_the_older_hierarchy(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("9:cpu,cpuacct:/x\n")
    (tmp_path / "cpu" / "x").mkdir(parents=True)
    (tmp_path / "cpu" / "x" / "cpu.cfs_quota_us").write_text("-1\n")
    assert cgroups.processors(str(tmp_path), str(membership)) == len(os.sched_getaffinity(0))
    (tmp_path / "cpu" / "x" / "cpu.cfs_quota_us").write_text("25000\n")
    assert cgroups.processors(str(tmp_path), str(membership)) == 0.25


def test_throttled_periods_of_all_ancestors_are_added(tmp_path):
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert cgroups.throttled(str(tmp_path), str(membership)) == 0
    (tmp_path / "a" / "b" / "cpu.stat").write_text("usage_usec 5\nnr_throttled 3\n")
    (tmp_path / "a" / "cpu.stat").write_text("nr_periods 9\nnr_throttled 4\n")
    assert cgroups.throttled(str(tmp_path), str(membership)) == 7


def test_a_limit_below_the_smallest_service_is_told():
    assert cgroups.too_little_memory(None) == cgroups.too_little_memory(64 << 20) == ""
    told = cgroups.too_little_memory((32 << 20) + 1)
    assert told.startswith("this cgroup's memory limit is 32 MiB (MemoryMax, docker --memory)")
