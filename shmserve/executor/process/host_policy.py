"""Host policies: the CPU cores and the memory node that an instance uses (setting
`host_policies`).

A policy is applied before the model's code and libraries are loaded. Cores are set for all
existing threads. The memory node is set for the calling thread alone, the main thread, as Linux
knows no other way. Later threads inherit both from the thread that starts them.
"""

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
_MAX_NODES = 1024


class HostPolicy(Struct, frozen=True):
    """The cores and the memory of one policy. `cores`: numbers of the cores to run on; empty: the
    cores of `node`, or all. `node`: NUMA node to allocate memory from; None: any."""

    cores: frozenset[int] = frozenset()
    node: int | None = None


def parse(lines: Iterable[str]) -> HostPolicy:
    """Return the policy from lines of the settings: ``cpu-cores=0-3``, which may be repeated, and
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
    """Apply the instance's policy, if any, to this process. Raise ConfigError if the host has no
    usable core of the policy, or not the policy's node."""
    is_configured, name = _name(instance)
    if name not in policies:
        if is_configured:
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
    """Return whether the configuration names a policy, and the name of the policy to apply.
    Without a name in the configuration, the name is ``cpu``, or for example ``gpu_0`` on GPU 0."""
    places = instance_groups.places(instance_groups.read(instance.spec.config))
    configured = places[ids.instance_index(instance.name)].group.host_policy
    return bool(configured), configured or instance.device.replace("cuda:", "gpu_")


def _run_on(cores: frozenset[int], name: str) -> None:
    if not cores:
        return
    try:
        for thread in os.listdir("/proc/self/task"):  # libraries may have started threads already
            with contextlib.suppress(ProcessLookupError):  # the thread has just ended
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
    """Bind the future allocations of this thread, and of the threads it starts, to the node."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise ConfigError(f"host policy '{name}': numa-node is not supported on this architecture")
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    if node < _MAX_NODES:
        mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(number), _MPOL_BIND, mask, ctypes.c_ulong(_MAX_NODES + 1)):
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(f"host policy '{name}': memory of NUMA node {node}: {reason}")


def _numbers(text: str) -> set[int]:
    """Return the numbers in ``3`` or ``0-3``."""
    first, _, last = text.partition("-")
    return set(range(int(first), int(last or first) + 1))
