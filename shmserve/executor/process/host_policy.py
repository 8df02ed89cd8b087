"""Which cores and which memory an instance uses: the policy of `host_policies` that it has.

Applied before the model's code and libraries are loaded: cores to the threads there are, memory to
the calling one alone, the main thread, as Linux does; those that are made later have it from
whichever starts them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
from collections.abc import Iterable, Mapping

from msgspec import Struct

from shmserve import ids
from shmserve.errors import ConfigError
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.triton_config import instance_groups

log = logging.getLogger(__name__)

_NODES = "/sys/devices/system/node"
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call
_MPOL_BIND = 2
_MOST_NODES = 1024


class HostPolicy(Struct, frozen=True):
    """`cores`: those it may run on; empty: all. `node`: whose memory it takes, and, without
    `cores`, whose cores; None: any."""

    cores: frozenset[int] = frozenset()
    node: int | None = None


def parse(lines: Iterable[str]) -> HostPolicy:
    """A policy of the settings: ``cpu-cores=0-3``, which may be there several times, and
    ``numa-node=0``."""
    cores: set[int] = set()
    node = None
    for line in lines:
        key, _, value = line.partition("=")
        if key == "numa-node":
            node = int(value)
        else:
            cores |= _numbers(value)
    return HostPolicy(frozenset(cores), node)


def apply(instance: Instance, policies: Mapping[str, Iterable[str]]) -> None:
    """Keep this process to the policy of its instance, if there is one.

    Raises:
        ConfigError: none of its cores, or not its node, can be used on this host.
    """
    asked, name = _name(instance)
    if name not in policies:
        if asked:
            log.info("configuration: instance_group.host_policy: no effect (no policy '%s')", name)
        return
    policy = parse(policies[name])
    cores = policy.cores
    if policy.node is not None:
        cores = cores or _cores_of(policy.node, name)
        _bind_memory(policy.node, name)
    _run_on(cores, name)
    log.info("host policy %s: cores %s", name, sorted(os.sched_getaffinity(0)))


def _name(instance: Instance) -> tuple[bool, str]:
    """Whether the configuration asks for a policy, and the name of the one that holds; without
    asking that is ``cpu``, or ``gpu_0`` on the GPU 0."""
    places = instance_groups.places(instance_groups.read(instance.spec.config))
    asked = places[ids.instance_index(instance.name)].group.host_policy
    return bool(asked), asked or instance.device.replace("cuda:", "gpu_")


def _run_on(cores: frozenset[int], name: str) -> None:
    if not cores:
        return
    try:
        for thread in os.listdir("/proc/self/task"):  # libraries may have started some already
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), cores)
    except OSError as ex:
        raise ConfigError(
            f"host policy '{name}': none of the cores {sorted(cores)} can be used here"
        ) from ex


def _cores_of(node: int, name: str) -> frozenset[int]:
    try:
        with open(f"{_NODES}/node{node}/cpulist", encoding="ascii") as file:
            return frozenset().union(*map(_numbers, filter(None, file.read().strip().split(","))))
    except OSError as ex:
        raise ConfigError(f"host policy '{name}': there is no NUMA node {node} here") from ex


def _bind_memory(node: int, name: str) -> None:
    """What this thread, and those it starts, allocate from now on lies on the node."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise ConfigError(f"host policy '{name}': numa-node is not supported on this architecture")
    mask = (ctypes.c_ulong * (_MOST_NODES // 64))()
    if node < _MOST_NODES:
        mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), _MPOL_BIND, mask, ctypes.c_ulong(_MOST_NODES + 1)):
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"host policy '{name}': memory of NUMA node {node}: {reason}")


def _numbers(text: str) -> set[int]:
    """Those of ``3``, or of ``0-3``."""
    first, _, last = text.partition("-")
    return set(range(int(first), int(last or first) + 1))
